"""A served model whose tables are cached on the GPU predicts the bits of the same model without that cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import viviane as vv
from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.serving import InferenceSession
from viviane.serving.parameter_server import TableSettings
from viviane.store.device_cache import DeviceCacheTier

IDS = {"item": 60, "city": 5, "user": 30}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    columns = [{"name": name, "num_ids": count} for name, count in IDS.items()]
    schema = vv.Schema(labels=[{"name": "y"}], categorical=columns)
    model = vv.Model(vv.Solver(device="cpu", batch_size=32), schema, name="ctr")
    model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
    model.compile(vv.AdaGrad(lr=0.1))
    for seed in range(3):
        model.trainer.train_step(Batch.from_columns(schema, {**rows_of(seed), "y": np.arange(32) % 2}))
    return Path(model.save(tmp_path_factory.mktemp("device") / "ctr"))


def rows_of(seed: int, count: int = 32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, ids, count) for name, ids in IDS.items()}


def session_of(saved: Path, device: torch.device, clause: dict[str, Any]) -> InferenceSession:
    return InferenceSession(saved, device=device.type, tables=clause, warm_up=(), instances=1)


@pytest.mark.parametrize(
    "cache",
    [{"share": 1.0}, {"rows": 3}, {"rows": 6, "host_rows": 12, "eviction": "random"}, {"share": 0.5, "warm_up": False}],
)
def test_scores_have_the_bits_of_the_other_tiers(saved: Path, device: torch.device, cache: dict[str, Any]) -> None:
    clause = {"cache": {"place": "device", **cache}, "host": {}}
    with session_of(saved, device, {"cache": None}) as plain, session_of(saved, device, clause) as session:
        assert session.tables is not None
        for seed in range(4):
            rows = rows_of(seed, 12)
            assert np.array_equal(session.predict(rows), plain.predict(rows))
            assert session.tables.mover.drain(60)
        for status in session.tables.status()["tables"]:
            first = status["tiers"][0]
            assert first["tier"] == "device cache"
            assert 0 < first["hits"] + first["misses"] <= 48  # id 0 reads zeros
            assert status["degraded"] == status["deferred"] == 0
            assert first["misses"] == 0 or cache != {"share": 1.0}


def test_changes_are_visible_in_the_next_lookup(saved: Path, device: torch.device) -> None:
    clause = {"cache": {"place": "device", "share": 1.0}, "host": {}}
    with session_of(saved, device, clause) as session:
        assert session.tables is not None
        rows = {name: np.full(2, 3) for name in IDS}
        before = session.predict(rows)
        for hierarchy in session.tables.hierarchies.values():
            tier = hierarchy.levels[0].tier
            assert isinstance(tier, DeviceCacheTier)
            tier.replace(np.array([3]), np.full((1, hierarchy.layout.row_bytes), 63, np.uint8))
        assert (session.predict(rows) != before).all()
        assert session.predict({name: np.full(1, 2) for name in IDS}).shape == (1,)


def test_a_threshold_answers_with_defaults_and_fetches_beside(saved: Path, device: torch.device) -> None:
    clause = {"cache": {"place": "device", "share": 1.0, "warm_up": False}, "hit_rate_threshold": 0.01}
    with session_of(saved, device, clause) as session, session_of(saved, device, {"cache": None}) as plain:
        assert session.tables is not None
        rows = rows_of(1, 8)
        some = {name: values[:4] for name, values in rows.items()}
        assert np.array_equal(session.predict(some), plain.predict(some))  # nothing is there yet: below any threshold
        assert session.tables.mover.drain(60)
        session.predict(rows)
        assert sum(one["deferred"] for one in session.tables.status()["tables"]) > 0
        assert session.tables.mover.drain(60)
        assert np.array_equal(session.predict(rows), plain.predict(rows))


def test_host_rows_without_a_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="host_rows"):
        TableSettings.from_dict({"cache": {"host_rows": 5}})
    with pytest.raises(ConfigError, match="place"):
        TableSettings.from_dict({"cache": {"place": "gpu"}})

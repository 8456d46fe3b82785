"""Captured steps of tables in tiers against eager steps and tables in memory: bits, errors, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "embedding"))
from click_model import SCHEMA, ClickModel
from replayed_on_cpu import let_replay, replays
from staged import use_staged
from test_captured_step import fixed_batch, gpu, train_and_settle

import viviane as vv
from viviane.batch import Batch
from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError, KeyRangeError, NumericsError
from viviane.data import write_dataset
from viviane.embedding import CachedStorage, CacheSettings
from viviane.embedding.module_parts import collections_of
from viviane.schema import Schema
from viviane.store.slots import CacheFullError
from viviane.training import Trainer
from viviane.training.look_ahead import LookAhead

__all__ = ["replays"]
BASE = Solver(batch_size=8, lr=0.02, device="cpu", warmup_steps=5, decay_start=8, decay_steps=9, end_lr=1e-3)
ROW_BYTES = {"user": 3 * 4 * 4 + 22, "item": 2 * 4 * 4 + 18}
ROWS = {"user": 20, "item": 28}
"""That have slots: of 50 users, and of 30 items; a batch of eight rows has up to 8 and 30 of them."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU a "device" in host memory plans slots, and a replay runs the captured code again."""
    if request.param == "cpu":
        request.getfixturevalue("replays")
        use_staged(monkeypatch, maps_memory=True, longest=0.0005)
    return request.param


def trainer_of(device: str, graph: bool, *, tiers: bool, rows: dict[str, int] = ROWS, **settings: Any) -> Trainer:
    cache = CacheSettings(tables={name: rows[name] * ROW_BYTES[name] for name in rows}) if tiers else None
    solver = BASE.model_copy(update={"cuda_graph": graph, "device": device, **settings})
    module = ClickModel(cache=cache, device=device)
    trainer = Trainer(module, SCHEMA, solver, Adam(), progress=False, tensorboard=False)
    return let_replay(trainer) if device == "cpu" else trainer


def batch_of(seed: int, num_rows: int = 8, **changed: object) -> Batch:
    ids = {"item": [3 + (seed + i) % 5 for i in range(num_rows)], "seen": [[3 + seed % 27, 4, 5]] * num_rows}
    return fixed_batch(num_rows, seed, **{**ids, **changed})


def train(trainer: Trainer, batches: list[Batch], ahead: int = 3) -> list[float]:
    """Train as `fit` does: batches are announced before their step."""
    look = LookAhead(trainer.module)
    assert look.is_needed == any(isinstance(one, CachedStorage) for one in trainer.module.tables.all_storages())
    there = [one.to(trainer.device) for one in batches]
    losses, announced = [], 0
    for i, batch in enumerate(there):
        while ahead and announced < min(len(there), i + 1 + ahead) and look.announce(there[announced]):
            announced += 1
        losses.append(trainer.train_step(batch))
        look.forget(batch)
        announced = max(announced, i + 1)
    trainer.settle()
    return torch.stack(losses).tolist()


def content(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: part.cpu() for name, part in trainer.module.state_dict().items()}


def differing(one: Trainer, other: Trainer) -> list[str]:
    a, b = content(one), content(other)
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("settings", [{}, {"clip_grad_norm": 0.05}], ids=str)
def test_replays_give_the_bits_of_eager_steps_and_of_tables_in_memory(
    device: str, settings: dict[str, Any], ahead: int
) -> None:
    batches = [batch_of(seed) for seed in range(24)]
    memory = trainer_of(device, False, tiers=False, **settings)
    eager = trainer_of(device, False, tiers=True, **settings)
    replayed = trainer_of(device, True, tiers=True, **settings)
    losses = []
    for one in (memory, eager, replayed):
        torch.manual_seed(1)
        losses.append(train(one, batches, ahead))
    assert losses[0] == losses[1] == losses[2]
    assert not differing(memory, eager)
    assert not differing(memory, replayed)
    assert replayed.cuda_graph == "replayed: 1 shape(s) captured, 23 steps replayed"
    [storage] = [one for one in replayed.module.tables.all_storages() if isinstance(one, CachedStorage)]
    stats = storage.tier_stats()
    assert stats["host"].rows_written > 50
    assert stats["memory"].misses > 50


def test_shapes_freezing_and_evaluation_between_replays(device: str) -> None:
    found = []
    for tiers in (False, True):
        trainer = trainer_of(device, True, tiers=tiers)
        torch.manual_seed(1)
        losses = train(trainer, [batch_of(seed) for seed in range(6)])
        losses += train(trainer, [batch_of(seed, 5) for seed in range(6, 10)])
        trainer.module.eval()
        with torch.no_grad():
            losses.append(float(trainer.module(batch_of(77, 30).to(trainer.device)).sum()))
        trainer.module.train()
        trainer.module.tables.freeze("item")
        losses += train(trainer, [batch_of(seed) for seed in range(10, 16)])
        trainer.module.tables.unfreeze("item")
        losses += train(trainer, [batch_of(seed) for seed in range(16, 20)])
        found.append((losses, trainer))
    assert found[0][0] == found[1][0]
    assert not differing(found[0][1], found[1][1])
    assert found[0][1].cuda_graph == found[1][1].cuda_graph
    assert found[1][1].stepper.captured.num_replays > 10


@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"price": [0.0] * 5 + [float("nan")] + [0.0] * 2}, NumericsError, "dense column 'price', row 5"),
        pytest.param({"user": [9] * 7 + [77]}, KeyRangeError, "feature 'user', table 'user', row 7.*batch 99"),
    ],
)
def test_a_bad_batch_that_was_announced_moves_nothing_and_is_named(
    device: str, bad: dict[str, Any], error: type[Exception], match: str, later: int
) -> None:
    truth, replayed = (trainer_of(device, graph, tiers=True) for graph in (False, True))
    for one in (truth, replayed):
        torch.manual_seed(1)
        train(one, [batch_of(seed) for seed in range(8)])
    with pytest.raises(error, match=match):
        train(
            replayed, [batch_of(8, user=[11] * 8, price=[0.0] * 8), batch_of(99, **bad), *map(batch_of, range(later))]
        )
    assert replayed.step == 9
    torch.manual_seed(2)
    replayed.module.tables.end_ahead()
    rest = train(replayed, [batch_of(seed) for seed in range(20, 26)])
    assert all(torch.isfinite(torch.tensor(rest)))
    assert not any(bool(one.isnan().any()) for one in content(replayed).values())


def test_a_batch_that_does_not_fit_names_the_memory(device: str) -> None:
    trainer = trainer_of(device, True, tiers=True, rows={"user": 12, "item": 30})
    train(trainer, [batch_of(seed, 8, user=[3 + seed % 9] * 8) for seed in range(6)])
    assert trainer.stepper.captured.num_replays == 5
    before = content(trainer)
    with pytest.raises(CacheFullError, match=r"(?s)table 'user'.*20 distinct rows.*12 rows"):
        train_and_settle(trainer, [batch_of(seed, 20, user=list(range(3, 23))).to(trainer.device) for seed in range(3)])
    assert all(torch.equal(before[name], part) for name, part in content(trainer).items())


@gpu
def test_keys_other_than_those_of_the_batch_are_refused_in_a_graph() -> None:
    class Twice(ClickModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            return super().forward(batch) + super().forward(batch)

    cache = CacheSettings(tables={name: ROWS[name] * ROW_BYTES[name] for name in ROWS})
    solver = BASE.model_copy(update={"cuda_graph": True, "device": "cuda"})
    trainer = Trainer(Twice(cache=cache, device="cuda"), SCHEMA, solver, Adam(), progress=False, tensorboard=False)
    with pytest.raises(ConfigError, match="giving rows of tables in tiers their slots cannot be recorded"):
        train(trainer, [batch_of(seed) for seed in range(4)])


@gpu
def test_fit_replays_steps_whose_rows_it_fetches_ahead(tmp_path: Path) -> None:
    schema = Schema(
        labels=[{"name": "click"}],
        dense=[{"name": "price"}],
        categorical=[{"name": "user", "num_ids": 600}, {"name": "item", "num_ids": 400}],
    )
    rng = np.random.default_rng(0)
    rows = {
        "click": (rng.random(2048) < 0.4).astype("float32"),
        "price": rng.normal(size=2048).astype("float32"),
        "user": (3 + 597 * rng.random(2048) ** 3).astype("int32"),
        "item": (3 + 397 * rng.random(2048) ** 3).astype("int32"),
    }
    data = write_dataset(tmp_path / "train", schema, [rows], rows_per_group=256)
    found = []
    for memory in (None, 50_000):
        solver = Solver(batch_size=32, lr=0.01, device="cuda", clip_grad_norm=1.0, epochs=2, embedding_memory=memory)
        model = vv.Model(solver, schema)
        model.add(vv.zoo.DeepFM(dim=3, deep_mlp=[8]))
        model.compile(Adam())
        history = model.fit(data, run_folder=tmp_path / f"run {memory is None}")
        losses = [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in history.rows]
        found.append((losses, {name: part.cpu() for name, part in model.module.state_dict().items()}))
        assert model.trainer.cuda_graph.startswith("replayed: 1 shape"), model.trainer.cuda_graph
        assert model.trainer.stepper.captured.num_replays > 100
        storages = [one for part in collections_of(model.module).values() for one in part.all_storages()]
        assert any(isinstance(one, CachedStorage) and one.tiers for one in storages) == (memory is not None)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, found[1][1][name]) for name, one in found[0][1].items())

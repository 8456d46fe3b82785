"""fit, save, resume and evaluate with tables in tiers: losses, files and bits of a run with all tables in memory."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from viviane.config import AdaGrad, Adam, Solver
from viviane.core.errors import ConfigError
from viviane.data import Dataset, write_dataset
from viviane.embedding import CachedStorage
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.module_parts import collections_of
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.schema import Schema
from viviane.training import Callback, read_manifest
from viviane.zoo import DeepFM

SCHEMA = Schema(
    labels=[{"name": "click"}],
    dense=[{"name": "price"}],
    categorical=[
        {"name": "user", "num_ids": 600},
        {"name": "item", "num_ids": 400},
        {"name": "seen", "num_ids": 400, "kind": "multi_hot", "vocabulary": "item", "max_length": 4},
    ],
)
ROW = 4 * 4 * 3 + 22
MEMORY = {"user": 130 * ROW, "item": 150 * ROW}


def make_rows(count: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def ids(high: int, size: int) -> np.ndarray:
        return (3 + (high - 3) * rng.random(size) ** 3).astype("int32")

    user, item = ids(600, count), ids(400, count)
    return {
        "click": (rng.random(count) < 1 / (1 + np.exp(-2 * np.sin(user) - 2 * np.cos(item)))).astype("float32"),
        "price": rng.normal(size=count).astype("float32"),
        "user": user,
        "item": item,
        "seen": [ids(400, length).tolist() for length in rng.integers(0, 4, count)],
    }


def make_model(optimizer: Any = None, tables: Any = None, **solver: Any) -> Model:
    settings = {"batch_size": 32, "lr": 0.01, "device": "cpu", "clip_grad_norm": 1.0, "checkpoint_every": 8}
    model = Model(Solver(**{**settings, **solver}), SCHEMA, name="small")
    model.add(Input(label="label", dense="dense", sparse="cats"))
    model.add(SparseEmbedding("emb", bottom="cats", dim=4, tables=tables or {}))
    model.add(DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(DenseLayer("x", "Concat", bottom=["flat", "dense"]))
    model.add(DenseLayer("logit", "InnerProduct", bottom="x", num_output=1))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile(Adam(), optimizer or Adam())
    return model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "train", SCHEMA, [make_rows(1024, 0)], rows_per_group=128)
    write_dataset(folder / "valid", SCHEMA, [make_rows(200, 1)])
    return folder


class Pause(Callback):
    """Gives a test the time to kill the process at a step."""

    def on_step_end(self, step: int, loss: torch.Tensor) -> None:
        time.sleep(0.02)


def fit(data: Path, run: Path, *, resume: bool = False, pause: bool = False, optimizer: Any = None, **solver: Any):
    model = make_model(optimizer, **solver)
    callbacks = [Pause()] if pause else []
    options = {"run_folder": run, "resume": resume, "callbacks": callbacks}
    history = model.fit(Dataset(data / "train"), Dataset(data / "valid"), **options)
    return model, history


def files_of(run: Path) -> dict[str, str]:
    """The check sums of the newest checkpoint's weights and state."""
    newest = max(run.glob("checkpoints/step-*"))
    entries = read_manifest(newest).files
    return {name: one.sha256 for name, one in entries.items() if "history" not in name and "progress" not in name}


def comparable(history: Any) -> list[dict[str, Any]]:
    """Rows without what a clock decides."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in history.rows]


def tiered(model: Model) -> list[CachedStorage]:
    every = [one for part in collections_of(model.module).values() for one in part.all_storages()]
    return [one for one in every if isinstance(one, CachedStorage) and one.tiers]


@pytest.mark.parametrize("optimizer", [Adam(), AdaGrad(row_wise=True)], ids=["adam", "row-wise adagrad"])
def test_losses_and_checkpoints_are_those_of_tables_in_memory(data: Path, tmp_path: Path, optimizer: Any) -> None:
    truth, expected = fit(data, tmp_path / "memory", optimizer=optimizer, epochs=1)
    model, history = fit(data, tmp_path / "tiers", optimizer=optimizer, epochs=1, embedding_memory=MEMORY)
    assert tiered(model)
    assert not tiered(truth)
    assert comparable(history) == comparable(expected)
    assert files_of(tmp_path / "tiers") == files_of(tmp_path / "memory")
    stats = tiered(model)[0].tier_stats()
    assert stats["memory"].misses > 0
    assert stats["file"].rows_written > 0
    valid = Dataset(data / "valid")
    assert model.evaluate(valid) == truth.evaluate(valid)
    assert (model.predict(valid) == truth.predict(valid)).all()


def test_the_progress_line_and_the_report_show_hits_and_bytes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from viviane.report import write_report
    from viviane.training import progress

    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    model = make_model(embedding_memory=MEMORY)
    model.fit(Dataset(data / "train"), run_folder=tmp_path / "run", verbose=1)
    assert "% of rows in memory" in capsys.readouterr().err
    counts = json.loads((tmp_path / "run" / "tiers.json").read_text())
    assert counts["tables"]["user"]["rows_in_memory"] == 130
    assert counts["tiers"]["memory"]["misses"] > 0
    assert counts["tiers"]["file"]["bytes_written"] > 0
    page = write_report(tmp_path / "run").read_text()
    assert "Tables in tiers" in page
    assert "130 (21.7%)" in page
    make_model().fit(Dataset(data / "train"), run_folder=tmp_path / "plain")
    assert not (tmp_path / "plain" / "tiers.json").exists()


def test_memory_as_an_option_of_a_table_trains_to_the_same_bits(data: Path) -> None:
    row = 4 * 4 * 3 + 22
    whole = make_model(epochs=1)
    model = make_model(epochs=1, tables={"user": {"memory": 130 * row}})
    both = make_model(epochs=1, tables={"user": {"memory": "1 GB"}}, embedding_memory={"user": 140 * row})
    for one in (whole, model, both):
        one.fit(Dataset(data / "train"))
    [storage] = tiered(model)
    assert storage.room["user"] == 130
    assert tiered(both)[0].room["user"] == 140
    assert not tiered(make_model(tables={"user": {"memory": "1 GB"}}))
    state = whole.module.state_dict()
    for other in (model.module.state_dict(), both.module.state_dict()):
        assert state.keys() == other.keys()
        assert [name for name, one in state.items() if not torch.equal(one, other[name])] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "2 gibs"}, "not a memory size"),
        ({"memory": 0}, "must be positive"),
        ({"memory": "1 GB", "dynamic": {"memory": "file"}}, "size of memory, and a place of its own"),
        ({"memory": 1}, "too small for one row"),
    ],
)
def test_a_size_of_a_table_that_cannot_be_is_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_model(tables={"user": options})


@pytest.mark.parametrize("saved_in", [None, MEMORY], ids=["memory", "tiers"])
def test_a_checkpoint_of_either_kind_resumes_in_the_other(data: Path, tmp_path: Path, saved_in: Any) -> None:
    fit(data, tmp_path / "straight", epochs=1)
    run = tmp_path / "run"
    fit(data, run, epochs=1, max_steps=21, embedding_memory=saved_in)
    resumed_in = None if saved_in else MEMORY
    fit(data, run, epochs=1, resume=True, embedding_memory=resumed_in)
    assert files_of(run) == files_of(tmp_path / "straight")


RAW = Schema(
    labels=[{"name": "click"}], dense=[{"name": "price"}],
    categorical=[{"name": "user", "num_ids": None}, {"name": "item", "num_ids": 400}],
)  # fmt: skip


def fit_raw(data: Path, run: Path, *, resume: bool = False, **solver: Any) -> tuple[Model, Any]:
    """Train on raw ids: the table of users is dynamic."""
    model = Model(Solver(batch_size=32, lr=0.01, device="cpu", checkpoint_every=8, **solver), RAW, name="raw")
    model.add(DeepFM(dim=4, deep_mlp=[8]))
    model.compile(Adam())
    return model, model.fit(Dataset(data / "train", RAW), run_folder=run, resume=resume, epochs=1)


@pytest.mark.parametrize("memory", [{"user": "2 kB"}, "20 kB"], ids=["by table", "of all"])
def test_dynamic_tables_in_files_are_those_in_memory(data: Path, tmp_path: Path, memory: Any) -> None:
    rows = make_rows(512, 5)
    rows["user"] = rows["user"].astype("int64") * 10**15 - 7
    write_dataset(tmp_path / "raw" / "train", RAW, [{name: rows[name] for name in RAW.column_names}])
    raw, work = tmp_path / "raw", tmp_path / "work"
    truth, expected = fit_raw(raw, tmp_path / "memory")
    model, history = fit_raw(raw, tmp_path / "file", embedding_memory=memory, embedding_folder=str(work))
    kinds = [
        one.table.table.memory
        for part in collections_of(model.module).values()
        for one in part.all_storages()
        if isinstance(one, DynamicStorage)
    ]
    assert set(kinds) == {"file"}
    assert list(work.glob("*")) == []
    assert comparable(history) == comparable(expected)
    assert files_of(tmp_path / "file") == files_of(tmp_path / "memory")
    assert (model.predict(Dataset(raw / "train")) == truth.predict(Dataset(raw / "train"))).all()
    fit_raw(raw, tmp_path / "again", max_steps=9)
    fit_raw(raw, tmp_path / "again", resume=True, embedding_memory=memory)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "memory")


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(data: Path, tmp_path: Path) -> None:
    fit(data, tmp_path / "straight", epochs=1, embedding_memory=MEMORY)
    run, chance = tmp_path / "run", random.Random(3)
    for wanted in (8, 16):
        words = [sys.executable, __file__, str(data), str(run)]
        process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        deadline = time.monotonic() + 120
        while not any(int(one.name[5:]) >= wanted for one in run.glob("checkpoints/step-*")):
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    fit(data, run, epochs=1, resume=True, embedding_memory=MEMORY)
    assert files_of(run) == files_of(tmp_path / "straight")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines


def test_tables_that_do_not_fit_are_placed_in_tiers_and_one_line_says_so(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import viviane.model.table_memory

    monkeypatch.setattr(viviane.model.table_memory, "free_memory", lambda: 1000 * 4 * 4 * 3)
    with caplog.at_level("INFO"):
        model = make_model()
    assert tiered(model)
    assert [line for line in caplog.messages if "the others lie on disk" in line]


def test_what_does_not_go_with_tiers_is_refused(data: Path) -> None:
    train = Dataset(data / "train")
    with pytest.raises(ConfigError, match="running mean needs tables that are completely in memory"):
        make_model(embedding_memory=MEMORY, ema_decay=0.9).fit(train)
    with pytest.raises(ConfigError, match="names a table that is not there"):
        make_model(embedding_memory={"usr": "1 GB"}).fit(train)
    with pytest.raises(ConfigError, match="not a memory size"):
        Solver(embedding_memory="8 giga")
    with pytest.raises(ConfigError, match="async_checkpoint"):
        fit(data, data.parent / "run-async", embedding_memory=MEMORY, async_checkpoint=True)


if __name__ == "__main__":
    fit(Path(sys.argv[1]), Path(sys.argv[2]), resume=True, pause=True, epochs=1, embedding_memory=MEMORY)

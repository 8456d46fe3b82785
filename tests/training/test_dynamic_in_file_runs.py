"""Runs with dynamic tables in files, killed, resumed, in chains, in two processes: every bit as in memory.

Run as a script, it is a run to be killed: test_dynamic_in_file_runs.py DATA RUN FOLDER CHECKPOINT_EVERY.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.config import Adam, Solver
from viviane.data import Dataset, write_dataset
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.module_parts import collections_of
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.schema import Schema
from viviane.training import Callback, read_manifest
from viviane.training.checkpoint.increments import chain_of
from viviane.training.checkpoint.tools import compact, compare_checkpoints

SCHEMA = Schema(
    labels=[{"name": "click"}], dense=[{"name": "price"}],
    categorical=[
        {"name": "user", "num_ids": None}, {"name": "item", "num_ids": None}, {"name": "shop", "num_ids": 40},
        {"name": "seen", "num_ids": None, "kind": "multi_hot", "vocabulary": "item"},
    ],
)  # fmt: skip
OPTIONS = {
    "user": {"max_capacity": 150, "when_full": "evict", "eviction": "lfu"},
    "item": {"admission": {"type": "count", "count": 2}, "initial_capacity": 4},
}
SIZES = {"user": 3000, "item": 3000}


def make_rows(count: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def keys(size: int) -> np.ndarray:
        return (400 * rng.random(size) ** 2).astype("int64") * 10**15 - 7

    return {
        "click": (rng.random(count) < 0.5).astype("float32"), "price": rng.normal(size=count).astype("float32"),
        "user": keys(count), "item": keys(count), "shop": rng.integers(3, 40, count).astype("int32"),
        "seen": [keys(length).tolist() for length in rng.integers(0, 4, count)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "train", SCHEMA, [make_rows(768, 0)], rows_per_group=96)
    return folder / "train"


def make_model(memory: str, **solver: Any) -> Model:
    """A model whose dynamic tables are in "memory", in a "file" as their option says, or by a "size" of each."""
    tables: dict[str, Any] = {name: {"dynamic": dict(options)} for name, options in OPTIONS.items()}
    for name, table in tables.items():
        if memory == "file":
            table["dynamic"]["memory"] = "file"
        elif memory == "size":
            table["memory"] = SIZES[name]
    settings = {"batch_size": 32, "lr": 0.01, "device": "cpu", "clip_grad_norm": 1.0, "num_threads": 1}
    model = Model(Solver(**{**settings, **solver}), SCHEMA, name="raw")
    model.add(Input(label="label", dense="dense", sparse="cats"))
    model.add(SparseEmbedding("emb", bottom="cats", dim=4, tables=tables))
    model.add(DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(DenseLayer("x", "Concat", bottom=["flat", "dense"]))
    model.add(DenseLayer("logit", "InnerProduct", bottom="x", num_output=1))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile(Adam(), Adam())
    return model


class Pause(Callback):
    """Gives a test the time to kill the process at a step."""

    def on_step_end(self, step: int, loss: torch.Tensor) -> None:
        time.sleep(0.01)


def fit(
    data: Path, run: Path, memory: str, *, resume: bool = False, callbacks: Sequence[Callback] = (), **solver: Any
) -> tuple[Model, list[dict[str, Any]]]:
    """Train; return the model, and the rows of its history without what a clock decides."""
    model = make_model(memory, **{"epochs": 2, "checkpoint_every": 6, **solver})
    rows = model.fit(Dataset(data), run_folder=run, resume=resume, callbacks=list(callbacks), verbose=0).rows
    return model, comparable(rows)


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: one for key, one in row.items() if key not in ("seconds", "samples_per_second")} for row in rows]


def steps_of(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def assert_same(run: Path, truth: Path) -> None:
    """The newest checkpoints: keys, their rows in the table, state, counts, dense weights, moments, random state."""
    found, wanted = steps_of(run)[-1], steps_of(truth)[-1]
    assert found.name == wanted.name
    assert set(read_manifest(wanted).tables) == {"emb.user", "emb.item", "emb.shop"}
    different = [row["tensor"] for row in compare_checkpoints(found, wanted)]
    assert not [name for name in different if "progress" not in name]
    own, others = read_manifest(found), read_manifest(wanted)
    for name, table in others.tables.items():  # bytes of all that a dynamic table's file holds
        if table.is_dynamic:
            assert own.files[own.tables[name].file or ""].sha256 == others.files[table.file or ""].sha256, name


def places_of(model: Model) -> dict[str, str]:
    storages = [one for part in collections_of(model.module).values() for one in part.all_storages()]
    return {one.table.table.name: one.table.table.memory for one in storages if isinstance(one, DynamicStorage)}


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run = tmp_path_factory.mktemp("straight") / "run"
    model, history = fit(data, run, "memory")
    assert places_of(model) == {"user": "device", "item": "device"}
    assert len(model.module.emb.dynamic_table("user")) == 150, "no key was evicted"
    return run, history


@pytest.mark.parametrize("memory", ["file", "size"])
def test_a_whole_run_has_the_bits_of_one_in_memory(data: Path, tmp_path: Path, straight: Any, memory: str) -> None:
    model, history = fit(data, tmp_path / "run", memory, embedding_folder=str(tmp_path / "work"))
    assert places_of(model) == {"user": "file", "item": "file"}
    assert history == straight[1]
    assert_same(tmp_path / "run", straight[0])
    assert not list((tmp_path / "work").iterdir())


def test_a_size_that_is_enough_keeps_a_dynamic_table_in_memory() -> None:
    row = 4 * 4 * 3 + 22
    sizes = {"user": 150 * row, "item": "1 GiB"}
    model = make_model("size", embedding_memory=sizes)
    assert places_of(model) == {"user": "device", "item": "file"}, "item has no max_capacity"
    assert places_of(make_model("size", embedding_memory={**sizes, "user": 150 * row - 1}))["user"] == "file"


@pytest.mark.parametrize(
    ("checkpoint_every", "kills"), [(6, [12]), (10_000, [1]), pytest.param(6, [6, 18, 36], marks=pytest.mark.slow)]
)
def test_killed_and_resumed(
    data: Path, tmp_path: Path, straight: Any, warm: Any, checkpoint_every: int, kills: list[int]
) -> None:
    run, work, chance = tmp_path / "run", tmp_path / "work", random.Random(len(kills))
    for wanted in kills:
        process = warm.start([__file__, data, run, work, checkpoint_every], cwd=tmp_path)
        deadline = time.monotonic() + 60
        while not (work.exists() if wanted == 1 else any(int(one.name[5:]) >= wanted for one in steps_of(run))):
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.random() * (0.3 if wanted == 1 else 0.03))
        assert process.kill() == -signal.SIGKILL
        assert not list(work.iterdir()), "the system gave the disk back"
    assert steps_of(run)[-1:] != [run / "checkpoints" / steps_of(straight[0])[-1].name], "killed too late"
    _, history = fit(data, run, "file", resume=True, embedding_folder=str(work))
    assert history == straight[1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert comparable(lines) == straight[1]
    assert_same(run, straight[0])
    assert not list(work.iterdir())


def test_chains_of_increments_read_as_whole_checkpoints(data: Path, tmp_path: Path) -> None:
    settings = {"epochs": 1, "checkpoint_every": 6, "keep_checkpoints": 9}
    fit(data, tmp_path / "whole", "memory", **settings)
    fit(data, tmp_path / "chain", "file", incremental_checkpoints=2, max_steps=14, **settings)
    fit(data, tmp_path / "chain", "file", incremental_checkpoints=2, resume=True, **settings)
    chain = {one.name: one for one in steps_of(tmp_path / "chain")}
    lengths = [len(list(chain_of(one, read_manifest(one)))) for one in chain.values()]
    assert max(lengths) > 1
    for one in steps_of(tmp_path / "whole"):
        assert not [row for row in compare_checkpoints(one, chain[one.name]) if "progress" not in row["tensor"]]
    increment = next(one for one, length in zip(chain.values(), lengths, strict=True) if length > 1)
    compact(increment, tmp_path / "one")
    assert not compare_checkpoints(tmp_path / "one", increment)


PLAN = {
    "world_size": 2,
    "tables": [
        {"table": "emb.user", "kind": "table", "ranks": [0]}, {"table": "emb.item", "kind": "table", "ranks": [1]},
        {"table": "emb.shop", "kind": "row", "ranks": [0, 1]},
    ],
}  # fmt: skip


class Kill(Callback):
    """Ends one process at a step, as kill -9 does."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, step: int, loss: torch.Tensor) -> None:
        if step == self.at and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train_together(data: Path, folder: Path, memory: str, stop: int, kill: int = 0) -> None:
    """Train up to a step, or to the end; where there is a checkpoint, from there."""
    options: dict[str, Any] = {"plan": PLAN, "epochs": 1, "embedding_folder": str(folder / "work")}
    callbacks = [Kill(kill)] if kill else []
    more = {"max_steps": stop} if stop else {}
    model, _ = fit(data, folder / memory, memory, resume=True, callbacks=callbacks, **options, **more)
    assert set(places_of(model).values()) == {"device" if memory == "memory" else "file"}


def train_in_turns(data: Path, folder: Path) -> None:
    train_together(data, folder, "memory", 0)
    train_together(data, folder, "file", 9)
    train_together(data, folder, "file", 0)
    assert not list((folder / "work").iterdir())


def test_two_processes_train_the_bits_of_tables_in_memory(data: Path, tmp_path: Path) -> None:
    processes.run(2, train_in_turns, data, tmp_path)
    assert_same(tmp_path / "file", tmp_path / "memory")


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["file", "size"])
def test_two_processes_of_which_one_is_killed(data: Path, tmp_path: Path, memory: str) -> None:
    processes.run(2, train_together, data, tmp_path, "memory", 0)
    with pytest.raises(AssertionError, match=r"closed by peer|reset by peer|silently"):
        processes.run(2, train_together, data, tmp_path, memory, 0, 15)
    assert not list((tmp_path / "work").iterdir())
    assert steps_of(tmp_path / memory)[-1].name[-2:] in ("06", "12"), "the last one may be cut off by the kill"
    processes.run(2, train_together, data, tmp_path, memory, 0)
    assert_same(tmp_path / memory, tmp_path / "memory")
    assert not list((tmp_path / "work").iterdir())


if __name__ == "__main__":
    fit(Path(sys.argv[1]), Path(sys.argv[2]), "file", resume=True, callbacks=[Pause()],
        embedding_folder=sys.argv[3], checkpoint_every=int(sys.argv[4]))  # fmt: skip

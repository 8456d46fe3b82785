"""Training in passes: bits of a run with all tables in memory, whatever is killed, and what is refused."""

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
from test_tables_in_tiers import MEMORY, ROW, SCHEMA, comparable, files_of, make_model, make_rows, tiered

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import CheckpointError, ConfigError, DataError, SchemaError, StoreError
from viviane.data import DataPass, DataPasses, Dataset, NegativeDataset, Negatives, write_dataset, write_key_sets
from viviane.data.key_sets import KEY_SETS_FILE, collect_key_sets, read_key_sets
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.cache_sizes import CacheSettings
from viviane.schema import Schema
from viviane.store import file_sweep, pass_stream
from viviane.store.slots import CacheFullError
from viviane.training import Callback
from viviane.training.passes import PassPlan

ROOM = {"user": 300 * ROW, "item": 330 * ROW}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    for i in range(3):
        write_dataset(folder / f"day{i}", SCHEMA, [make_rows(250 + 50 * i, i)], rows_per_group=64)
    write_dataset(folder / "valid", SCHEMA, [make_rows(100, 9)])
    return folder


class Pause(Callback):
    """Gives a test the time to kill the process at a step."""

    def on_step_end(self, step: int, loss: Any) -> None:
        time.sleep(0.02)


def fit(parts: Path, run: Path, *, resume: bool = False, optimizer: Any = None, pause: bool = False, **solver: Any):
    model = make_model(optimizer, epochs=2, checkpoint_every=solver.pop("checkpoint_every", None), **solver)
    days = [Dataset(parts / f"day{i}") for i in range(3)]
    callbacks = [Pause()] if pause else []
    history = model.fit(days, Dataset(parts / "valid"), run_folder=run, resume=resume, callbacks=callbacks)
    return model, history


@pytest.mark.parametrize("swept", [False, True], ids=["row by row", "swept"])
@pytest.mark.parametrize("optimizer", [SGD(), AdaGrad(), Adam()], ids=["sgd", "adagrad", "adam"])
def test_passes_give_the_bits_of_tables_in_memory(
    parts: Path, tmp_path: Path, optimizer: Any, swept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if swept:
        monkeypatch.setattr(file_sweep, "BLOCK_BYTES", 1)
        monkeypatch.setattr(file_sweep, "SMALLEST_BYTES", 0)
        monkeypatch.setattr(file_sweep, "PAGES_WORTH_A_SWEEP", 0.0)
    _, expected = fit(parts, tmp_path / "memory", optimizer=optimizer)
    model, history = fit(parts, tmp_path / "passes", optimizer=optimizer, embedding_memory=ROOM)
    assert tiered(model)
    assert comparable(history) == comparable(expected)
    assert files_of(tmp_path / "passes") == files_of(tmp_path / "memory")


def test_a_plan_begins_passes_of_a_loop_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sweep, "BLOCK_BYTES", 1)
    monkeypatch.setattr(file_sweep, "SMALLEST_BYTES", 0)
    tables = [TableConfig(name="item", num_rows=900, dim=4)]
    features = [FeatureConfig(name="item", table="item")]
    truth = EmbeddingCollection(tables, features, Adam())
    cache = CacheSettings(tables={"item": 330 * ROW})
    tiered_one = EmbeddingCollection(tables, features, Adam(), cache=cache)
    sets = [np.random.default_rng(one).choice(900, 300, replace=False) for one in range(4)]
    asked, moved, stream = [], [], pass_stream.stream
    monkeypatch.setattr(pass_stream, "stream", lambda *given: moved.append(stream(*given)) or moved[-1])
    plan = PassPlan(tiered_one, [lambda one=one: asked.append(one) or {"item": sets[one]} for one in range(4)])
    for number in [0, 1, 2, 3, 0, 1, 3, 2, 0]:  # another order than expected changes no bit
        plan.begin(number)
        for emb in (truth, tiered_one):
            emb({"item": torch.from_numpy(sets[number])}).flat.square().sum().backward()
            emb.step(lr=0.1)
    assert sorted(asked) == [0, 1, 2, 3]
    assert np.array(moved).sum(0).all()  # rows of later passes were written and read
    wanted, found = (emb.export_table("item") for emb in (truth, tiered_one))
    assert (wanted.weight == found.weight).all()
    assert all((wanted.state[name] == found.state[name]).all() for name in wanted.state)
    with pytest.raises(ConfigError, match="a plan needs passes"):
        PassPlan(tiered_one, [])


@pytest.mark.parametrize("stop", [13, 24])
def test_a_run_resumes_inside_a_pass(parts: Path, tmp_path: Path, stop: int) -> None:
    fit(parts, tmp_path / "straight")
    run = tmp_path / "run"
    fit(parts, run, max_steps=stop, embedding_memory=ROOM)
    fit(parts, run, resume=True, embedding_memory=ROOM)
    assert files_of(run) == files_of(tmp_path / "straight")


def test_rows_that_no_key_names_are_fetched_by_batch(parts: Path, tmp_path: Path) -> None:
    truth = make_model()
    days = [Dataset(parts / f"day{i}") for i in range(2)]
    truth.fit(days)
    model = make_model(embedding_memory=ROOM)
    none = {column.name: [] for column in SCHEMA.categorical}
    model.fit([DataPass(day, none) for day in days])
    for name in ("user", "item"):
        found, wanted = (one.module.emb.export_table(name) for one in (model, truth))
        assert (found.weight == wanted.weight).all()
        assert all((found.state[state] == wanted.state[state]).all() for state in wanted.state)


def test_a_data_set_is_cut_into_passes(parts: Path) -> None:
    data = Dataset(parts / "day2")
    passes = DataPasses.split(data, 3)
    assert len(passes) == len(data)
    assert [len(one.data) for one in passes.parts] == [128, 128, 94]
    assert len({one.data.fingerprint for one in passes.parts}) == 3
    whole = collect_key_sets(data)["user"]
    joined = [one.key_sets()["user"] for one in passes.parts]
    assert np.array_equal(np.unique(np.concatenate(joined)), whole)
    for count in (0, 7):
        with pytest.raises(ConfigError, match="fewer row groups than passes"):
            DataPasses.split(data, count)
    model = make_model(embedding_passes=3, embedding_memory=ROOM)
    model.fit(data)
    with pytest.raises(ConfigError, match="only a data set is cut into passes"):
        model.fit([data])


def test_a_pass_that_does_not_fit_names_the_memory_that_it_needs(parts: Path) -> None:
    model = make_model(embedding_memory={"user": 20 * ROW})
    with pytest.raises(CacheFullError, match=r"(?s)rows of a pass do not fit.*user.*bytes.*more passes"):
        model.fit([Dataset(parts / "day0")])


def test_key_sets_are_those_of_their_rows(parts: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "day", SCHEMA, [make_rows(40, 3)])
    counts = write_key_sets(data)
    assert counts["user"] == len(read_key_sets(data.path / KEY_SETS_FILE, data)["user"])
    assert DataPass(data).key_sets().keys() == counts.keys()
    with pytest.raises(DataError, match="those of other rows"):
        read_key_sets(data.path / KEY_SETS_FILE, Dataset(parts / "day1"))
    content = bytearray((data.path / KEY_SETS_FILE).read_bytes())
    content[-3] ^= 4
    (data.path / KEY_SETS_FILE).write_bytes(content)
    with pytest.raises(DataError, match="were altered"):
        DataPass(data).key_sets()
    (data.path / KEY_SETS_FILE).write_bytes(content[:50])
    with pytest.raises(DataError, match="not a file of key sets"):
        DataPass(data).key_sets()
    with pytest.raises(ConfigError, match="lack a column"):
        DataPass(data, {"user": [3]}).key_sets()
    with pytest.raises(ConfigError, match="whole numbers"):
        DataPass(data, {"user": [3], "item": [0.5], "seen": []}).key_sets()


def test_what_is_no_pass_is_refused(parts: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", Schema(dense=[{"name": "x"}]), [{"x": [1.0]}])
    day = Dataset(parts / "day0")
    with pytest.raises(SchemaError, match="different columns"):
        DataPasses([day, other])
    with pytest.raises(ConfigError, match="needs sub-data-sets"):
        DataPasses([])
    with pytest.raises(ConfigError, match="drawn negatives"):
        DataPasses([NegativeDataset(day, Negatives(item="item", num=1, column=None))])
    run = tmp_path / "run"
    fit(parts, run, max_steps=5, embedding_memory=ROOM)
    model = make_model(epochs=2)
    with pytest.raises(CheckpointError, match="another number of passes"):
        model.fit([day], Dataset(parts / "valid"), run_folder=run, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write-back", "pass"])
def test_killed_in_a_write_back_or_a_pass_and_resumed(parts: Path, tmp_path: Path, where: str) -> None:
    fit(parts, tmp_path / "straight", embedding_memory=ROOM)
    run, chance = tmp_path / "run", random.Random(1)
    for wanted in (4, 12):
        words = [sys.executable, __file__, str(parts), str(run), where, str(wanted)]
        process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        deadline = time.monotonic() + 120
        while where == "pass" and not any(int(one.name[5:]) >= wanted for one in run.glob("checkpoints/step-*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if where == "pass":
            time.sleep(chance.random() * 0.05)
            os.kill(process.pid, signal.SIGKILL)
        assert process.wait(120) == -signal.SIGKILL
    fit(parts, run, resume=True, embedding_memory=ROOM)
    assert files_of(run) == files_of(tmp_path / "straight")


def test_a_full_disk_ends_the_run_and_a_resumed_one_goes_on(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from viviane.store import file

    fit(parts, tmp_path / "straight", checkpoint_every=4)
    real, calls = os.pwrite, [0]

    def full(*given: Any) -> int:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(28, "No space left on device")
        return real(*given)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(file.os, "pwrite", full)
        with pytest.raises(StoreError, match=r"(?s)cannot be written.*No space left"):
            fit(parts, run, embedding_memory=MEMORY | ROOM, checkpoint_every=4)
    fit(parts, run, resume=True, embedding_memory=ROOM, checkpoint_every=4)
    assert files_of(run) == files_of(tmp_path / "straight")


def _kill_in_write_back(after: int) -> None:
    """End this process with SIGKILL in the middle of a write of a pass's rows."""
    from viviane.store import file

    real, calls = os.pwrite, [0]

    def killing(handle: int, data: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] == after:
            real(handle, bytes(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(handle, data, offset)

    file.os.pwrite = killing  # type: ignore[assignment]


if __name__ == "__main__":
    if sys.argv[3] == "write-back":
        _kill_in_write_back(int(sys.argv[4]))
    fit(Path(sys.argv[1]), Path(sys.argv[2]), resume=True, pause=True, embedding_memory=ROOM, checkpoint_every=4)

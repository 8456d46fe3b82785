"""Symbolic links in folders that others made, paths that no file system takes, and folders that are opened twice."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.config import Solver
from viviane.core.errors import VivianeError
from viviane.data import Dataset, write_dataset
from viviane.export import load as load_artifact
from viviane.model import Model
from viviane.retrieval import Histories, ItemIndex, ItemKNN, Popularity, Recommender
from viviane.schema import Schema
from viviane.serving import InferenceSession
from viviane.store import Column, FileTier, RowLayout, SortedRunTier
from viviane.store.outbox import Outbox, read_outbox
from viviane.store.rocks_database import RocksDatabase
from viviane.zoo import DeepFM

LAYOUT = RowLayout([Column("weight", "float32", 2)])
KEYS, ROWS = np.arange(20), np.ones((20, 8), np.uint8)


def open_rocks(path: Path) -> RocksDatabase:
    pytest.importorskip("rocksdict")
    return RocksDatabase(path)


OPENED: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: FileTier(path, LAYOUT, 20),
    "runs": lambda path: SortedRunTier(path, LAYOUT, memory_rows=8),
    "outbox": lambda path: Outbox(path, "m"),
    "rocks": open_rocks,
}


@pytest.mark.parametrize("kind", OPENED)
def test_stores_write_through_no_link(kind: str, tmp_path: Path) -> None:
    """A link in the place of a log or of rows let the file behind it be truncated or overwritten."""
    with contextlib.closing(OPENED[kind](tmp_path / "made")) as made:
        if hasattr(made, "put") and kind != "rocks":
            made.put(KEYS, ROWS)
    names = [one.name for one in (tmp_path / "made").iterdir()]
    new = {"outbox": ["0000000000000000.vvlog"], "runs": ["journal.bin"], "file": ["journal.bin"], "rocks": ["LOCK"]}
    assert names
    for name in {*names, *new[kind]}:
        crafted, outside = tmp_path / "crafted", tmp_path / "outside"
        shutil.copytree(tmp_path / "made", crafted)
        outside.write_bytes((crafted / name).read_bytes() if (crafted / name).exists() else b"of someone else")
        before = outside.read_bytes()
        (crafted / name).unlink(missing_ok=True)
        (crafted / name).symlink_to(outside)
        with pytest.raises(VivianeError, match="link points outside"):
            OPENED[kind](crafted)
        assert outside.read_bytes() == before
        shutil.rmtree(crafted)


@pytest.mark.parametrize("kind", OPENED)
def test_a_store_is_opened_once(kind: str, tmp_path: Path) -> None:
    """A thread could open sorted runs twice; each then overwrote the other's files."""
    with contextlib.closing(OPENED[kind](tmp_path / "made")), pytest.raises(VivianeError):
        OPENED[kind](tmp_path / "made")
    OPENED[kind](tmp_path / "made").close()


def small_set(folder: Path) -> Dataset:
    schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
    return write_dataset(folder, schema, [{"y": [0.0, 1.0] * 8, "c": [3, 4] * 8}])


def test_a_model_takes_no_file_along_that_a_data_set_links_to(tmp_path: Path) -> None:
    """etl.zip of a data set is copied into models, which are shared: it was the content of any file."""
    small_set(tmp_path / "set")
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "set/etl.zip").symlink_to(tmp_path / "secret")
    with pytest.raises(VivianeError, match="link points outside"):
        Dataset(tmp_path / "set")
    (tmp_path / "set/etl.zip").unlink()
    for name in ("schema.json", "info.json", "manifest.json"):
        shutil.move(tmp_path / "set" / name, tmp_path / "moved")
        (tmp_path / "set" / name).symlink_to(tmp_path / "moved")
        with pytest.raises(VivianeError, match="link points outside"):
            Dataset(tmp_path / "set")
        (tmp_path / "set" / name).unlink()
        shutil.move(tmp_path / "moved", tmp_path / "set" / name)
    assert len(Dataset(tmp_path / "set")) == 16


def test_models_and_recommenders_are_read_through_no_link(tmp_path: Path) -> None:
    known = Histories.of([[3, 4, 5], [4, 5, 6], [6, 3]])
    Recommender([ItemKNN.count(known, 8)], fallback=Popularity.count(known, 8)).save(tmp_path / "rec")
    ItemIndex(np.eye(4, dtype=np.float32)).save(tmp_path / "index")
    model = Model(Solver(batch_size=8, device="cpu", max_steps=1), small_set(tmp_path / "set"))
    model.add(DeepFM(dim=2, deep_mlp=[2]))
    model.compile()
    model.save(tmp_path / "model")
    places: dict[str, Callable[[Path], Any]] = {
        "rec/fallback": Recommender.load, "rec/recommender.json": Recommender.load, "rec/retrieval-item_knn":
        Recommender.load, "index/index.json": ItemIndex.load, "index/ids.npy": ItemIndex.load,
        "model/files.json": Model.load, "model/weights": Model.load, "model/schema.json": Model.load,
    }  # fmt: skip
    for place, load in places.items():
        path = tmp_path / place
        shutil.move(path, tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        with pytest.raises(VivianeError, match="link points outside"):
            load(path.parent)
        path.unlink()
        shutil.move(tmp_path / "moved", path)
        load(path.parent)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "é" * 200, "a/" + "x" * 300 + "/b"], ids=ascii)
def test_paths_that_no_file_system_takes(name: str, tmp_path: Path) -> None:
    path: Any = f"{tmp_path}/{name}"
    reads = [Dataset, Model.load, ItemIndex.load, Recommender.load, load_artifact, InferenceSession]
    writes = [ItemIndex(np.eye(4, dtype=np.float32)).save, Recommender([Popularity(np.ones(7))]).save]
    for call in (*reads, *writes, *OPENED.values(), lambda path: list(read_outbox(path, "t", 0, 1, 2))):
        with pytest.raises(VivianeError):
            call(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused(kind: str, tmp_path: Path) -> None:
    """Reading from a pipe waited for ever; a folder in place of a manifest was taken for a data set without one."""
    model = Model(Solver(batch_size=8, device="cpu", max_steps=1), small_set(tmp_path / "set"))
    model.add(DeepFM(dim=2, deep_mlp=[2]))
    model.compile()
    model.save(tmp_path / "model")
    loads: dict[str, Callable[[Path], Any]] = {
        **{f"set/{name}": Dataset for name in ("schema.json", "info.json", "manifest.json")},
        **{f"model/{name}": Model.load for name in ("files.json", "model.json", "schema.json")},
    }
    for place, load in loads.items():
        path = tmp_path / place
        shutil.move(path, tmp_path / "moved")
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
        with pytest.raises(VivianeError, match="not a regular file"):
            load(path.parent)
        path.unlink() if kind == "pipe" else path.rmdir()
        shutil.move(tmp_path / "moved", path)
        load(path.parent)


@pytest.mark.parametrize("name", ["checkpoints", "model", "tensorboard", "checkpoints/step-00000002"])
def test_a_run_writes_through_no_link(name: str, tmp_path: Path) -> None:
    """A run removed older checkpoints, and wrote new ones, behind a link in its folder."""
    data, run = small_set(tmp_path / "set"), tmp_path / "run"

    def train(**options: Any) -> None:
        model = Model(Solver(batch_size=8, device="cpu", max_steps=2, checkpoint_every=1), data)
        model.add(DeepFM(dim=2, deep_mlp=[2]))
        model.compile()
        model.fit(data, run_folder=run, verbose=0, **options)

    train()
    outside = tmp_path / "outside"
    (run / name).exists() or (run / name).mkdir()
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside)
    before = sorted((one, one.stat().st_mtime_ns) for one in outside.rglob("*"))
    with pytest.raises(VivianeError, match="link points outside"):
        train(resume=True)
    assert sorted((one, one.stat().st_mtime_ns) for one in outside.rglob("*")) == before

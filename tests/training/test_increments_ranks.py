"""Incremental checkpoints of several processes: cut in every way, read by any other number, the bits of whole ones."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint_ranks import KINDS, TABLES, Tables

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.parallel import Group
from viviane.training import CheckpointStore, Progress, load_checkpoint, read_manifest, write_checkpoint
from viviane.training.checkpoint.increments import IncrementedTable
from viviane.training.checkpoint.manifest import ShardEntry, TableEntry, TensorEntry
from viviane.training.checkpoint.saved_table import SavedTable
from viviane.training.checkpoint.tensor_files import write_tensors
from viviane.training.checkpoint.tools import compare_checkpoints


def train(module: Tables, step: int, rank: int) -> None:
    random = torch.Generator().manual_seed(10 * step + rank)
    batch = {one.name: torch.randint(0, one.num_rows, (3,), generator=random) for one in TABLES}
    batch["raw"] = torch.randint(-(2**62), 2**62, (3,), generator=random)
    module.emb(batch).flat.sin().sum().backward()
    module.emb.step(lr=0.1)


def save(folder: Path) -> None:
    group = Group.world()
    for kind in os.environ["KINDS"].split():
        module = Tables(group, kind)
        store = CheckpointStore(folder / kind, 9, group=group, most_increments=5)
        for step in (1, 2, 3):
            train(module, step, group.rank)
            store.save(module, None, Progress(step=step), beside=step == 2)
        store.finish()
        write_checkpoint(folder / f"{kind}-whole", module, progress=Progress(step=3), group=group)


def load(folder: Path) -> None:
    group = Group.world()
    for kind, other in zip(KINDS, KINDS[1:] + KINDS[:1], strict=True):
        for name in (f"{kind}/step-00000003", f"{kind}-whole"):
            module = Tables(group, other, seed=7)
            load_checkpoint(folder / name, module, group=group)
            write_checkpoint(folder / f"{kind}-again" / name.replace("/", "-"), module, group=group)


@pytest.mark.slow
def test_chains_of_two_processes_are_read_by_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINDS", " ".join(KINDS))
    processes.run(2, save, tmp_path)
    for kind in KINDS:
        last = read_manifest(tmp_path / kind / "step-00000003")
        increments = {full for full, table in last.tables.items() if table.is_increment}
        assert increments == set(last.tables)
        assert not compare_checkpoints(tmp_path / kind / "step-00000003", tmp_path / f"{kind}-whole")
    processes.run(4, load, tmp_path)
    for kind in KINDS:
        one, other = sorted((tmp_path / f"{kind}-again").iterdir())
        assert not compare_checkpoints(one, other)


def test_chains_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINDS", "hybrid")
    processes.run(2, save, tmp_path)
    assert not compare_checkpoints(tmp_path / "hybrid" / "step-00000003", tmp_path / "hybrid-whole")


@settings(max_examples=60)
@given(data=st.data())
def test_any_range_of_any_cut_has_the_newest_rows(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, rows, dim = tmp_path_factory.mktemp("cut"), data.draw(st.integers(1, 40)), 3
    truth = torch.arange(rows * dim, dtype=torch.float32).view(rows, dim)
    moments = truth[:, 0] + 0.5
    write_tensors(folder / "whole", {"weight": truth, "state.m": moments})
    entry = {"weight": TensorEntry(shape=(rows, dim), dtype="float32"), "state": ("m",)}
    table: SavedTable = SavedTable(folder, TableEntry(file="whole", **entry))
    truth, moments = truth.clone(), moments.clone()
    for number in range(data.draw(st.integers(1, 3))):
        apart = data.draw(st.integers(1, min(4, rows)))
        shards = []
        for first in range(apart):
            own = torch.arange(first, rows, apart)
            keys = own[torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(own), max_size=len(own))))]
            truth[keys] = truth[keys] + 100.0
            moments[keys] += 100.0
            name = f"{number}-{first}"
            write_tensors(folder / name, {"keys": keys, "weight": truth[keys], "state.m": moments[keys]})
            shards.append(ShardEntry(file=name, keys=(first, rows, apart), columns=(0, dim)))
        cut = {"file": shards[0].file} if apart == 1 else {"shards": tuple(shards)}
        table = IncrementedTable(folder, TableEntry(is_increment=True, **cut, **entry), table)
    step = data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, rows))
    wanted = range(first, data.draw(st.integers(first, rows)), step)
    low = data.draw(st.integers(0, dim - 1))
    assert torch.equal(table.read("weight", wanted, low, dim), truth[wanted.start : wanted.stop : step, low:])
    assert torch.equal(table.read("state.m", wanted), moments[wanted.start : wanted.stop : step])

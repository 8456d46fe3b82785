"""Checkpoints over 1, 2 and 4 processes: saved under one plan, loaded under another, the same bits."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import CheckpointError
from viviane.embedding import DynamicStorage, DynamicTableConfig, FeatureConfig, TableConfig, TableState
from viviane.embedding.dynamic_content import state_entries
from viviane.parallel import Group, ShardedCollection, ShardingPlan, TablePlan
from viviane.training import load_checkpoint, read_manifest, write_checkpoint
from viviane.training.checkpoint.manifest import overlap, positions
from viviane.training.checkpoint.saved_table import SavedTable

SIZES = (1, 2, 4)
KINDS = ("replicated", "table", "row", "column", "hybrid")
TABLES = [  # uneven over 2 and 4 processes, odd widths, every shape of state
    TableConfig(name="plain", num_rows=37, dim=33, dtype="bfloat16", optimizer=SGD()),
    TableConfig(name="moments", num_rows=23, dim=7, padding_id=5, optimizer=Adam()),
    TableConfig(name="lazy", num_rows=41, dim=5, optimizer=Adam(update="lazy_global")),
    TableConfig(name="by_row", num_rows=19, dim=4, optimizer=AdaGrad(row_wise=True)),
    TableConfig(name="still", num_rows=11, dim=6, trainable=False),
]
RAW = DynamicTableConfig(name="raw", dim=3, init="normal", optimizer=AdaGrad())


class Tables(nn.Module):
    def __init__(self, group, kind, seed=0):
        super().__init__()
        features = [FeatureConfig(name=one.name, table=one.name) for one in (*TABLES, RAW)]
        plan = plan_of(group.size, kind)
        self.emb = ShardedCollection([*TABLES, RAW], features, SGD(), plan=plan, group=group, seed=seed)
        self.layer = nn.Linear(2, 2)
        nn.init.constant_(self.layer.weight, float(seed))
        nn.init.constant_(self.layer.bias, seed + 0.5)

    def raw(self):
        """The dynamic table, on the process that has it."""
        return next((s.table for s in self.emb.all_storages() if isinstance(s, DynamicStorage)), None)


def plan_of(size, kind):
    ranks = list(range(size))[::-1]
    settings = {
        "replicated": {"kind": "replicated"}, "table": {"kind": "table", "ranks": ranks[:1]},
        "row": {"kind": "row", "ranks": ranks}, "column": {"kind": "column", "ranks": ranks},
        "hybrid": {"kind": "hybrid", "ranks": ranks, "num_hot": 6},
    }  # fmt: skip
    tables = []
    for table in TABLES:
        own = "row" if kind == "column" and table.name == "by_row" else kind  # its rule needs whole rows
        tables.append(TablePlan(table=table.name, **settings[own]))
    return ShardingPlan(world_size=size, tables=[*tables, TablePlan(table="raw", kind="table", ranks=[size // 2])])


def truth():
    """The content of all tables, drawn here; of the dynamic one, what a process alone has after training."""
    rng = torch.Generator().manual_seed(7)
    model, contents = Tables(Group(), "table"), {}
    for i, table in enumerate(TABLES):
        empty = model.emb.export_table(table.name)
        weight = torch.randn(empty.weight.shape, generator=rng).to(empty.weight.dtype)
        if table.padding_id is not None:
            weight[table.padding_id] = 0.0
        state = {name: torch.rand(one.shape, generator=rng) for name, one in empty.state.items()}
        contents[table.name] = TableState(weight, state, 3 + i if table.trainable else 0)
    assert [sorted(content.state) for content in contents.values()] == [
        [], ["m", "v"], ["last_step", "m", "v"], ["accumulator"], [],
    ]  # fmt: skip
    assert contents["by_row"].state["accumulator"].dim() == contents["lazy"].state["last_step"].dim() == 1
    raw = model.raw()
    rows = raw.find_or_insert(torch.tensor([0, -1, 2**63 - 1, 10**15, 77]))
    raw.weight[rows] = torch.randn(5, 3, generator=rng)
    for part in raw.state.values():
        part[rows] = torch.rand(part[rows].shape, generator=rng)
    return contents, state_entries(raw, "")


def fill(model, contents, raw_entries):
    for name, content in contents.items():
        model.emb.import_table(name, content)
    if model.raw() is not None:
        model.raw().replace(raw_entries)


def assert_holds(model, contents, raw_entries, why):
    for name, content in contents.items():
        found = model.emb.export_table(name)
        assert torch.equal(found.weight, content.weight), (why, name)
        assert found.state.keys() == content.state.keys()
        for key, part in content.state.items():
            assert torch.equal(found.state[key], part), (why, name, key)
        assert found.step == content.step, (why, name)
    if model.raw() is not None and raw_entries is not None:
        found = state_entries(model.raw(), "")
        assert all(torch.equal(found[name], part) for name, part in raw_entries.items()), why


def groups():
    """Groups of 1, 2 and 4 of the processes; None where this one is not part of it."""
    found = {}
    for size in SIZES:
        made = dist.new_group(list(range(size)))
        inside = dist.get_rank() < size
        found[size] = (Group() if size == 1 else Group(made)) if inside else None
    return found


def matrix(folder):
    """Save under every (number, kind); load under a kind that changes: all pairs of kinds and of numbers occur."""
    by_size, (contents, raw_entries) = groups(), truth()
    for size in SIZES:
        for kind in KINDS:
            if by_size[size] is not None:
                model = Tables(by_size[size], kind, seed=1)
                fill(model, contents, raw_entries)
                write_checkpoint(folder / f"{size}-{kind}", model)
    dist.barrier()
    pairs, numbers = set(), set()
    for n, size in enumerate(SIZES):
        for k, kind in enumerate(KINDS):
            for m, other in enumerate(SIZES):
                place = 3 * n + m
                if place > 4 if k % 2 == 0 else place < 4:  # nine pairs of numbers, each kind with five of them
                    continue
                target = KINDS[(k + place) % len(KINDS)]
                pairs.add((kind, target))
                numbers.add((size, other))
                if by_size[other] is None:
                    continue
                model = Tables(by_size[other], target, seed=2)
                load_checkpoint(folder / f"{size}-{kind}", model)
                assert_holds(model, contents, raw_entries, f"{size} {kind} -> {other} {target}")
                assert torch.equal(model.layer.weight, torch.ones(2, 2))
    assert len(pairs) == len(KINDS) ** 2
    assert len(numbers) == len(SIZES) ** 2


def weights_alone(folder):
    """Weights without state, from a checkpoint of another number of processes: optimizers start over."""
    group, (contents, _) = Group.world(), truth()
    model = Tables(group, "hybrid", seed=2)
    load_checkpoint(folder / "2-row", model, weights_only=True)
    for name, content in contents.items():
        found = model.emb.export_table(name)
        assert torch.equal(found.weight, content.weight)
        assert found.step == 0
        assert not any(part.any() for part in found.state.values())


def failures(folder):
    """A shard that is damaged, a rank that may not write: all processes say so, none waits, nothing is half there."""
    group, (contents, raw_entries) = Group.world(), truth()
    model = Tables(group, "row", seed=3)
    before = {name: model.emb.export_table(name) for name in contents}
    name = "tables/emb.lazy.2-of-2.safetensors"
    bad = folder / "bad"
    if group.rank == 0:
        shutil.copytree(folder / "2-row", bad)
        (bad / name).write_bytes((bad / name).read_bytes()[:-5])
    group.gather_numbers([0])
    with pytest.raises(CheckpointError, match=rf"(?s)truncated.*{name}"):
        load_checkpoint(bad, model)
    assert_holds(model, before, None, "a failed load changes nothing")
    fill(model, contents, raw_entries)
    if os.geteuid() == 0 and group.rank == 2:
        os.seteuid(65534)  # this process alone may not write into the folder
        refused(group, model, folder)
        os.seteuid(0)
    elif os.geteuid() == 0:
        refused(group, model, folder)
    group.gather_numbers([0])  # rank 0 has cleaned up
    assert not list(folder.glob(".2-row*"))
    other = Tables(group, "table", seed=3)
    load_checkpoint(folder / "2-row", other)  # the older one is as it was
    assert_holds(other, contents, raw_entries, "after a failed write")
    (folder / "blocked").write_text("a file")
    with pytest.raises(CheckpointError, match=r"could not be written[\s\S]*blocked"):
        write_checkpoint(folder / "blocked" / "c", model)


def refused(group, model, folder):
    words = "could not be written[\\s\\S]*Permission denied|could not be written[\\s\\S]*os error 13"
    with pytest.raises(CheckpointError, match=words) as caught:
        write_checkpoint(folder / "2-row", model)
    assert str(caught.value).startswith("rank 2: ") == (group.rank != 2)


def everything(folder):
    for check in (matrix, weights_alone, failures):
        check(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    folder.chmod(0o755)
    processes.run(4, everything, folder)
    return folder


@pytest.mark.slow
def test_every_number_and_kind_is_read_by_every_other(saved):
    contents, raw_entries = truth()
    for path in sorted(saved.glob("?-*")):
        model = Tables(Group(), "table", seed=4)
        load_checkpoint(path, model)
        assert_holds(model, contents, raw_entries, path.name)


def test_files_are_shards_where_a_table_is_cut_and_whole_files_elsewhere(saved):
    def files(name, table):
        return read_manifest(saved / name).tables[f"emb.{table}"].files

    assert files("4-table", "lazy") == files("4-replicated", "lazy") == ("tables/emb.lazy.safetensors",)
    assert files("2-row", "lazy") == tuple(f"tables/emb.lazy.{i}-of-2.safetensors" for i in (1, 2))
    assert files("4-column", "plain") == tuple(f"tables/emb.plain.{i}-of-4.safetensors" for i in (1, 2, 3, 4))
    assert len(files("4-hybrid", "moments")) == 5  # the hot keys, once, and four ranks
    assert files("4-hybrid", "raw") == ("tables/emb.raw.safetensors",)
    for name, version in (("1-row", 1), ("4-table", 1), ("4-replicated", 1), ("2-row", 2)):
        body = json.loads((saved / name / "manifest.json").read_text())
        assert body["version"] == version, name
        # What has one file is described as before there were shards: older releases read it.
        assert all(("shards" in table) != ("file" in table) for table in body["tables"].values())
        assert any("shards" in table for table in body["tables"].values()) == (version == 2)


def test_only_files_that_a_rank_needs_are_opened(saved, tmp_path):
    folder = shutil.copytree(saved / "4-row", tmp_path / "c")
    entry = read_manifest(folder).tables["emb.lazy"]
    for shard in entry.shards[1:]:
        (folder / shard.file).unlink()
    found = SavedTable(folder, entry).read("weight", range(0, 41, 4))
    assert torch.equal(found, truth()[0]["lazy"].weight[0:41:4])
    with pytest.raises(CheckpointError, match=r"lazy\.2-of-4"):
        SavedTable(folder, entry).read("weight", range(0, 41, 3))


RANGES = st.builds(lambda a, n, s: range(a, a + n, s), st.integers(0, 30), st.integers(0, 60), st.integers(1, 12))


@given(RANGES, RANGES)
def test_overlaps_are_those_of_sets(one, other):
    both = overlap(one, other)
    assert set(both) == set(one) & set(other)
    if both:
        assert list(both) == list(one)[positions(both, one)] == list(other)[positions(both, other)]

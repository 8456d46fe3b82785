"""Rows that cross the wire once, over 1, 2 and 4 processes, against one collection that sees all batches as one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import processes
from test_sharded_collection import ROWS, RULES, joined, plans, tables, train_alike

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad
from viviane.core.errors import ConfigError, KeyRangeError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.parallel import Group, ShardedCollection, ShardingPlan, TablePlan

# What the owners' rules need from a row, and every way of cutting a table.
SOME = {("row", "adagrad"), ("row", "row_wise"), ("hybrid", "lazy"), ("hybrid", "global"), ("column", "sgd"),
        ("table", "momentum"), ("row backwards", "decay"), ("replicated", "adagrad")}  # fmt: skip


def every_kind(wanted):
    group = Group.world()
    for kind, plan in plans(group.size).items():
        for name, rule in RULES.items():
            if (kind, name) in wanted and not (kind == "column" and name in ("row_wise", "decay")):
                train_alike(group, plan, rule, name=f"{kind}, {name}", deduplicate_ids=True)
    options = {"out_of_range": "ignore", "padding_id": 0}
    for kind in ("row", "hybrid", "column"):
        train_alike(group, plans(group.size)[kind], AdaGrad(), options, name=kind, deduplicate_ids=True)


def several_storages():
    """Tables of two widths and three storages of one width, one frozen; the last process has none of them."""
    group = Group.world()
    shapes = {"a": (9, 4, "float32"), "b": (11, 4, "bfloat16"), "c": (7, 2, "float32"), "d": (6, 4, "float32")}
    made = [TableConfig(name=n, num_rows=r, dim=d, dtype=t, init="normal") for n, (r, d, t) in shapes.items()]
    features = [FeatureConfig(name=n, table=n) for n in shapes] + [FeatureConfig(name="e", table="a")]
    plan = ShardingPlan(world_size=group.size, tables=[TablePlan(table=n, kind="table", ranks=[0]) for n in shapes])
    truth = EmbeddingCollection(made, features, SGD(), seed=2)
    ours = ShardedCollection(made, features, SGD(), plan=plan, group=group, seed=2, deduplicate_ids=True)
    for one in (truth, ours):
        one.freeze("d")
    rng = torch.Generator().manual_seed(0)
    rows = slice(5 * group.rank, 5 * group.rank + 5)
    for _ in range(3):
        whole = {f.name: torch.randint(0, shapes[f.table][0], (5 * group.size,), generator=rng) for f in features}
        ahead = ours.distribute({name: ids[rows] for name, ids in whole.items()})
        mine, other = ours(ours.begin(ahead)).flat, truth(whole).flat
        torch.testing.assert_close(mine, other[rows], rtol=0, atol=0)  # single vectors: copies
        other.sum().backward()
        mine.sum().backward()
        for collection in (ours, truth):
            collection.step(0.5)
    for name in ("a", "c", "d"):  # rows of 16 bits round by chance of their place
        # Sums of equal numbers: exact but for the order of a row's own gradients, of which each is 1.
        torch.testing.assert_close(ours.export_table(name).weight, truth.export_table(name).weight)


def nasty():
    """One key for all, and for 100,000 entries; nobody asks anything; evaluation; the last key."""
    group = Group.world()
    plan = plans(group.size)["row"]
    features = [FeatureConfig(name="one", table="item"), FeatureConfig(name="bag", table="item")]
    item = ShardingPlan(world_size=group.size, tables=[plan.table("item")])
    truth = EmbeddingCollection(tables()[:1], features, SGD(), seed=3)
    ours = ShardedCollection(tables()[:1], features, SGD(), plan=item, group=group, seed=3, deduplicate_ids=True)

    def both(one, bag):
        whole = joined([{"one": one, "bag": bag}] * group.size)
        rows = slice(len(one) * group.rank, len(one) * (group.rank + 1))
        mine, other = ours({"one": one, "bag": bag}).flat, truth(whole).flat
        torch.testing.assert_close(mine, other[rows], rtol=1e-5, atol=1e-4)  # sums of 100,000 in float32
        mine.sum().backward()
        other.sum().backward()
        for collection in (ours, truth):
            collection.step(1e-6)

    both(torch.full((3,), ROWS - 1), Bag(torch.full((100_000,), ROWS - 1), torch.tensor([0, 0, 100_000, 100_000])))
    nothing = torch.empty(0, dtype=torch.int64)
    both(nothing, Bag(nothing, torch.zeros(1, dtype=torch.int64)))
    both(torch.zeros(1, dtype=torch.int32), Bag(torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)))
    # Gradients of up to 400,003 ones a row, times 1e-6: float32 holds the counts exactly, the row is rounded once.
    torch.testing.assert_close(ours.export_table("item").weight, truth.export_table("item").weight)
    ours.eval()
    assert not ours({"one": nothing, "bag": Bag(nothing, torch.zeros(1, dtype=torch.int64))}).flat.requires_grad
    bad = {"one": torch.tensor([ROWS]), "bag": Bag(nothing, torch.zeros(2, dtype=torch.int64))}
    with pytest.raises(KeyRangeError, match=r"feature 'one', table 'item'[\s\S]*0 <= key < 37"):
        ours(bad)


def sent(group, batch, **settings):
    """Return the numbers that one process sends in forward and backward of a batch."""
    plan = ShardingPlan(world_size=group.size, tables=[plans(group.size)["row"].table("item")])
    feature = [FeatureConfig(name="one", table="item")]
    ours = ShardedCollection(tables()[:1], feature, SGD(), plan=plan, group=group, **settings)
    ours(batch)  # once before: layouts are told
    total = 0
    usual = group.start_all_to_all

    def counted(given, *splits):
        nonlocal total
        total += given.numel()
        return usual(given, *splits)

    group.start_all_to_all = counted
    try:
        ours(batch).flat.sum().backward()
        ours.step(0.1)
    finally:
        del group.start_all_to_all
    return total


def less_is_sent():
    group = Group.world()
    batch = {"one": torch.arange(400) % 5}  # 5 distinct rows
    dim, n = 6, group.size
    # Counts to each process, 5 ids, and 5 vectors each way, which go by the asker's and the owner's side.
    mine = sent(group, batch, deduplicate_ids=True)
    owned = len([key for key in range(5) if key % n == group.rank]) * n  # what all ask of this process
    assert mine == n + 5 + owned * dim + 5 * dim
    assert sent(group, batch) == n * 400 + n * 400 * dim * 2


def everything(wanted):
    every_kind(wanted)
    for check in (several_storages, nasty, less_is_sent):
        check()


def test_one_process():
    every_kind(SOME)
    several_storages()
    nasty()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_what_one_trains(size):
    processes.run(size, everything, SOME)


def test_dynamic_tables_are_refused():
    raw = DynamicTableConfig(name="item", dim=6)
    plan = ShardingPlan(world_size=1, tables=[TablePlan(table="item", kind="table", ranks=[0])])
    with pytest.raises(ConfigError, match=r"dynamic table[\s\S]*deduplicate_ids=False"):
        ShardedCollection([raw], [FeatureConfig(name="one", table="item")], SGD(), plan=plan, deduplicate_ids=True)

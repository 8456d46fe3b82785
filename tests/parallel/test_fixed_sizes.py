"""Batches whose sizes are said in advance, over 1, 2 and 4 processes, against one collection that sees them as one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import processes
from test_sharded_collection import FEATURES, ROWS, RULES, joined, plans, tables

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad
from viviane.core.errors import ConfigError, DataError, KeyRangeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.parallel import Group, ShardedCollection, ShardingPlan, TablePlan

SIZE = 5
HOTNESS = {"bag": 3, "mean": 2, "history": 2, "land": 1}


def batches(count, step, *, keys=ROWS, size=SIZE, hotness=HOTNESS, device="cpu"):
    rng = torch.Generator().manual_seed(step)
    kind = torch.int32 if step % 2 else torch.int64

    def ids(rows, high):
        return torch.randint(0, high, (rows,), generator=rng).to(kind).to(device)

    found = []
    for _ in range(count):
        one = {"one": ids(size, keys), "city": ids(size, 5)}
        for name, number in hotness.items():
            offsets = torch.arange(size + 1, device=device) * number
            one[name] = Bag(ids(size * number, 5 if name == "land" else keys), offsets)
        found.append(one)
    return found


def train_alike(group, plan, rule, name, *, options=None, steps=4, keys=ROWS, device="cpu", **settings):
    """Train one collection on the joined batches, the other over the processes; they stay equal."""
    truth = EmbeddingCollection(tables(**options or {}), FEATURES, rule, seed=3, device=device)
    ours = ShardedCollection(
        tables(**options or {}), FEATURES, rule, plan=plan, group=group, seed=3, device=device, **settings
    )
    ours.fix_sizes(SIZE, HOTNESS)
    for step in range(steps):
        parts = batches(group.size, step, keys=keys, device=device)
        rows = slice(SIZE * group.rank, SIZE * (group.rank + 1))
        mine, other = ours(parts[group.rank]), truth(joined(parts))
        assert not ours.exchanges.jagged, "the exchange of varying sizes was taken"
        # A bag over n processes is n sums in float32, added: a few rounding steps apart from one sum.
        torch.testing.assert_close(mine.flat, other.flat[rows], rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")
        assert torch.equal(mine.mask("history"), other.mask("history")[rows]), name
        pull = torch.randn(other.flat.shape, generator=torch.Generator().manual_seed(step)).to(device)
        other.flat.backward(pull)
        mine.flat.backward(pull[rows])
        if step == 2:  # rows of replicated tables are summed in another way for a norm
            torch.testing.assert_close(ours.grad_norm_squared(), truth.grad_norm_squared(), rtol=1e-5, atol=0)
        for collection in (ours, truth):
            collection.step(0.1, 0.5)
    for table in ("item", "city"):
        mine, other = ours.export_table(table), truth.export_table(table)
        assert mine.step == other.step, name
        # Sums of gradients in another order, through four steps; the rules divide by their roots.
        torch.testing.assert_close(mine.weight, other.weight, rtol=1e-4, atol=2e-6, msg=lambda m: f"{name}: {m}")
        for part in other.state:
            torch.testing.assert_close(mine.state[part], other.state[part], rtol=1e-4, atol=1e-5)


def every_kind(wanted, device="cpu"):
    group = Group.world()
    for kind, plan in plans(group.size).items():
        for name, rule in RULES.items():
            if (kind, name) in wanted:
                train_alike(group, plan, rule, f"{kind}, {name}", device=device)
    options = {"out_of_range": "ignore", "padding_id": 0}  # means count fewer ids, and some bags are empty
    for kind in ("row", "hybrid", "replicated"):
        train_alike(group, plans(group.size)[kind], AdaGrad(), kind, options=options, keys=2 * ROWS, device=device)


def several_storages(device="cpu"):
    """Tables of three widths and two types, of which one process has none."""
    group = Group.world()
    shapes = {"a": (9, 4, "float32"), "b": (11, 4, "bfloat16"), "c": (7, 2, "float32"), "d": (6, 4, "float32")}
    made = [TableConfig(name=n, num_rows=r, dim=d, dtype=t, init="normal") for n, (r, d, t) in shapes.items()]
    features = [FeatureConfig(name=n, table=n) for n in shapes] + [FeatureConfig(name="e", table="a")]
    kinds = {"a": "table", "b": "table", "c": "table", "d": "replicated"}
    plan = ShardingPlan(
        world_size=group.size,
        tables=[TablePlan(table=n, kind=k, ranks=[0] if k == "table" else []) for n, k in kinds.items()],
    )
    truth = EmbeddingCollection(made, features, SGD(), seed=2, device=device)
    ours = ShardedCollection(made, features, SGD(), plan=plan, group=group, seed=2, batch_size=SIZE, device=device)
    rng = torch.Generator().manual_seed(0)
    rows = slice(SIZE * group.rank, SIZE * (group.rank + 1))
    for _ in range(2):
        whole = {f.name: torch.randint(0, shapes[f.table][0], (SIZE * group.size,), generator=rng) for f in features}
        whole = {name: ids.to(device) for name, ids in whole.items()}
        ahead = ours.distribute({name: ids[rows] for name, ids in whole.items()})
        mine, other = ours(ahead).flat, truth(whole).flat
        torch.testing.assert_close(mine, other[rows], rtol=0, atol=0)  # single vectors: copies
        other.sum().backward()
        mine.sum().backward()
        for collection in (ours, truth):
            collection.step(0.5)
    for name in ("a", "c", "d"):  # rows of 16 bits round by chance of their place
        torch.testing.assert_close(ours.export_table(name).weight, truth.export_table(name).weight)


def sixteen_bits(device="cpu"):
    group = Group.world()
    for dtype, digits in ((torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        for kind in ("table", "replicated"):
            truth = EmbeddingCollection(tables(), FEATURES, SGD(), seed=3, device=device)
            ours = ShardedCollection(
                tables(), FEATURES, SGD(), plan=plans(group.size)[kind], group=group, seed=3, wire_dtype=dtype,
                device=device,
            )  # fmt: skip
            ours.fix_sizes(SIZE, HOTNESS)
            parts = batches(group.size, 0, device=device)
            rows = slice(SIZE * group.rank, SIZE * (group.rank + 1))
            mine, other = ours(parts[group.rank]).flat, truth(joined(parts)).flat
            torch.testing.assert_close(mine, other[rows], rtol=digits, atol=1e-6)
            other.sum().backward()
            mine.sum().backward()
            for collection in (ours, truth):
                collection.step(0.1)
            # Gradients are whole numbers up to some tens: sixteen bits hold them; 1/2 of a mean too.
            mine, other = ours.export_table("item").weight, truth.export_table("item").weight
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def twice_before_a_step():
    """Gradients of two batches add up."""
    group = Group.world()
    for kind in ("row", "hybrid"):
        truth = EmbeddingCollection(tables(), FEATURES, AdaGrad(), seed=3)
        ours = ShardedCollection(tables(), FEATURES, AdaGrad(), plan=plans(group.size)[kind], group=group, seed=3)
        ours.fix_sizes(SIZE, HOTNESS)
        for step in range(2):
            parts = batches(group.size, step)
            truth(joined(parts)).flat.sum().backward()
            ours(parts[group.rank]).flat.sum().backward()
        for collection in (ours, truth):
            collection.step(0.1)
        mine, other = ours.export_table("item").weight, truth.export_table("item").weight
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-6)  # as in train_alike


def refusals():
    group = Group.world()
    ours = ShardedCollection(tables(), FEATURES, SGD(), plan=plans(group.size)["hybrid"], group=group)
    ours.fix_sizes(SIZE, HOTNESS)
    with pytest.raises(DataError, match="the batch size differs"):
        ours(batches(group.size, 0, size=3)[group.rank])
    for hotness, words in (
        ({**HOTNESS, "bag": 4}, r"number of ids[\s\S]*'bag'"),
        ({**HOTNESS, "history": 4}, "longer"),
    ):
        ours.fix_sizes(SIZE, HOTNESS if hotness["bag"] == 4 else hotness)
        with pytest.raises(DataError, match=words):
            ours(batches(group.size, 0, hotness=hotness)[group.rank])
    ours.fix_sizes(SIZE, HOTNESS)
    one = batches(group.size, 0)[group.rank]
    uneven = Bag(one["mean"].values, torch.tensor([0, 2, 4, 5, 8, 10]))  # as many ids in all
    with pytest.raises(DataError, match=r"'mean', row 2 of the batch[\s\S]*2 a row"):
        ours({**one, "mean": uneven})
    ours(one).flat.sum().backward()
    ours.fix_sizes(None)
    if group.size > 1:
        with pytest.raises(ConfigError, match="wait for one step"):
            ours(one)
    ours.step(0.1)
    ours(batches(group.size, 0, size=3)[group.rank]).flat.sum().backward()  # of any size again
    ours.step(0.1)
    ours.fix_sizes(SIZE, HOTNESS)
    ours.eval()
    ours(batches(group.size, 0, size=3)[group.rank])  # out of training sizes may differ
    ours.train()
    one["one"] = one["one"] + ROWS
    with pytest.raises(KeyRangeError, match=r"feature 'one', table 'item'[\s\S]*0 <= key < 37"):
        ours(one)


def weighted_bags_take_the_other_way():
    group = Group.world()
    truth = EmbeddingCollection(tables(), FEATURES, SGD(), seed=3)
    ours = ShardedCollection(tables(), FEATURES, SGD(), plan=plans(group.size)["row"], group=group, seed=3)
    ours.fix_sizes(SIZE, HOTNESS)
    parts = batches(group.size, 0)
    for part in parts:
        for name in HOTNESS:
            bag = part[name]
            part[name] = Bag(bag.values, bag.offsets, torch.arange(len(bag.values)) % 3 + 0.5)
    rows = slice(SIZE * group.rank, SIZE * (group.rank + 1))
    torch.testing.assert_close(
        ours(parts[group.rank]).flat, truth(joined(parts)).flat[rows], rtol=1e-5, atol=1e-6
    )  # as in train_alike
    assert not ours.exchanges.static


def everything(wanted):
    every_kind(wanted)
    for check in (several_storages, sixteen_bits, twice_before_a_step, refusals, weighted_bags_take_the_other_way):
        check()


NO_COLUMNS = {"row_wise", "decay"}
ALL = {(kind, rule) for kind in plans(1) for rule in RULES if kind != "column" or rule not in NO_COLUMNS}
SOME = {(kind, rule) for kind in plans(1) for rule in ("adagrad", "lazy")}


@pytest.mark.parametrize(("size", "wanted"), [(1, SOME), (2, ALL)], ids=["1", "2"])
def test_fixed_sizes_train_what_one_process_trains(size, wanted):
    if size == 1:
        everything(wanted)
    else:
        processes.run(size, everything, wanted)


@pytest.mark.slow
def test_fixed_sizes_over_four_processes():
    processes.run(4, everything, SOME)

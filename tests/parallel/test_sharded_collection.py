"""Tables over 1, 2 and 4 processes against one EmbeddingCollection that sees all batches as one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import processes

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad, Adam, Ftrl, RMSProp
from viviane.core.errors import ConfigError, KeyRangeError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.parallel import Group, ShardedCollection, ShardingPlan, TablePlan

ROWS = 37  # of the table under test: uneven over 2 and 4 processes
SIZES = [3, 5, 0, 4]  # rows of each process's batch: uneven, and one has none
FEATURES = [
    FeatureConfig(name="one", table="item"),
    FeatureConfig(name="city", table="city"),
    FeatureConfig(name="bag", table="item"),
    FeatureConfig(name="mean", table="item", combiner="mean"),
    FeatureConfig(name="history", table="item", combiner="concat", max_length=3),
    FeatureConfig(name="land", table="city", combiner="mean"),
]
RULES = {
    "sgd": SGD(), "momentum": SGD(momentum=0.9), "adagrad": AdaGrad(), "row_wise": AdaGrad(row_wise=True),
    "rmsprop": RMSProp(), "adam": Adam(), "lazy": Adam(update="lazy_global"), "global": Adam(update="global"),
    "ftrl": Ftrl(lambda1=0.01), "decay": SGD(weight_decay=0.1, clip_row_norm=0.05),
}  # fmt: skip
NO_COLUMNS = {"row_wise", "decay"}


def tables(**options):
    return [
        TableConfig(name="item", num_rows=ROWS, dim=6, init="normal", **options),
        TableConfig(name="city", num_rows=5, dim=2, padding_id=0),
    ]


def plans(size):
    last = size - 1
    kinds = {
        "table": {"kind": "table", "ranks": [last]},
        "row": {"kind": "row", "ranks": list(range(size))},
        "row backwards": {"kind": "row", "ranks": list(range(size))[::-1]},
        "column": {"kind": "column", "ranks": list(range(size))},
        "hybrid": {"kind": "hybrid", "ranks": list(range(size)), "num_hot": 7},
        "replicated": {"kind": "replicated"},
    }
    city = TablePlan(table="city", kind="replicated")
    return {
        name: ShardingPlan(world_size=size, tables=[TablePlan(table="item", **kind), city])
        for name, kind in kinds.items()
    }


def batches(size, step, weighted, keys=ROWS):
    """Return the batch of each process, drawn alike on all of them."""
    rng = torch.Generator().manual_seed(step)

    def ids(count, high):
        return torch.randint(0, high, (count,), generator=rng, dtype=torch.int32 if step % 2 else torch.int64)

    def bag(rows, most, high):
        lengths = torch.randint(0, most + 1, (rows,), generator=rng)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        return Bag(ids(count, high), offsets, torch.rand(count, generator=rng) + 0.5 if weighted else None)

    result = []
    for rows in [SIZES[(rank + step) % len(SIZES)] for rank in range(size)]:
        one = {"one": ids(rows, keys), "city": ids(rows, 5), "bag": bag(rows, 4, keys), "mean": bag(rows, 4, keys)}
        result.append(one | {"history": bag(rows, 3, keys), "land": bag(rows, 3, 5)})
    return result


def joined(parts):
    """Return the batches of all processes as one."""
    whole = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if isinstance(values[0], Bag):
            ends = torch.tensor([0, *(len(bag.values) for bag in values)]).cumsum(0)
            offsets = [bag.offsets[1:] + end for bag, end in zip(values, ends[:-1], strict=True)]
            weights = None if values[0].weights is None else torch.cat([bag.weights for bag in values])
            flat = torch.cat([bag.values for bag in values])
            whole[name] = Bag(flat, torch.cat([offsets[0].new_zeros(1), *offsets]), weights)
        else:
            whole[name] = torch.cat(values)
    return whole


def train_alike(group, plan, rule, options=None, steps=5, name="", **settings):
    """Train one collection on the joined batches, the other over the processes; they stay equal."""
    truth = EmbeddingCollection(tables(**options or {}), FEATURES, rule, seed=3)
    ours = ShardedCollection(tables(**options or {}), FEATURES, rule, plan=plan, group=group, seed=3, **settings)
    for table in ("item", "city"):
        assert torch.equal(ours.export_table(table).weight, truth.export_table(table).weight), name
    for step in range(steps):
        parts = batches(group.size, step, weighted=step % 3 == 1)
        start = sum(len(part["one"]) for part in parts[: group.rank])
        rows = slice(start, start + len(parts[group.rank]["one"]))
        mine, other = ours(parts[group.rank]), truth(joined(parts))
        # A bag over n processes is n sums in float32, added: a few rounding steps apart from one sum.
        torch.testing.assert_close(mine.flat, other.flat[rows], rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")
        assert torch.equal(mine.mask("history"), other.mask("history")[rows]), name
        pull = torch.randn(other.flat.shape, generator=torch.Generator().manual_seed(step))
        other.flat.backward(pull)
        mine.flat.backward(pull[rows])
        if step == 2:
            torch.testing.assert_close(ours.grad_norm_squared(), truth.grad_norm_squared(), rtol=1e-5, atol=0)
        for collection in (ours, truth):
            collection.step(0.1, 0.5)
    for table in ("item", "city"):
        mine, other = ours.export_table(table), truth.export_table(table)
        assert mine.step == other.step, name
        # Sums of gradients in another order, through 5 steps; the rules divide by their roots.
        torch.testing.assert_close(mine.weight, other.weight, rtol=1e-4, atol=2e-6, msg=lambda m: f"{name}: {m}")
        assert mine.state.keys() == other.state.keys()
        for part in other.state:
            torch.testing.assert_close(mine.state[part], other.state[part], rtol=1e-4, atol=1e-5)


def every_kind_and_rule(wanted):
    group = Group.world()
    for kind, plan in plans(group.size).items():
        for name, rule in RULES.items():
            if (kind == "column" and name in NO_COLUMNS and group.size > 0) or (kind, name) not in wanted:
                continue
            train_alike(group, plan, rule, name=f"{kind}, {name}")


def policies():
    """Keys out of range are judged where the batch is, on whole tables."""
    group = Group.world()
    for policy in ("default", "hash", "ignore"):
        for kind in ("row", "column", "hybrid", "table"):
            options = {"out_of_range": policy, "padding_id": 0, **({"default_id": 2} if policy == "default" else {})}
            plan = plans(group.size)[kind]
            truth = EmbeddingCollection(tables(**options), FEATURES, SGD(), seed=3)
            ours = ShardedCollection(tables(**options), FEATURES, SGD(), plan=plan, group=group, seed=3)
            parts = batches(group.size, 0, weighted=False, keys=3 * ROWS)
            start = sum(len(part["one"]) for part in parts[: group.rank])
            rows = slice(start, start + len(parts[group.rank]["one"]))
            torch.testing.assert_close(
                ours(parts[group.rank]).flat, truth(joined(parts)).flat[rows], rtol=1e-5, atol=1e-6
            )  # as in train_alike


def contents():
    """What is exported on one plan and imported on another is the same."""
    group = Group.world()
    every = plans(group.size)
    source = ShardedCollection(tables(padding_id=4), FEATURES, Adam(), plan=every["row"], group=group, seed=1)
    for step in range(2):
        source(batches(group.size, step, weighted=False)[group.rank]).flat.sum().backward()
        source.step(0.1)
    content = source.export_table("item")
    for plan in every.values():
        other = ShardedCollection(tables(padding_id=4), FEATURES, Adam(), plan=plan, group=group, seed=2)
        other.import_table("item", content)
        again = other.export_table("item")
        assert again.step == content.step
        assert torch.equal(again.weight, content.weight)
        assert all(torch.equal(again.state[name], part) for name, part in content.state.items())


def dynamic_tables():
    group = Group.world()
    raw = DynamicTableConfig(name="item", dim=6, init="normal")
    city = tables()[1]
    features = [one for one in FEATURES if one.combiner != "concat"]
    item = TablePlan(table="item", kind="table", ranks=[group.size - 1])
    plan = ShardingPlan(world_size=group.size, tables=[item, TablePlan(table="city", kind="replicated")])
    truth = EmbeddingCollection([raw, city], features, AdaGrad(), seed=3)
    ours = ShardedCollection([raw, city], features, AdaGrad(), plan=plan, group=group, seed=3)
    for step in range(4):
        parts = batches(group.size, step, weighted=False)
        for part in parts:
            part["one"] = part["one"].to(torch.int64) * 10**15 - 5
        start = sum(len(part["one"]) for part in parts[: group.rank])
        rows = slice(start, start + len(parts[group.rank]["one"]))
        mine, other = ours(parts[group.rank]), truth(joined(parts))
        torch.testing.assert_close(mine.flat, other.flat[rows], rtol=1e-4, atol=2e-6)  # as in train_alike
        other.flat.sum().backward()
        mine.flat.sum().backward()
        for collection in (ours, truth):
            collection.step(0.1)


def wires():
    """Sixteen bits on the wire round vectors and gradients once."""
    group = Group.world()
    plan = plans(group.size)["table"]
    for dtype, digits in ((torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        truth = EmbeddingCollection(tables(), FEATURES, SGD(), seed=3)
        ours = ShardedCollection(tables(), FEATURES, SGD(), plan=plan, group=group, seed=3, wire_dtype=dtype)
        parts = batches(group.size, 0, weighted=False)
        start = sum(len(part["one"]) for part in parts[: group.rank])
        rows = slice(start, start + len(parts[group.rank]["one"]))
        mine, other = ours(parts[group.rank]), truth(joined(parts))
        torch.testing.assert_close(mine.flat, other.flat[rows], rtol=digits, atol=1e-6)


def errors():
    group = Group.world()
    ours = ShardedCollection(tables(), FEATURES, SGD(), plan=plans(group.size)["row"], group=group)
    parts = batches(group.size, 0, weighted=False)
    bad = dict(parts[group.rank]) | {"one": parts[group.rank]["one"] + ROWS}
    if len(bad["one"]):
        with pytest.raises(KeyRangeError, match=r"feature 'one', table 'item'[\s\S]*0 <= key < 37"):
            ours(bad)


def everything(wanted):
    every_kind_and_rule(wanted)
    for check in (policies, contents, dynamic_tables, wires, errors):
        check()


ALL = {(kind, rule) for kind in plans(1) for rule in RULES}
# Four processes on two cores: each kind with the rules that differ in what they need from a row.
SOME = {(kind, rule) for kind in plans(1) for rule in ("adagrad", "lazy")} | {("row", "row_wise"), ("hybrid", "global")}


def test_one_process_is_an_ordinary_collection():
    everything(ALL)


@pytest.mark.parametrize(
    ("size", "wanted"), [pytest.param(2, ALL, id="2"), pytest.param(4, SOME, id="4", marks=pytest.mark.slow)]
)
def test_several_processes_train_what_one_trains(size, wanted):
    processes.run(size, everything, wanted)


def differ_in_kind():
    group = Group.world()
    ours = ShardedCollection(tables(), FEATURES, SGD(), plan=plans(group.size)["row"], group=group)
    batch = batches(group.size, 0, weighted=group.rank == 1)[group.rank]
    ours(batch)


def test_batches_of_different_kinds_are_an_error_and_not_a_hang():
    with pytest.raises(AssertionError, match="different columns"):
        processes.run(2, differ_in_kind)


def test_plans_that_cannot_be_are_refused():
    def plan(world_size=1, **item):
        return ShardingPlan(
            world_size=world_size, tables=[TablePlan(table="item", **item), TablePlan(table="city", kind="replicated")]
        )

    with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node 2"):
        ShardedCollection(tables(), FEATURES, SGD(), plan=plan(2, kind="table", ranks=[1]))
    with pytest.raises(ConfigError, match="takes no ranks"):
        TablePlan(table="a", kind="replicated", ranks=[0])
    with pytest.raises(ConfigError, match="takes one rank"):
        TablePlan(table="a", kind="table", ranks=[0, 1])
    with pytest.raises(ConfigError, match="twice"):
        TablePlan(table="a", kind="row", ranks=[0, 0])
    with pytest.raises(ConfigError, match="num_hot"):
        TablePlan(table="a", kind="row", ranks=[0], num_hot=3)
    with pytest.raises(ConfigError, match="of 1 processes"):
        plan(kind="row", ranks=[1])
    with pytest.raises(ConfigError, match=r"whole rows[\s\S]*row_wise"):
        ShardedCollection(tables(), FEATURES, AdaGrad(row_wise=True), plan=plan(kind="column", ranks=[0]))
    with pytest.raises(ConfigError, match=r"lacks a table[\s\S]*city"):
        ShardedCollection(
            tables(),
            FEATURES,
            SGD(),
            plan=ShardingPlan(world_size=1, tables=[TablePlan(table="item", kind="table", ranks=[0])]),
        )
    raw = DynamicTableConfig(name="item", dim=6)
    with pytest.raises(ConfigError, match=r"on one process[\s\S]*'row'"):
        ShardedCollection([raw, tables()[1]], FEATURES, SGD(), plan=plan(kind="row", ranks=[0]))
    with pytest.raises(ConfigError, match=r"does not support 'concat'"):
        ShardedCollection([raw, tables()[1]], FEATURES, SGD(), plan=plan(kind="table", ranks=[0]))

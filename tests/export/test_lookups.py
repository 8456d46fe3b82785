"""Frozen lookups against the collections that they copy, key by key, in standard operators and in ours."""

import pytest
import torch
from export_models import rows
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.batch import Bag, Batch
from viviane.config import SGD
from viviane.core.errors import KeyRangeError, VivianeError
from viviane.embedding import (
    DynamicTableConfig,
    EmbeddingCollection,
    FeatureConfig,
    TableConfig,
)
from viviane.export import plain
from viviane.export.frozen_keys import freeze_keys
from viviane.export.tables import FrozenCollection
from viviane.ops.key_rows import HASH, RAISE, REPLACE, SKIP, ColumnRule, KeyRules, key_rows

EDGES = [-(2**63), -(2**31) - 1, -1, 0, 1, 2, 3, 2**31, 2**63 - 1]


@settings(max_examples=30)
@given(st.data())
def test_rows_of_keys_are_those_of_the_kernels(data) -> None:
    rules, base = [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(1, 9))
        padding = data.draw(st.integers(-1, size - 1)) if size > 1 else -1
        policy = data.draw(st.sampled_from([REPLACE, HASH, SKIP, RAISE]))
        rules.append(ColumnRule(base, size, policy, base + data.draw(st.integers(0, size - 1)), padding))
        base += size
    key = st.one_of(st.integers(-2, 12), st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))
    keys = torch.tensor([[data.draw(key) for _ in rules] for _ in range(data.draw(st.integers(0, 5)))])
    keys = keys.to(torch.int64).view(-1, len(rules))
    expected, record = key_rows(keys, KeyRules(rules, base, torch.device("cpu")))
    found = plain.key_rows(keys, rules, base)
    refused = found == base + plain.BEYOND
    assert bool(refused.any()) == bool(record[0])
    assert torch.equal(torch.where(refused, base, found), expected.to(torch.int64))


@settings(max_examples=30)
@given(st.lists(st.one_of(st.integers(-50, 50), st.integers(-(2**63), 2**63 - 1)), unique=True), st.data())
def test_frozen_keys_are_found_and_no_others(keys, data) -> None:
    known = torch.tensor(keys, dtype=torch.int64)
    frozen = freeze_keys(known)
    assert torch.equal(known[frozen.order], frozen.keys)
    if not keys:
        return
    asked = torch.tensor([*data.draw(st.lists(st.integers(-60, 60))), *EDGES, *keys])
    places, there = plain.find_keys(asked, frozen.keys, frozen.starts, frozen.seed, frozen.width)
    assert there.tolist() == [key in set(keys) for key in asked.tolist()]
    assert torch.equal(frozen.keys[places[there]], asked[there])


def test_buckets_stay_small() -> None:
    for keys in (torch.arange(200_000), torch.arange(200_000) << 44, torch.randint(-(2**63), 2**63 - 1, (200_000,))):
        assert freeze_keys(keys.unique()).width <= 16


POLICIES = ["raise", "default", "hash", "ignore"]


def collection(combiner: str, weighted: bool = False) -> EmbeddingCollection:
    init = {"type": "normal", "std": 1.0}
    tables = [
        *(TableConfig(name=p, num_rows=7, dim=3, init=init, out_of_range=p, padding_id=0) for p in POLICIES),
        TableConfig(name="one_row", num_rows=1, dim=3, init=init, out_of_range="hash"),
        TableConfig(name="row_2", num_rows=5, dim=2, init=init, out_of_range="default", default_id=2),
        TableConfig(name="narrow", num_rows=9, dim=3, dtype="bfloat16", out_of_range="ignore", padding_id=4),
        DynamicTableConfig(name="grown", dim=3, init=init, padding_id=-5),
        DynamicTableConfig(name="initial", dim=2, init={"type": "uniform"}, absent="initial"),
        DynamicTableConfig(name="normal", dim=2, init=init, absent="initial", dtype="float16"),
        DynamicTableConfig(name="empty", dim=2),
    ]
    length = {"max_length": 4} if combiner == "concat" else {}
    features = [FeatureConfig(name=t.name, table=t.name, combiner=combiner, **length) for t in tables]
    made = EmbeddingCollection(tables, features, SGD(), seed=3)
    for name in ("grown", "initial", "normal"):
        made.dynamic_table(name).find_or_insert(torch.arange(-3, 30) * 7)
    return made.eval()


def keys_of(name: str, count: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if name == "raise":
        return torch.randint(7, (count,), generator=draw)
    pool = torch.tensor([*EDGES, *range(-8, 15), 21, 203])
    return pool[torch.randint(len(pool), (count,), generator=draw)]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    "form", ["one_hot", "sum", "mean", "concat", "weighted sum", "weighted mean", "weighted concat"]
)
def test_a_frozen_collection_gives_the_same_vectors(form, kernels) -> None:
    combiner = form.split()[-1] if form != "one_hot" else "sum"
    made = collection(combiner)
    frozen = FrozenCollection(made, "emb", kernels, {}).eval()
    for size in (0, 1, 33):
        lengths = torch.randint(0, 5, (size,)) if size != 1 else torch.zeros(1, dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        asked = {}
        for i, name in enumerate(made.features):
            if form == "one_hot":
                asked[name] = keys_of(name, size, i)
                continue
            values = keys_of(name, int(offsets[-1]), i)
            weights = torch.randint(0, 3, (len(values),)).float() if "weighted" in form else None
            asked[name] = Bag(values, offsets, weights)
        with torch.no_grad():
            expected, found = made(asked), frozen(asked)
        for name in made.features:
            # float16 values of the normal law differ by their last bit where a logarithm does
            tolerance = 2e-3 if name == "normal" else 1e-6
            torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=2e-6)
        assert expected.masks.keys() == found.masks.keys()
        assert all(torch.equal(expected.mask(name), found.mask(name)) for name in expected.masks)


@pytest.mark.parametrize("kernels", [False, True])
def test_refused_keys_and_long_bags_are_errors_of_the_lookup_itself(kernels) -> None:
    frozen = FrozenCollection(collection("sum"), "emb", kernels, {})
    good = {name: torch.zeros(2, dtype=torch.int64) for name in frozen.features}
    for key in (7, -1, 2**40):
        with pytest.raises((IndexError, RuntimeError, KeyRangeError), match="range"):
            frozen(good | {"raise": torch.tensor([1, key])})
    frozen = FrozenCollection(collection("concat"), "emb", kernels, {})
    with pytest.raises((IndexError, RuntimeError, VivianeError), match=r"range|does not exist"):
        frozen({name: Bag(torch.zeros(5, dtype=torch.int64), torch.tensor([0, 5])) for name in frozen.features})


def test_the_memory_of_fixed_tables_is_the_models_own() -> None:
    made = collection("sum")
    frozen = FrozenCollection(made, "emb", False, {})
    assert frozen.parts[0].weight.data_ptr() == made.all_storages()[0].weight.data_ptr()


def test_operators_are_described_for_tracing() -> None:
    from viviane.export import operators

    keys, weight = torch.tensor([[1, 2], [3, 0]]), torch.randn(6, 3)
    rules = operators.flat_rules([ColumnRule(0, 4, RAISE), ColumnRule(0, 4, SKIP)])
    bag_rows, offsets = torch.tensor([1, 0, 3]), torch.tensor([0, 2, 3])
    frozen = freeze_keys(torch.tensor([5, 6, 7, 8]))
    calls = [
        (operators.serving_rows, (keys, rules, 4)),
        (operators.serving_find, (keys, frozen.keys, frozen.starts, frozen.seed, frozen.width, 5)),
        (operators.serving_gather, (weight, keys)),
        (operators.serving_pool, (weight, bag_rows, offsets, torch.ones(3))),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments)


def test_ids_reach_layers_that_read_them_whatever_the_batch() -> None:
    from export_models import MANY

    from viviane.model.ids import Ids

    ids = Ids([("user", 1), ("hist", 8)])
    batch = Batch.from_columns(MANY, rows(MANY, 5))
    found = ids(batch)
    for row, (user, hist) in enumerate(zip(batch.one_hot[:, 0], batch.bags["hist"].lengths.tolist(), strict=True)):
        own = batch.bags["hist"].values[batch.bags["hist"].offsets[row] :][:hist]
        assert found[row, : hist + 1].tolist() == [int(user), *own.tolist()]

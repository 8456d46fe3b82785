"""Dynamic tables inside a collection: equal to ordinary tables of the same rows, and the keys' coming and going."""

import copy
import pickle

import pytest
import torch

from viviane.batch import Bag, Batch
from viviane.config import SGD, AdaGrad, Adam, Ftrl, RMSProp
from viviane.core.errors import ConfigError, DataError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.ops.hash_table import TableFullError
from viviane.schema import Schema

NUM_KEYS, DIM = 23, 3
RULES = [
    SGD(), SGD(momentum=0.9, nesterov=True), AdaGrad(), AdaGrad(row_wise=True), RMSProp(), Adam(),
    Adam(update="lazy_global"), Ftrl(lambda1=0.01),
]  # fmt: skip
# Raw ids of the ordinary table's keys 0, 1, ...: the smallest and largest int64, 0 and -1 among them.
RAW = torch.cat([torch.tensor([-(2**63), 2**63 - 1, 0, -1]), torch.arange(NUM_KEYS - 4) * 1_000_003 + 77])
FEATURES = [
    FeatureConfig(name="one", table="item"),
    FeatureConfig(name="other", table="item"),
    FeatureConfig(name="bag", table="item", combiner="sum"),
    FeatureConfig(name="mean", table="item", combiner="mean"),
    FeatureConfig(name="history", table="item", combiner="concat", max_length=3),
    FeatureConfig(name="plain", table="city"),
]


def _pair(rule, **options):
    """Return a collection with a dynamic table, and one with an ordinary table of the same initial rows."""
    city = TableConfig(name="city", num_rows=5, dim=2)
    dynamic = DynamicTableConfig(name="item", dim=DIM, init="normal", initial_capacity=4, **options)
    ours = EmbeddingCollection([city, dynamic], FEATURES, rule, seed=3)
    plain = TableConfig(name="item", num_rows=NUM_KEYS, dim=DIM, padding_id=options.get("padding_id"))
    truth = EmbeddingCollection([city, plain], FEATURES, rule, seed=3)
    fresh = EmbeddingCollection([city, dynamic], FEATURES, rule, seed=3).dynamic_table("item")
    keys = RAW if dynamic.padding_id is None else torch.arange(1, NUM_KEYS)
    first = 0 if dynamic.padding_id is None else 1
    fresh.find_or_insert(keys)
    truth.table_rows("item")[first:] = fresh.find(keys)[0]
    return ours, truth


def _batch(size, seed, values, weighted=True):
    """Return a batch whose ids are `values` of random numbers."""
    rng = torch.Generator().manual_seed(seed)

    def ids(*shape):
        return values[torch.randint(0, len(values), shape, generator=rng)]

    def bag(most):
        lengths = torch.randint(0, most + 1, (size,), generator=rng)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        return Bag(ids(count), offsets, torch.rand(count, generator=rng) + 0.5 if weighted else None)

    bags = {name: bag(most) for name, most in (("bag", 4), ("mean", 5), ("history", 3))}
    return {"one": ids(size), "other": ids(size), **bags, "plain": torch.randint(0, 5, (size,), generator=rng)}


def _raw(batch):
    """Give the ids of an ordinary table their raw ones."""
    raw = {}
    for name, keys in batch.items():
        if name == "plain":
            raw[name] = keys
        else:
            raw[name] = Bag(RAW[keys.values], keys.offsets, keys.weights) if isinstance(keys, Bag) else RAW[keys]
    return raw


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:40])
def test_trains_as_an_ordinary_table_of_the_same_rows_bit_by_bit(rule):
    ours, truth = _pair(rule)
    for step, size in enumerate([7, 1, 0, 7, 64]):
        batch = _batch(size, step, torch.arange(NUM_KEYS), weighted=step % 2 == 0)
        mine, other = ours(_raw(batch)), truth(batch)
        assert torch.equal(mine.flat, other.flat)
        assert torch.equal(mine.mask("history"), other.mask("history"))
        pull = torch.randn(mine.flat.shape, generator=torch.Generator().manual_seed(step))
        for collection, out in ((ours, mine), (truth, other)):
            out.flat.backward(pull)
            collection.step(0.1, 0.5)
    found, there = ours.dynamic_table("item").find(RAW)
    seen = there.nonzero().squeeze(1)
    assert len(seen) == NUM_KEYS
    assert torch.equal(found, truth.export_table("item").weight)


def test_padding_is_left_out_of_means_and_masks_and_never_stored():
    ours, truth = _pair(SGD(), padding_id=0)
    batch = _batch(33, 1, torch.arange(NUM_KEYS))
    mine, other = ours(batch), truth(batch)
    assert torch.equal(mine.flat, other.flat)
    assert torch.equal(mine.mask("history"), other.mask("history"))
    mine.flat.sum().backward()
    ours.step(0.1)
    assert not ours.dynamic_table("item").find(torch.tensor([0]))[1].any()


def test_norm_of_gradients_and_gradients_summed_for_it_are_those_of_an_ordinary_table():
    ours, truth = _pair(AdaGrad())
    batch = _batch(9, 4, torch.arange(NUM_KEYS))
    for collection, keys in ((ours, _raw(batch)), (truth, batch)):
        collection(keys).flat.square().sum().backward()
    # The rows of a table are summed in the order of their numbers, which differ: float64 sums, rounded to float32.
    assert float(ours.grad_norm_squared()) == pytest.approx(float(truth.grad_norm_squared()), rel=1e-6)
    for collection in (ours, truth):
        collection.step(0.1, 0.5)
    assert torch.equal(ours.dynamic_table("item").find(RAW)[0][:4], truth.export_table("item").weight[:4])


def test_evaluation_and_frozen_tables_take_no_keys_in():
    ours, _ = _pair(SGD())
    batch = _raw(_batch(5, 0, torch.arange(NUM_KEYS)))
    with torch.no_grad():
        assert not ours(batch)["one"].any()
    assert not ours.eval()(batch)["one"].any()
    ours.train().freeze("item")
    out = ours(batch)
    out.flat.sum().backward()
    ours.step(0.1)
    assert len(ours.dynamic_table("item")) == 0
    ours.unfreeze("item")
    ours(batch)
    assert len(ours.dynamic_table("item")) > 0


def test_absent_keys_may_read_the_values_they_would_begin_with():
    ours, _ = _pair(SGD(), absent="initial")
    batch = _raw(_batch(6, 0, torch.arange(NUM_KEYS)))
    with torch.no_grad():
        guess = ours(batch).flat.clone()
    assert torch.equal(guess, ours(batch).flat)


def test_two_batches_may_wait_for_one_step_and_their_rows_are_not_given_away():
    rule = SGD()
    table = DynamicTableConfig(
        name="t", dim=1, max_capacity=2, when_full="evict", init={"type": "constant", "value": 0}
    )
    emb = EmbeddingCollection([table], [FeatureConfig(name="f", table="t")], rule)
    first, second = emb({"f": torch.tensor([10])}), emb({"f": torch.tensor([20])})
    (first.flat.sum() + 2 * second.flat.sum()).backward()
    with pytest.raises(TableFullError, match="wait for an update"):
        emb({"f": torch.tensor([30])})
    emb.step(1.0)
    assert emb.dynamic_table("t").find(torch.tensor([10, 20]))[0].view(-1).tolist() == [-1.0, -2.0]
    emb({"f": torch.tensor([30])})
    emb.discard_gradients()
    assert emb.dynamic_table("t").find(torch.tensor([10, 20, 30]))[1].tolist() == [False, True, True]


def test_a_batch_counts_once_for_admission_however_many_features_it_has():
    table = DynamicTableConfig(name="t", dim=1, admission={"type": "count", "count": 3})
    features = [FeatureConfig(name="a", table="t"), FeatureConfig(name="b", table="t")]
    emb = EmbeddingCollection([table], features, SGD())
    for _ in range(2):
        emb({"a": torch.tensor([5]), "b": torch.tensor([5])})
        emb.step(0.1)
    assert emb.dynamic_table("t").clock == 2
    assert emb.dynamic_table("t").find(torch.tensor([5]))[1].item()


def test_ids_of_32_bits_and_batches_of_a_schema():
    schema = Schema(
        labels=[{"name": "y"}],
        categorical=[
            {"name": "city", "num_ids": 5},
            {"name": "user", "num_ids": None},
            {"name": "seen", "num_ids": None, "kind": "multi_hot"},
        ],
    )
    assert schema.column("user").dtype == "int64"
    assert Schema.from_dict(schema.to_dict()) == schema
    tables = [TableConfig(name="city", num_rows=5, dim=2), DynamicTableConfig(name="user", dim=2)]
    features = [FeatureConfig(name=n, table=t) for n, t in (("city", "city"), ("user", "user"), ("seen", "user"))]
    emb = EmbeddingCollection(tables, features, SGD())
    batch = Batch.from_columns(schema, {"y": [0, 1], "city": [1, 2], "user": [2**62, -7], "seen": [[], [-7, -7]]})
    out = emb(batch)
    # Two products of one number and one sum round as their double does.
    assert torch.equal(out["seen"][1], 2 * out["user"][1])
    small = {
        "city": batch.one_hot[:, 0].int(),
        "user": torch.tensor([3, -7], dtype=torch.int32),
        "seen": batch.bag("seen"),
    }
    assert torch.equal(emb(small)["user"][1], out["user"][1])


def test_state_dict_round_trip_under_the_tables_names():
    tables = [DynamicTableConfig(name=name, dim=2) for name in ("a", "a.weight")] + [
        TableConfig(name="b", num_rows=3, dim=2)
    ]
    features = [FeatureConfig(name=f"f{i}", table=table.name) for i, table in enumerate(tables)]

    def make(seed):
        return EmbeddingCollection(tables, features, Adam(), seed=seed)

    emb, other = make(1), make(2)
    for step in range(3):
        emb({f"f{i}": torch.tensor([step, 2]) for i in range(3)}).flat.sum().backward()
        emb.step(0.1)
    saved = {key: part.clone() for key, part in emb.state_dict().items()}
    assert {"a.keys", "a.weight", "a.weight.keys", "b.weight"} <= saved.keys()
    other.load_state_dict(saved)
    for key, part in other.state_dict().items():
        assert torch.equal(part, saved[key]), key
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "a.keys"'):
        other.load_state_dict({key: part for key, part in saved.items() if key != "a.keys"})


def test_errors_name_feature_and_table():
    emb, _ = _pair(SGD(), max_capacity=NUM_KEYS)
    batch = _raw(_batch(2, 0, torch.arange(NUM_KEYS)))
    with pytest.raises(DataError, match=r"whole numbers[\s\S]*'one'"):
        emb({**batch, "one": torch.tensor([0.5, 1.0])})
    with pytest.raises(TableFullError, match=r"full[\s\S]*'item'"):
        emb({**batch, "one": torch.arange(100), "other": torch.arange(100)} | {
            name: Bag(torch.zeros(0, dtype=torch.int64), torch.zeros(101, dtype=torch.int64))
            for name in ("bag", "mean", "history")
        } | {"plain": torch.zeros(100, dtype=torch.int64)})  # fmt: skip
    with pytest.raises(ConfigError, match=r"come with their keys[\s\S]*'item'"):
        emb.export_table("item")
    with pytest.raises(ConfigError, match=r"not dynamic[\s\S]*'city'"):
        emb.dynamic_table("city")
    with pytest.raises(ConfigError, match="global"):
        EmbeddingCollection(
            [DynamicTableConfig(name="t", dim=1)], [FeatureConfig(name="f", table="t")], Adam(update="global")
        )


def test_gradients_that_are_not_finite_are_traced_to_their_features():
    emb, _ = _pair(SGD())
    batch = _raw(_batch(3, 0, torch.arange(NUM_KEYS)))
    out = emb(batch)
    pull = torch.ones_like(out.flat)
    pull[1, 0] = float("nan")
    out.flat.backward(pull)
    assert emb.nonfinite_gradients() == ["one", "other", "bag", "mean", "history"]


def test_summary_counts_the_keys_and_their_bytes():
    emb, _ = _pair(Adam())
    emb(_raw(_batch(50, 0, torch.arange(NUM_KEYS))))
    line = next(one for one in emb.summary() if one.name == "item")
    keys = len(emb.dynamic_table("item"))
    assert (line.is_dynamic, line.num_rows, line.weight_bytes, line.state_bytes) == (True, keys, keys * 12, keys * 24)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_copies_of_a_collection_have_tables_of_their_own(make_copy):
    ours, _ = _pair(Adam())

    def train(emb, seed):
        out = emb(_batch(6, seed, RAW)).flat
        out.square().sum().backward()
        emb.step(0.05)
        return out.detach()

    train(ours, 1)
    other = make_copy(ours)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    found = train(other, 2)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    assert torch.equal(train(ours, 2), found)
    mine, theirs = ours.state_dict(), other.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())

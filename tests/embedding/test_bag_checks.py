"""No array reaches a kernel that reads memory by it unless it was checked: offsets, weights, types, shapes."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from viviane.batch import Bag, Batch
from viviane.config import SGD
from viviane.core.errors import ConfigError, DataError, VivianeError
from viviane.embedding import DynamicTableConfig, EmbeddingBag, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.jagged import Jagged
from viviane.ops.bag_checks import check_bags, cpu, place_of, reference
from viviane.ops.embedding_bag import entry_sources, pool_rows
from viviane.schema import Schema

KINDS = [(table, combiner) for table in ("static", "dynamic") for combiner in ("sum", "mean", "concat")]
FAR = 2**40


def collection(table="static", combiner="sum", names=("f",)):
    length = 4 if combiner == "concat" else None
    one = TableConfig(name="x", num_rows=9, dim=4) if table == "static" else DynamicTableConfig(name="x", dim=4)
    features = [FeatureConfig(name=name, table="x", combiner=combiner, max_length=length) for name in names]
    return EmbeddingCollection([one], features, SGD())


WRONG_OFFSETS = {
    "beyond the ids": [0, 2, 7],
    "far beyond the ids": [0, FAR, FAR],
    "decreasing": [0, 3, 2],
    "decreasing to the number of ids": [0, 4, 3],
    "negative": [0, -1, 3],
    "far below zero": [-FAR, 0, 3],
    "the smallest number": [0, -(2**63), 3],
    "not from 0": [1, 2, 3],
    "short of the ids": [0, 1, 2],
}


@pytest.mark.parametrize(("table", "combiner"), KINDS)
@pytest.mark.parametrize("offsets", WRONG_OFFSETS.values(), ids=WRONG_OFFSETS)
@pytest.mark.parametrize("train", [False, True])
def test_wrong_offsets_are_refused(table, combiner, offsets, train):
    emb = collection(table, combiner).train(train)
    with pytest.raises(DataError, match="offsets of a bag must begin with 0, never fall, and end") as caught:
        emb({"f": Bag(torch.tensor([1, 2, 3]), torch.tensor(offsets))})
    assert "feature 'f', offset " in str(caught.value)
    assert emb({"f": Bag.from_lists([[1], [2, 3]])}).flat.shape[0] == 2


@pytest.mark.parametrize(("table", "combiner"), KINDS)
def test_offsets_of_32_bits_and_strided_ones_give_what_those_of_64_bits_give(table, combiner):
    emb, lists = collection(table, combiner), [[1, 2], [], [3], [8, 8, 8]]
    bag = Bag.from_lists(lists)
    expected = emb({"f": bag}).flat
    strided = torch.stack([bag.offsets, bag.offsets - 5], 1)[:, 0]
    wide = torch.stack([bag.values, bag.values + 99], 1)[:, 0]
    for given_ in (Bag(bag.values, bag.offsets.to(torch.int32)), Bag(wide, strided), Bag(bag.values, strided.int())):
        out = emb({"f": given_}).flat
        assert torch.equal(out, expected)
        out.sum().backward()
    emb.step(0.1)


@pytest.mark.parametrize(("table", "combiner"), KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(table, combiner, bad):
    weights = torch.tensor([1.0, 1.0, bad])
    with pytest.raises(DataError, match=r"weight of an id must be finite\n.*feature 'f', weight 2, row 1 of the batch"):
        collection(table, combiner)({"f": Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), weights)})


@pytest.mark.parametrize(("table", "combiner"), KINDS)
@pytest.mark.parametrize("weights", [torch.ones(2), torch.ones(4), torch.ones(3, 1), torch.ones(3).double(), "x"])
def test_weights_of_another_shape_or_type_are_refused(table, combiner, weights):
    with pytest.raises(DataError, match="one weight per id"):
        collection(table, combiner)({"f": Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), weights)})


@pytest.mark.parametrize(("table", "combiner"), KINDS)
def test_strided_weights_count_one_by_one(table, combiner):
    emb, wide = collection(table, combiner), torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0]])
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    expected = emb({"f": Bag(ids, offsets, wide[:, 0].clone())}).flat
    assert torch.equal(emb({"f": Bag(ids, offsets, wide[:, 0])}).flat, expected)


def test_weights_that_ask_for_a_gradient_are_refused_in_training():
    bag = Bag(torch.tensor([1]), torch.tensor([0, 1]), torch.ones(1, requires_grad=True))
    with pytest.raises(ConfigError, match="get no gradient"):
        collection()({"f": bag})
    with torch.no_grad():
        assert collection()({"f": bag}).flat.shape == (1, 4)


@pytest.mark.parametrize(("table", "combiner"), KINDS)
@pytest.mark.parametrize(
    "bag",
    [
        Bag(torch.ones(3, 1, dtype=torch.int64), torch.tensor([0, 3])),
        Bag(torch.tensor(1), torch.tensor([0, 1])),
        Bag(torch.ones(3, dtype=torch.int64), torch.tensor(3)),
        Bag(torch.ones(3, dtype=torch.int64), torch.tensor([0.0, 3.0])),
        Bag(torch.ones(3, dtype=torch.int64), torch.tensor([], dtype=torch.int64)),
        Bag(torch.ones(3), torch.tensor([0, 3])),
        Bag([1, 2, 3], torch.tensor([0, 3])),
        Bag(torch.ones(3, dtype=torch.int64), [0, 3]),
        [[1], [2]],
        torch.ones(2, 2, 2, dtype=torch.int64),
        torch.ones(2, 2),
        torch.ones(2, dtype=torch.int64, device="meta"),
        Bag(torch.ones(3, dtype=torch.int64, device="meta"), torch.tensor([0, 3])),
        Bag(torch.ones(3, dtype=torch.int64), torch.tensor([0, 3], device="meta")),
        Bag(torch.ones(3, dtype=torch.int64), torch.tensor([0, 3]), torch.ones(3, device="meta")),
    ],
)
def test_other_types_shapes_and_devices_are_refused(table, combiner, bag):
    with pytest.raises(DataError, match="feature 'f'"):
        collection(table, combiner)({"f": bag})


def batch_of(bags, rows):
    schema = Schema(categorical=[{"name": "c", "num_ids": 9}, {"name": "f", "num_ids": 9, "kind": "multi_hot"}])
    made = Batch.from_columns(schema, {"c": [0] * rows, "f": [[1]] * rows}, origin="part-0.parquet")
    return Batch(made.layout, made.labels, made.dense, made.one_hot, bags, origin=made.origin)


def test_bags_of_a_batch_are_checked_and_its_origin_is_named():
    emb = collection()
    with pytest.raises(DataError, match=r"offset 1, row 0 of the batch, part-0\.parquet"):
        emb(batch_of({"f": Bag(torch.tensor([1, 2]), torch.tensor([0, 3, 2]))}, 2))
    with pytest.raises(DataError, match="not as many as the batch has rows"):
        emb(batch_of({"f": Bag.from_lists([[1], [2]])}, 3))


def test_each_of_many_bags_is_checked():
    names = [f"f{i}" for i in range(70)]
    emb, good = collection(names=names), {name: Bag.from_lists([[1, 2], [3]]) for name in names}
    emb(good)
    for name in names:
        wrong = good | {name: Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 4, 3]))}
        with pytest.raises(DataError, match=f"feature '{name}', offset 1"):
            emb(wrong)


@pytest.mark.parametrize(
    "jagged",
    [
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([-5, -4, -3, -2, 0])),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 9, 2, 3])),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3])),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1, 2, 3])),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64)),
        Jagged(("f", "f"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 3])),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 3]), torch.ones(2)),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 3]), starts=[0, 2]),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 3]), starts=[-3, 0, 3]),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 3]), starts=[0, 1, 3]),
        Jagged(("f", "g"), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3, 4])),
    ],
)
def test_keyed_jagged_offsets_are_checked(jagged):
    with pytest.raises(DataError):
        collection(names=("f", "g"))(jagged)


@pytest.mark.parametrize("offsets", [[0, FAR], [0, -1], [0, 3, 2], [1, 2], [-1, 0]])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_refuses_wrong_offsets(offsets, mode):
    with pytest.raises(DataError):
        EmbeddingBag(9, 4, mode=mode)(torch.tensor([1, 2, 3]), torch.tensor(offsets))


def test_embedding_bag_refuses_weights_that_are_not_finite():
    with pytest.raises(DataError, match="must be finite"):
        EmbeddingBag(9, 4, mode="sum")(torch.tensor([[1, 2]]), None, torch.tensor([[1.0, float("nan")]]))


def test_lists_of_weights_have_the_lengths_of_the_ids():
    with pytest.raises(DataError, match=r"row 0\n  value:   '2 ids, 1 weights'"):
        Bag.from_lists([[1, 2], [3]], weights=[[0.5], [0.5, 0.5]])
    with pytest.raises(DataError, match="row 1"):
        Bag.from_lists([[1]], weights=[[0.5], []])
    with pytest.raises(DataError, match="row 1"):
        Bag.from_lists([[1], []], weights=[[0.5]])


def test_operations_refuse_offsets_of_32_bits_and_never_read_outside():
    table, rows, out = torch.ones(4, 2), torch.tensor([0, 1]), torch.empty(2, 2)
    with pytest.raises(VivianeError, match="int64"):
        pool_rows(table, rows, torch.tensor([0, 1, 2], dtype=torch.int32), out, [0])
    with pytest.raises(VivianeError, match="int64"):
        entry_sources(torch.tensor([0, 1, 2], dtype=torch.int32), [0], 2, 2, torch.empty(2, dtype=torch.int32))
    pool_rows(table, rows, torch.tensor([-FAR, FAR, -FAR]), out, [0])
    assert out.tolist() == [[2.0, 2.0], [0.0, 0.0]]


@st.composite
def bags(draw):
    size = draw(st.integers(0, 5))
    near = st.one_of(st.integers(-2, 8), st.sampled_from([2**63 - 1, -(2**63), FAR]))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 6))
        right = sorted(draw(st.lists(st.integers(0, count), min_size=size, max_size=size)))
        offsets = [0, *right][: size + 1]
        offsets[-1] = count
        if draw(st.booleans()):
            offsets[draw(st.integers(0, size))] = draw(near)
        number = st.sampled_from([1.0, 0.0, -2.0, 3.4e38, 1e-45, float("nan"), float("inf")])
        weights = draw(st.none() | st.lists(number, min_size=count, max_size=count))
        found.append((torch.tensor(offsets), count, None if weights is None else torch.tensor(weights)))
    return found


@given(bags())
@example([(torch.tensor([0]), 0, None)])
@example([(torch.tensor([0, -(2**63), 0]), 0, None)])
@settings(max_examples=200)
def test_the_kernel_finds_what_the_reference_finds(case):
    columns = [list(part) for part in zip(*case, strict=True)]
    columns[2] = [None if one is None else one.to(torch.float32) for one in columns[2]]
    found, truth = cpu.check_bags(*columns), reference.check_bags(*columns)
    assert (found is None) == (truth is None)
    assert truth is None or found.tolist() == truth.tolist()


def test_a_kept_record_keeps_the_first_place():
    kept, right = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 1])
    assert place_of(check_bags([right, right], [1, 1], [None, None], kept)) is None
    for offsets, place in (([right, torch.tensor([0, 2, 1])], 4), ([right + 1, right], 0), ([right, right + 1], 0)):
        assert place_of(check_bags(offsets, [1, 1], [None, None], kept)) == place


def test_a_collection_that_refused_a_bag_can_be_copied():
    emb = collection()
    with pytest.raises(DataError):
        emb({"f": Bag(torch.tensor([1]), torch.tensor([0, 2]))})
    assert copy.deepcopy(emb)({"f": Bag.from_lists([[1]])}).flat.shape == (1, 4)

"""Keys of many features in one tensor, and the output's names of a KeyedTensor."""

import pytest
import torch

from viviane.batch import Bag
from viviane.config import SGD
from viviane.core.errors import DataError
from viviane.embedding import EmbeddingCollection, EmbeddingOutput, FeatureConfig, TableConfig
from viviane.embedding.jagged import Jagged


class Keyed:
    """The methods of a KeyedJaggedTensor that a collection asks for."""

    def __init__(self, lists, weighted=False):
        self.lists = lists
        rows = [row for feature in lists.values() for row in feature]
        self._offsets = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._values = torch.tensor([key for row in rows for key in row], dtype=torch.int64)
        self._weights = torch.linspace(0.5, 2.0, len(self._values)) if weighted else None

    def keys(self):
        return list(self.lists)

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets

    def weights_or_none(self):
        return self._weights

    def stride(self):
        return len(next(iter(self.lists.values())))

    def offset_per_key(self):
        return self._offsets[:: self.stride()].tolist() if self.stride() else [0] * (len(self.lists) + 1)


LISTS = {"other": [[9], [9, 9]], "b": [[1, 2], []], "a": [[], [3]], "c": [[4, 4, 0], [1]]}


def build():
    tables = [TableConfig(name="x", num_rows=9, dim=3), TableConfig(name="y", num_rows=9, dim=2)]
    features = [
        FeatureConfig(name="a", table="x"),
        FeatureConfig(name="b", table="y", combiner="mean"),
        FeatureConfig(name="c", table="x", combiner="concat", max_length=3),
    ]
    return EmbeddingCollection(tables, features, SGD())


@pytest.mark.parametrize("weighted", [False, True])
def test_equals_a_bag_for_each_feature(weighted):
    keyed = Keyed(LISTS, weighted)
    weights = iter([None] * 99 if keyed._weights is None else keyed._weights.tolist())
    bags = {}
    for name, lists in LISTS.items():
        own = [[next(weights) for _ in row] for row in lists]
        bags[name] = Bag.from_lists(lists, weights=own if weighted else None)
    one, other = build(), build()
    found, expected = one(keyed), other(bags)
    assert torch.equal(found.flat, expected.flat)
    assert torch.equal(found.mask("c"), expected.mask("c"))
    assert torch.equal(
        one(Jagged(tuple(LISTS), keyed.values(), keyed.offsets(), keyed.weights_or_none())).flat, found.flat
    )
    found.flat.square().sum().backward()
    expected.flat.square().sum().backward()
    one.step(0.1)
    other.step(0.1)
    assert torch.equal(one.export_table("x").weight, other.export_table("x").weight)


def test_no_rows_and_empty_bags():
    assert build()(Keyed({name: [] for name in "abc"})).flat.shape == (0, 14)
    assert not build()(Keyed({name: [[], []] for name in "abc"})).flat.any()


def test_compiled_in_one_graph_for_any_number_of_ids():
    eager, other = build(), build()
    fast = torch.compile(lambda keys: other(keys).flat, backend="aot_eager", fullgraph=True)
    for lists in (LISTS, {**LISTS, "a": [[1, 2], [3, 5]]}):
        for call in (lambda keys: eager(keys).flat, fast):
            call(Keyed(lists, weighted=True)).square().sum().backward()
        eager.step(0.1)
        other.step(0.1)
    assert torch.equal(eager.export_table("x").weight, other.export_table("x").weight)
    assert torch.equal(eager.export_table("y").weight, other.export_table("y").weight)


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match=r"(?s)the batch lacks a feature.*'c'"):
        build()(Keyed({"a": [[1]], "b": [[2]]}))
    with pytest.raises(DataError, match=r"(?s)cannot read this.*'int'"):
        build()(3)
    uneven = Keyed(LISTS)
    uneven.variable_stride_per_key = lambda: True
    uneven.stride_per_key = lambda: [2, 1]
    with pytest.raises(DataError, match="differ in their number of rows"):
        build()(uneven)
    double = Keyed(LISTS, weighted=True)
    double._weights = double._weights.double()
    with pytest.raises(DataError, match="float32"):
        build()(double)


def test_the_output_has_the_names_of_a_keyed_tensor():
    out = build()(Keyed(LISTS))
    assert isinstance(out, EmbeddingOutput)
    assert out.keys() == ["a", "b", "c"]
    assert out.values() is out.flat
    assert out.length_per_key() == [3, 2, 9]
    assert out.offset_per_key() == [0, 3, 5, 14]
    assert {name: tuple(part.shape) for name, part in out.to_dict().items()} == {
        "a": (2, 3),
        "b": (2, 2),
        "c": (2, 3, 3),
    }
    assert {**out}["b"].data_ptr() == out["b"].data_ptr()

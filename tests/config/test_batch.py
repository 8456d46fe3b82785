import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from viviane.batch import Bag, Batch
from viviane.core.errors import DataError, SchemaError, VivianeError
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "click"}, {"name": "buy"}],
    dense=[{"name": "price"}, {"name": "image", "dim": 2}],
    categorical=[
        {"name": "item", "num_ids": 10},
        {"name": "shop", "num_ids": 10},
        {"name": "tags", "num_ids": 9, "kind": "multi_hot", "weights": "tag_weights", "dtype": "int64"},
    ],
    sample_weight="importance",
    ignored=["time"],
)


def columns(**changes: Any) -> dict[str, Any]:
    return {
        "click": [0, 1],
        "buy": [1.0, 0.0],
        "price": np.array([0.5, 1.5]),
        "image": [[1, 2], [3, 4]],
        "item": torch.tensor([3, 9]),
        "shop": [4, 4],
        "tags": [[], [8, 8, 3]],
        "tag_weights": [[], [1.0, 2.0, 0.5]],
        "importance": [1, 2],
        **changes,
    }


def test_columns_are_stacked_in_the_order_of_the_schema() -> None:
    batch = Batch.from_columns(SCHEMA, columns())
    assert len(batch) == batch.size == 2
    assert batch.labels.tolist() == [[0, 1], [1, 0]]
    assert batch.dense.tolist() == [[0.5, 1, 2], [1.5, 3, 4]]
    assert batch.dense_feature("image").tolist() == [[1, 2], [3, 4]]
    assert batch.one_hot.tolist() == [[3, 4], [9, 4]]
    assert batch.one_hot.dtype == torch.int32
    assert batch.weight is not None
    assert batch.weight.tolist() == [1, 2]
    tags = batch.bag("tags")
    assert tags.values.tolist() == [8, 8, 3]
    assert tags.values.dtype == torch.int64
    assert tags.offsets.tolist() == [0, 0, 3]
    assert tags.lengths.tolist() == [0, 3]


def test_a_one_hot_feature_is_a_bag_of_one() -> None:
    bag = Batch.from_columns(SCHEMA, columns()).bag("shop")
    assert bag.values.tolist() == [4, 4]
    assert bag.offsets.tolist() == [0, 1, 2]


def test_labels_may_be_left_out_when_predicting() -> None:
    given = {name: column for name, column in columns().items() if name not in ("click", "buy", "importance")}
    batch = Batch.from_columns(SCHEMA, given)
    assert batch.labels.shape == (2, 0)
    assert batch.weight is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"itme": [1, 2]}, r"no such column in the schema(.|\n)*did you mean 'item'\?"),
        ({"shop": [1, 2, 3]}, r"columns differ in length\n  where:   columns in memory, column 'shop'\n  value:   3"),
        ({"item": [1, 2**32 + 3]}, r"an id does not fit int32(.|\n)*column 'item'\n  value:   4294967299"),
        ({"item": [1.5, 2.0]}, r"ids must be whole numbers(.|\n)*column 'item'"),
        ({"tag_weights": [[], [1.0]]}, "a bag needs one weight per id\n  where:   row 1\n  value:   '3 ids, 1"),
    ],
)
def test_wrong_columns_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises((SchemaError, DataError), match=problem):
        Batch.from_columns(SCHEMA, columns(**changes))


def test_a_missing_feature_is_named() -> None:
    given = columns()
    del given["shop"]
    with pytest.raises(SchemaError, match="a column is missing\n  where:   columns in memory\n  value:   'shop'"):
        Batch.from_columns(SCHEMA, given)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    batch = Batch.from_columns(SCHEMA, columns())
    with pytest.raises(SchemaError, match=r"no such label(.|\n)*did you mean 'click'\?"):
        batch.label("clik")
    with pytest.raises(SchemaError, match="no such categorical feature"):
        batch.bag("price")


def test_empty_batches_and_bags() -> None:
    empty = {name: [] for name in columns()} | {"image": np.zeros((0, 2))}
    batch = Batch.from_columns(SCHEMA, empty)
    assert batch.size == 0
    assert batch.dense.shape == (0, 3)
    assert Bag.from_lists([]).offsets.tolist() == [0]
    assert Bag.from_lists([[], []]).offsets.tolist() == [0, 0, 0]


def test_to_the_same_device_is_no_copy() -> None:
    batch = Batch.from_columns(SCHEMA, columns())
    assert batch.to("cpu") is batch
    meta = batch.to("meta")
    assert meta.device.type == "meta"
    assert meta.bags["tags"].weights is not None
    assert meta.bags["tags"].weights.device.type == "meta"


def test_when_a_batch_is_there_holds_for_its_own_tensors() -> None:
    event: Any = object()
    batch = Batch.from_columns(SCHEMA, columns())
    assert batch.ready is None
    assert batch.ready_after(event) is batch
    assert batch.ready is batch.to("cpu").ready is event
    assert replace(batch, dense=batch.dense * 2).ready is None
    assert batch.to("meta").ready is None
    assert deepcopy(batch).ready is None
    other = pickle.loads(pickle.dumps(batch))
    assert other.ready is None
    assert torch.equal(other.dense, batch.dense)
    batch.bags["tags"].values.fill_(4)
    assert batch.ready is None
    assert batch.ready_after(event).ready is event
    with torch.inference_mode():
        inferred = Batch.from_columns(SCHEMA, columns())
        assert inferred.ready_after(event).ready is event


@pytest.mark.parametrize("ids", [[[3.9]], [[1, 2.5]], [["3"]], [[2**63]], [[True, None]]])
def test_ids_of_a_bag_are_whole_numbers(ids: list[list[Any]]) -> None:
    """They were truncated: 3.9 became 3."""
    with pytest.raises(DataError, match="not an integer of this type"):
        Bag.from_lists(ids)
    with pytest.raises(DataError, match="int32"):
        Bag.from_lists([[2**31]], torch.int32)


COLUMNS = {"x": [0.5, 1.5], "wide": [[1.0, 2.0], [3.0, 4.0]], "raw": [3, 4], "many": [[3], [4, 5]]}
HOSTILE = Schema(
    dense=[{"name": "x"}, {"name": "wide", "dim": 2}],
    categorical=[
        {"name": "raw", "num_ids": None, "dtype": "int64"},
        {"name": "many", "num_ids": 9, "kind": "multi_hot", "dtype": "int64"},
    ],
)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("raw", [3, "4"]), ("raw", [3, None]), ("raw", np.array([3, 4], dtype=object)), ("raw", [3, 4.5]),
        ("raw", np.array([3, 2**63], dtype=np.uint64)), ("raw", [[3, 4], [5, 6]]), ("raw", [[3], [4, 5]]),
        ("raw", 3), ("raw", np.array(3)), ("raw", [3]), ("raw", [3, 4j]),
        ("raw", np.array(["2024-01-01"] * 2, "M8[D]")),
        ("x", ["a", "b"]), ("x", [None, 1.0]), ("x", [[1.0, 2.0]] * 2), ("x", 3), ("x", [1.0, 2.0, 3.0]),
        ("wide", [1.0, 2.0]), ("wide", [[1.0], [2.0]]), ("wide", [[1.0], [2.0, 3.0]]),
        ("many", [[3]]), ("many", 3), ("many", Bag(torch.tensor([3]), torch.tensor([0, 1]))), ("many", [[3], ["4"]]),
    ],
)  # fmt: skip
def test_columns_of_another_form_are_refused(name: str, values: object) -> None:
    Batch.from_columns(HOSTILE, COLUMNS)
    with pytest.raises(VivianeError) as caught:
        Batch.from_columns(HOSTILE, {**COLUMNS, name: values})
    assert caught.value.where is not None


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "bool"])
def test_ids_of_every_integer_type(dtype: str) -> None:
    ids = np.array([1, 0], dtype=dtype)
    assert Batch.from_columns(HOSTILE, {**COLUMNS, "raw": ids}).one_hot[:, 0].tolist() == [1, 0]
    narrow = Schema(categorical=[{"name": "raw", "num_ids": 9}])
    assert Batch.from_columns(narrow, {"raw": ids}).one_hot[:, 0].tolist() == [1, 0]
    largest = np.array([1, 2**31]) if dtype == "bool" else np.array([1, np.iinfo(dtype).max], dtype=dtype)
    if largest[1] >= 2**31:
        with pytest.raises(SchemaError, match="does not fit int32"):
            Batch.from_columns(narrow, {"raw": largest})


def test_numbers_of_any_byte_order_and_bags_alone() -> None:
    swapped = {**COLUMNS, "raw": np.array([3, 2**40], dtype=">i8"), "x": np.array([0.5, 1.5], dtype=">f4")}
    batch = Batch.from_columns(HOSTILE, swapped)
    assert batch.one_hot[:, 0].tolist() == [3, 2**40]
    assert batch.dense[:, 0].tolist() == [0.5, 1.5]
    only = Schema(categorical=[{"name": "many", "num_ids": 9, "kind": "multi_hot"}])
    assert Batch.from_columns(only, {"many": Bag.from_lists([[3], [4, 5]], torch.int32)}).size == 2

"""Arrays and tensors of any kind for functions that compute with them: a result, or a VivianeError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from viviane.batch import Bag
from viviane.config import Adam, Solver
from viviane.core.errors import DataError, VivianeError
from viviane.embedding import DynamicTable, DynamicTableConfig, EmbeddingBag
from viviane.metrics import METRICS, Auc, Gauc, Ndcg, build_metric, ndcg, roc_auc
from viviane.model import Model
from viviane.retrieval import Histories, ItemIndex, evaluate_vectors
from viviane.schema import Schema
from viviane.serving import InferenceSession
from viviane.zoo import DeepFM

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
P = np.float32([0.1, 0.6, 0.7, 0.2])
Y = np.float32([0, 1, 1, 0])
GROUPS = np.array([1, 1, 2, 2])


def odd(array: np.ndarray) -> Iterator[tuple[str, Any]]:
    """Name and value of what is no dense array of real numbers, or has another size."""
    numbers = torch.as_tensor(array).float()
    yield from {
        "none": None, "number": 3, "text": "abc", "mapping": {"x": 1}, "set": {1, 2}, "generator": (n for n in (1, 2)),
        "objects": np.array([None, "x", 2.5, 1], object), "texts": array.astype(str), "bytes": array.astype("S4"),
        "complex": array.astype("c8"), "dates": array.astype("i8").astype("M8[s]"), "records": np.zeros(4, "i4,f4"),
        "no dimension": np.array(1.0), "longer": np.concatenate([array, array]), "ragged": [[1], [1, 2]],
        "masked": np.ma.masked_array(array, [1, 0, 0, 0] if array.ndim == 1 else True),
        "sparse": numbers.to_sparse(), "meta": numbers.to("meta"), "complex tensor": numbers.to(torch.complex64),
        "nested": torch.nested.nested_tensor([numbers, numbers]),
    }.items()  # fmt: skip


def equal(array: np.ndarray) -> Iterator[tuple[str, Any]]:
    """The same numbers in other forms."""
    fixed = array.copy()
    fixed.flags.writeable = False
    yield from {
        "big-endian": array.astype(array.dtype.newbyteorder(">")), "gaps": np.repeat(array, 2, axis=-1)[..., ::2],
        "reversed": array[::-1].copy()[::-1], "read-only": fixed, "list": array.tolist(),
        "tensor": torch.as_tensor(array), "with gradient": torch.as_tensor(array).float().requires_grad_(),
        "negated view": torch._neg_view(torch.as_tensor(-array).float()),
    }.items()  # fmt: skip


def updated(name: str, p: Any = P, y: Any = Y, weight: Any = None, groups: Any = GROUPS) -> float:
    metric = build_metric(name)
    metric.update(p, y, weight, **({"groups": groups} if metric.by_group else {}))
    return metric.compute()


FUNCTIONS: dict[str, tuple[np.ndarray, Callable[[Any], Any]]] = {
    "scores of roc_auc": (P, lambda v: roc_auc(v, Y)),
    "labels of roc_auc": (Y, lambda v: roc_auc(P, v)),
    "scores of ndcg": (P, lambda v: ndcg(GROUPS, v, Y)),
    "groups of ndcg": (GROUPS, lambda v: ndcg(v, P, Y)),
    "labels of ndcg": (Y, lambda v: ndcg(GROUPS, P, v)),
    "vectors of an index": (np.eye(4, 3, dtype="f4"), lambda v: ItemIndex(v).search(np.ones((1, 3), "f4"), 2).items),
    "queries of an index": (
        np.ones((4, 3), "f4"), lambda v: ItemIndex(np.eye(4, 3, dtype="f4")).search(v, 2).items,
    ),
    "vectors of users": (
        np.ones((4, 3), "f4"), lambda v: evaluate_vectors(v, np.eye(8, 3, dtype="f4"), Histories.of([[3]] * 4)),
    ),
    "vectors of items": (
        np.eye(8, 3, dtype="f4"), lambda v: evaluate_vectors(np.ones((1, 3), "f4"), v, Histories.of([[3]])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_any_array_of_numbers_and_refuse_the_rest(name: str) -> None:
    array, call = FUNCTIONS[name]
    wanted = call(array)
    for form, value in equal(array):
        if form not in ("with gradient", "negated view") or array.dtype.kind == "f":
            assert np.array_equal(call(value), wanted), form
    for form, value in odd(array):
        if form in ("longer", "masked") and name in ("vectors of an index", "queries of an index", "vectors of items"):
            continue  # more vectors are as good, and a mask of one value hides a whole matrix
        with pytest.raises(VivianeError):
            pytest.fail(f"{form}: {call(value)}")


@pytest.mark.parametrize("name", [one for one in METRICS if one not in ("average_loss",)])
def test_metrics_take_arrays_and_refuse_what_has_no_numbers(name: str) -> None:
    whole = name if name not in ("gauc", "mrr") else f"{name}:user"
    try:
        wanted = updated(whole)
    except VivianeError:
        pytest.skip("needs parameters")
    for part, array in (("p", P), ("y", Y), ("weight", np.ones(4, "f4"))):
        for form, value in equal(array):
            assert updated(whole, **{part: value}) == pytest.approx(wanted, nan_ok=True), (part, form)
        for form, value in odd(array):
            if (part, form) == ("weight", "none"):
                continue
            with pytest.raises(VivianeError):
                pytest.fail(f"{part}, {form}: {updated(whole, **{part: value})}")


def test_metrics_refuse_columns_of_other_lengths_and_broken_groups() -> None:
    for metric in (Auc(), Ndcg()):
        with pytest.raises(DataError, match="differ in number"):
            metric.update(torch.ones(4), torch.ones(1))
    for groups in (torch.tensor([1.5, 1, 2, 2]), torch.tensor([float("nan"), 1, 2, 2]), torch.tensor([1, 2])):
        with pytest.raises(DataError, match="groups"):
            Gauc().update(torch.from_numpy(P), torch.from_numpy(Y), groups=groups)


def test_a_dynamic_table_refuses_what_its_kernels_cannot_read() -> None:
    """Meta tensors and scores that are too few were read beyond their memory."""
    keys, vectors = torch.tensor([3, 4, 5, 7]), torch.ones(4, 3)
    table = DynamicTable(DynamicTableConfig(name="t", dim=3, init="normal"), Adam())
    table.insert_or_assign(keys, vectors)
    ranked = DynamicTable(DynamicTableConfig(name="r", dim=3, eviction="custom", max_capacity=9, when_full="evict"))
    calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "accumulate keys": (keys, lambda v: table.accumulate(v, vectors)),
        "accumulate": (vectors, lambda v: table.accumulate(keys, v)),
        "assign": (vectors, lambda v: table.assign(keys, v)),
        "insert": (vectors, lambda v: table.insert_or_assign(keys, v)),
        "find": (keys, table.find),
        "erase": (keys, table.erase),
        "rows": (keys, table.rows),
        "gather": (table.rows(keys, training=False), table.gather),
        "reset_state": (table.rows(keys, training=False), table.reset_state),
        "scores": (keys, lambda v: ranked.insert_or_assign(keys, vectors, v)),
        "scores of a lookup": (keys, lambda v: ranked.rows(keys, scores=v)),
    }  # fmt: skip
    for name, (given, call) in calls.items():
        call(given)
        for form, value in odd(given.numpy()):
            if form == "longer" and name in ("find", "erase", "rows", "gather", "reset_state"):
                continue
            with pytest.raises(VivianeError):
                pytest.fail(f"{name}, {form}: {call(value)}")
        table.release()
    for row in (10**12, -1, len(table.storage)):  # the first one ended the process
        for read in (table.gather, table.reset_state, lambda rows: table.copied(table.weight, rows)):
            with pytest.raises(DataError, match="a row that the table does not have"):
                read(torch.tensor([0, row]))
    with pytest.raises(DataError, match="each key needs a score"):
        ranked.insert_or_assign(keys, vectors, keys[:1])


def test_bags_of_lists_are_lists_of_whole_numbers() -> None:
    assert Bag.from_lists(iter([[3, 4], torch.tensor([5.0], requires_grad=True), ()])).values.tolist() == [3, 4, 5]
    for rows in (3, None, [3], [None], [{3: 4}.values], [[3, None]], [[[3, 4]]], [np.array(3)], ["ab"],
                 [np.ma.masked_array([3, 4], [True, False])]):  # fmt: skip
        with pytest.raises(DataError):
            pytest.fail(str(Bag.from_lists(rows)))
    for weights in ([["x"]], [[None]], [1.0], 3):
        with pytest.raises(DataError):
            Bag.from_lists([[3]], weights=weights)


def test_nested_tensors_are_refused_by_lookups() -> None:
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])
    bag = EmbeddingBag(20, 3, mode="sum")
    for given in (
        (nested, torch.tensor([0])),
        (torch.tensor([3]), nested),
        (torch.tensor([3]), torch.tensor([0]), nested),
    ):
        with pytest.raises(DataError, match="dense"):
            bag(*given)


def test_columns_without_an_order_or_a_dimension_are_refused(tmp_path: Path) -> None:
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "d"}], categorical=[{"name": "a", "num_ids": 9}])
    model = Model(Solver(batch_size=4, device="cpu", max_steps=1, seed=1), schema)
    model.add(DeepFM(dim=2, deep_mlp=[2]))
    model.compile()
    rows = {"y": Y, "d": P, "a": GROUPS + 3}
    for column in rows:
        with pytest.raises(VivianeError, match=f"(?s)array or list.*column '{column}'"):
            model.fit(rows | {column: np.array(1.0)}, verbose=0)
    model.save(tmp_path / "model")
    one_column = pa.chunked_array([[1, 2], [3]])
    with pytest.raises(VivianeError, match="no named columns"):
        model.predict(one_column)
    with InferenceSession(tmp_path / "model", device="cpu") as session:
        for column in ("d", "a"):
            with pytest.raises(VivianeError, match=f"(?s)cannot be read.*column '{column}'"):
                session.predict(rows | {column: {1, 2, 3, 4}})

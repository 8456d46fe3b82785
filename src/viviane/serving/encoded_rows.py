"""Encoded rows of a request, ids and numbers as the ETL writes them, to a batch.

Shapes: B rows, n ids of a bag feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import DataError
from viviane.core.tensors import tensor_array
from viviane.schema import CategoricalColumn, Schema
from viviane.serving.errors import RowProblem
from viviane.serving.frames import columns_of

ORIGIN: Final = "the request"
_REFUSED: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
_INT32: Final = np.iinfo(np.int32)
_HINT: Final = "; rows as logged are predicted with raw=True"


def encoded_batch(rows: Any, schema: Schema, strict_ids: frozenset[str]) -> tuple[Batch, list[RowProblem]]:
    """Return encoded rows as a batch without labels, and the rows that cannot be used; those hold zeros.

    Args:
        rows: in a form of `viviane.serving.frames.columns_of`.
        schema: the columns.
        strict_ids: categorical columns whose ids have to be in range, since a table refuses others.

    Raises:
        SchemaError: a column is missing, or columns differ in length.
        DataError: a typed column has another type or shape.
    """
    names = [column.name for column in schema.dense]
    for column in schema.categorical:
        names += [column.name] if column.weights is None else [column.name, column.weights]
    found, size, problems = columns_of(rows, names)
    dense = [_numbers(found[column.name], column.name, column.dim, size, problems) for column in schema.dense]
    wide = any(column.dtype == "int64" for column in schema.one_hot)
    dtype: Any = np.int64 if wide else np.int32
    one_hot = [_ids(found[one.name], one, size, one.name in strict_ids, problems) for one in schema.one_hot]
    bags = {
        one.name: _bag(
            found[one.name], None if one.weights is None else found[one.weights], one, size,
            one.name in strict_ids, problems,
        )
        for one in schema.bags
    }  # fmt: skip
    batch = Batch(
        layout=Layout.of(schema),
        labels=torch.zeros(size, 0),
        dense=torch.from_numpy(np.concatenate(dense, 1)) if dense else torch.zeros(size, 0),
        one_hot=torch.from_numpy(_side_by_side(one_hot, size, dtype)),
        bags=bags,
        origin=ORIGIN,
    )
    return batch, sorted(problems, key=lambda one: one.row)


def _side_by_side(columns: Sequence[NDArray[np.int64]], size: int, dtype: Any) -> NDArray[Any]:
    out = np.empty((size, len(columns)), dtype)
    for place, column in enumerate(columns):
        out[:, place] = column
    return out


def _numbers(values: Any, name: str, dim: int, size: int, problems: list[RowProblem]) -> NDArray[np.float32]:
    """Return finite numbers, (B, dim)."""
    array, wrong = _matrix(values, name, dim, size, "float")
    finite = np.isfinite(array).all(1)
    if not finite.all():
        shown = np.flatnonzero(~finite & ~_marked(wrong, size))
        problems += [RowProblem.of(row, name, array[row], "not a finite number") for row in shown]
        array = np.where(finite[:, None], array, np.float32(0))
    problems += wrong
    return np.ascontiguousarray(array, dtype=np.float32)


def _matrix(values: Any, name: str, dim: int, size: int, kind: str) -> tuple[NDArray[Any], list[RowProblem]]:
    """Return values as (B, dim), and the rows that are none; those hold NaN."""
    plain = _numpy(values, name, "fiu")
    if plain.dtype.kind in "fiub":
        with np.errstate(over="ignore"):  # beyond float32 a number becomes infinite, and is refused as such
            numbers = plain.astype(np.float32)
        if numbers.size != size * dim:
            allowed = f"({size}, {dim})" if dim > 1 else f"({size},)"
            raise DataError("a column has another shape", where=f"column {name!r}", value=plain.shape, allowed=allowed)
        return numbers.reshape(size, dim), []
    if plain.dtype != object:
        where = f"column {name!r}"
        raise DataError("a column of numbers has another type", where=where, value=str(plain.dtype), allowed=kind)
    out = np.full((size, dim), np.nan, np.float32)
    problems = []
    for row, value in enumerate(values if isinstance(values, list | tuple) else plain):
        try:
            if value is None or isinstance(value, str | bytes):
                raise TypeError
            row_numbers = np.asarray(value, dtype=np.float64).reshape(-1)
            if len(row_numbers) != dim:
                raise ValueError
        except _REFUSED:
            wanted = "a number" if dim == 1 else f"{dim} numbers"
            problems.append(RowProblem.of(row, name, value, f"not {wanted}{_HINT}"))
        else:
            with np.errstate(over="ignore"):
                out[row] = row_numbers
    return out, problems


def _ids(
    values: Any, column: CategoricalColumn, size: int, strict: bool, problems: list[RowProblem]
) -> NDArray[np.int64]:
    """Return ids, (B,), as int64."""
    plain = _numpy(values, column.name, "iu")
    if plain.dtype == object:
        ids, wrong = _whole_numbers(plain, column.name)
        problems += wrong
    else:
        _check_id_type(plain, column.name)
        if plain.shape not in ((size,), (size, 1)):
            where = f"column {column.name!r}"
            raise DataError("a column has another shape", where=where, value=plain.shape, allowed=f"({size},)")
        ids, wrong = plain.reshape(-1).astype(np.int64), []
    refused = _out_of_range(ids, column, strict)
    if refused.any():
        allowed = _allowed_ids(column)
        shown = np.flatnonzero(refused & ~_marked(wrong, size))
        problems += [RowProblem.of(row, column.name, int(ids[row]), f"an id out of range, {allowed}") for row in shown]
        ids = np.where(refused, 0, ids)
    return ids


def _bag(
    values: Any, weights: Any, column: CategoricalColumn, size: int, strict: bool, problems: list[RowProblem]
) -> Bag:
    """Return the ids of lists as a bag; refused rows have an empty one, or zeros where they need a number of ids."""
    lists, wrong = _lists(values, column.name, size)
    problems += wrong
    refused = _marked(wrong, size)
    offsets, flat = lists
    lengths = np.diff(offsets)
    for bound, mask in _wrong_lengths(lengths, column):
        bad = mask & ~refused
        found = np.flatnonzero(bad)
        problems += [RowProblem.of(row, column.name, f"{lengths[row]} ids", f"not {bound} ids") for row in found]
        refused |= bad
    outside = _out_of_range(flat, column, strict)
    if outside.any():
        owners = np.searchsorted(offsets, np.flatnonzero(outside), side="right") - 1
        first = {int(row): int(flat[at]) for row, at in zip(owners[::-1], np.flatnonzero(outside)[::-1], strict=True)}
        bound = _allowed_ids(column)
        problems += [
            RowProblem.of(row, column.name, value, f"an id out of range, {bound}")
            for row, value in sorted(first.items())
            if not refused[row]
        ]
        refused[owners] = True
    numbers = None
    if weights is not None:
        numbers, unweighted = _weights(weights, column, offsets, size)
        problems += [one for one in unweighted if not refused[one.row]]
        refused |= _marked(unweighted, size)
    if refused.any():
        offsets, flat, numbers = _without(refused, offsets, flat, numbers, column.hotness or 0)
    dtype: Any = np.int64 if column.dtype == "int64" else np.int32
    return Bag(
        torch.from_numpy(np.ascontiguousarray(flat.astype(dtype))),
        torch.from_numpy(offsets),
        None if numbers is None else torch.from_numpy(np.ascontiguousarray(numbers)),
    )


def _wrong_lengths(lengths: NDArray[Any], column: CategoricalColumn) -> list[tuple[str, NDArray[np.bool_]]]:
    found = []
    if column.hotness is not None:
        found.append((f"{column.hotness} (the column's hotness)", lengths != column.hotness))
    if column.max_length is not None:
        found.append((f"at most {column.max_length} (the column's max_length)", lengths > column.max_length))
    return found


def _lists(values: Any, name: str, size: int) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], list[RowProblem]]:
    """Return offsets, (B + 1,), and the flat ids of lists, and the rows that are no list of ids; those are empty."""
    plain = values if isinstance(values, pa.Array | pa.ChunkedArray | list | tuple) else _numpy(values, name, "iu")
    if isinstance(plain, np.ndarray) and plain.dtype != object:
        _check_id_type(plain, name)
        if plain.ndim != 2 or len(plain) != size:
            raise DataError("a column of lists has another shape", where=f"column {name!r}", value=plain.shape,
                            allowed=f"({size}, ids), or a list of {size} lists")  # fmt: skip
        flat = np.ascontiguousarray(plain).reshape(-1).astype(np.int64)
        return (np.arange(size + 1, dtype=np.int64) * plain.shape[1], flat), []
    try:
        array: Any = plain if isinstance(plain, pa.Array | pa.ChunkedArray) else pa.array(list(plain))
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        whole = array.cast(pa.list_(pa.int64())) if _is_list_of_ids(array.type) else None
        if whole is not None and not whole.null_count and not whole.values.null_count:
            lengths = pc.list_value_length(whole).to_numpy(zero_copy_only=False)
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            return (offsets, np.array(whole.flatten().to_numpy(zero_copy_only=False), np.int64)), []
    except _REFUSED:
        pass  # some row is no list of ids: one by one they are named
    return _one_by_one(plain if isinstance(plain, list | tuple | np.ndarray) else plain.to_pylist(), name)


def _one_by_one(rows: Any, name: str) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], list[RowProblem]]:
    parts, problems = [], []
    for row, value in enumerate(rows):
        ids: NDArray[np.int64] = np.empty(0, np.int64)
        try:
            if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
                raise TypeError
            ids, wrong = _whole_numbers(list(value), name)
            if wrong:
                raise TypeError
        except _REFUSED:
            ids = np.empty(0, np.int64)
            problems.append(RowProblem.of(row, name, value, "not a list of ids" + _HINT))
        parts.append(ids)
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)]).astype(np.int64)
    return (offsets, np.concatenate([np.empty(0, np.int64), *parts])), problems


def _weights(
    values: Any, column: CategoricalColumn, offsets: NDArray[np.int64], size: int
) -> tuple[NDArray[np.float32], list[RowProblem]]:
    """Return one finite weight for each id, and the rows that have not."""
    name = str(column.weights)
    rows = values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else list(_listed(values))
    out = np.ones(int(offsets[-1]), np.float32)
    problems = []
    for row in range(size):
        count = int(offsets[row + 1] - offsets[row])
        try:
            numbers = np.asarray(rows[row], dtype=np.float32).reshape(-1)
            if len(numbers) != count or not np.isfinite(numbers).all():
                raise ValueError
        except _REFUSED:
            problem = f"not one finite weight for each of the {count} ids of {column.name!r}"
            problems.append(RowProblem.of(row, name, rows[row], problem))
        else:
            out[offsets[row] : offsets[row + 1]] = numbers
    return out, problems


def _listed(values: Any) -> Any:
    return tensor_array(values, "a column") if isinstance(values, torch.Tensor) else values


def _without(
    refused: NDArray[np.bool_],
    offsets: NDArray[np.int64],
    flat: NDArray[np.int64],
    weights: NDArray[np.float32] | None,
    length: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
    """Give refused rows `length` padding ids, so that the other rows can be predicted beside them."""
    lengths = np.where(refused, length, np.diff(offsets))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.zeros(int(starts[-1]), np.int64)
    numbers = None if weights is None else np.ones(len(ids), np.float32)
    kept = np.flatnonzero(~refused)
    for row in kept:
        ids[starts[row] : starts[row + 1]] = flat[offsets[row] : offsets[row + 1]]
        if numbers is not None and weights is not None:
            numbers[starts[row] : starts[row + 1]] = weights[offsets[row] : offsets[row + 1]]
    return starts, ids, numbers


def _numpy(values: Any, name: str, kinds: str) -> NDArray[Any]:
    """Return values as they are typed; lists whose values are of no type among `kinds` become objects."""
    if isinstance(values, torch.Tensor):
        return tensor_array(values, f"column {name!r}")
    if isinstance(values, pa.Array | pa.ChunkedArray):
        if values.null_count or pa.types.is_nested(values.type):
            return _objects(values.to_pylist())
        return np.asarray(values.to_numpy() if isinstance(values, pa.ChunkedArray) else values.to_numpy(False))
    if isinstance(values, np.ndarray):
        masked = isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values)
        return _objects(values.tolist()) if masked else values  # as None, which is missing
    if isinstance(values, list | tuple):
        return _of_list(values, kinds)
    try:
        found = np.asarray(values)
    except _REFUSED as error:
        raise DataError("a column cannot be read", where=f"column {name!r}", value=type(values).__name__) from error
    if found.dtype == object and not found.ndim:  # of a set or a mapping, whose values have no order
        raise DataError("a column cannot be read", where=f"column {name!r}", value=type(values).__name__,
                        allowed="a list or an array")  # fmt: skip
    return found


def _of_list(values: Sequence[Any], kinds: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except _REFUSED:  # rows of different lengths
        return _objects(values)
    return array if array.dtype.kind in kinds else _objects(values)


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def _whole_numbers(values: Any, name: str) -> tuple[NDArray[np.int64], list[RowProblem]]:
    ids = np.zeros(len(values), np.int64)
    problems = []
    for row, value in enumerate(values):
        given = value.item() if isinstance(value, np.generic) else value
        if isinstance(given, bool) or not isinstance(given, int) or not -(2**63) <= given < 2**63:
            problems.append(RowProblem.of(row, name, value, "not an id of 64 bits" + _HINT))
        else:
            ids[row] = given
    return ids, problems


def _check_id_type(array: NDArray[Any], name: str) -> None:
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise DataError(
            "ids must be whole numbers", where=f"column {name!r}", value=str(array.dtype), allowed="int32 or int64",
            fix="predict rows as logged with raw=True",
        )  # fmt: skip


def _out_of_range(ids: NDArray[np.int64], column: CategoricalColumn, strict: bool) -> NDArray[np.bool_]:
    """Mark ids that the column's tables refuse, or that its type cannot hold."""
    if strict and column.num_ids is not None:
        return (ids < 0) | (ids >= column.num_ids)
    if column.dtype == "int32":
        return (ids < _INT32.min) | (ids > _INT32.max)
    return np.zeros(len(ids), np.bool_)


def _allowed_ids(column: CategoricalColumn) -> str:
    return "an int32" if column.num_ids is None else f"0 <= id < {column.num_ids}"


def _is_list_of_ids(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type)))


def _marked(problems: Sequence[RowProblem], size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    mask[[problem.row for problem in problems]] = True
    return mask

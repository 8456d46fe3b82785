"""Raw rows of a request: values as logged, to the columns that the model's own ETL reads."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from viviane.core.errors import DataError
from viviane.core.tensors import tensor_array
from viviane.etl.cells import convert, staged_type
from viviane.etl.columns import InputColumn
from viviane.etl.parquet import fits
from viviane.serving.errors import RowProblem
from viviane.serving.frames import columns_of

_REFUSED: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
_WANTED: Final = {
    "float": "a number",
    "int": "a whole number",
    "string": "text",
    "hex": "hexadecimal digits or a whole number from 0 to 2^64 - 1",
    "timestamp": "a date and time",
    "bool": "true or false",
}


def raw_table(
    rows: Any, columns: Sequence[InputColumn], missing: tuple[str, ...] = ("",)
) -> tuple[pa.Table, list[RowProblem]]:
    """Return the raw columns of a request as an Arrow table, and the rows with values that no column can hold.

    Args:
        rows: in a form of `viviane.serving.frames.columns_of`.
        columns: the raw columns that features need.
        missing: texts of a missing value.

    Raises:
        SchemaError: a column is missing, or columns differ in length.
        DataError: a typed column cannot be read as configured.
    """
    found, _, problems = columns_of(rows, [column.name for column in columns])
    arrays = {}
    for column in columns:
        arrays[column.name], wrong = _array(found[column.name], column, missing)
        problems += wrong
    return pa.table(arrays), problems


def _array(values: Any, column: InputColumn, missing: tuple[str, ...]) -> tuple[Any, list[RowProblem]]:
    if isinstance(values, torch.Tensor):
        values = tensor_array(values, f"column {column.name!r}")
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return _plain(values, column), []
    if isinstance(values, np.ndarray) and values.dtype != object:
        return _plain(_of_numpy(values, column), column), []
    if hasattr(values, "dtype") and values.dtype != object:  # a pandas series with a type of its own
        try:
            return _plain(pa.array(values, from_pandas=True), column), []
        except _REFUSED:
            pass  # a type that Arrow has not: its values are read one by one
    return _of_objects(values, column, missing)


def _of_numpy(values: np.ndarray, column: InputColumn) -> Any:
    if values.ndim == 2 and column.is_list:
        flat = np.ascontiguousarray(values).reshape(-1)
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
    if values.ndim != 1:
        allowed = "(rows,), or (rows, values) of a list column"
        raise DataError("an array has too many dimensions", where=f"column {column.name!r}", value=values.shape,
                        allowed=allowed)  # fmt: skip
    return pa.array(values)


def _plain(array: Any, column: InputColumn) -> Any:
    """Return an array without what only its producer needs: chunks, dictionaries, 64-bit offsets, views."""
    kind = _plain_type(array.type)
    try:
        if kind != array.type:
            array = array.cast(kind)
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    except _REFUSED as error:
        where, value = f"column {column.name!r}", f"{array.type}: {error}"
        raise DataError("the column's values cannot be read", where=where, value=value) from error


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    return pa.float32() if types.is_float16(kind) else kind


def _of_objects(values: Any, column: InputColumn, missing: tuple[str, ...]) -> tuple[Any, list[RowProblem]]:
    """Convert Python objects: at once where they are of one kind, else value by value, naming those that do not fit."""
    values = list(values)
    try:
        array = pa.array(values, from_pandas=True)
    except _REFUSED:
        pass  # values of several kinds, or of none: below, those that do not fit are named
    else:
        if fits(array.type, column):
            return array, []
    if column.is_list:
        return _lists(values, column, missing)
    return _cells(values, column)


def _cells(values: list[Any], column: InputColumn) -> tuple[Any, list[RowProblem]]:
    """Write each value as the text that a delimited file would hold; the ETL converts it as it converts such a file."""
    texts: list[str | None] = []
    problems = []
    for row, value in enumerate(values):
        try:
            texts.append(_text(value, column.type))
        except _REFUSED:
            texts.append(None)
            problems.append(RowProblem.of(row, column.name, value, f"not {_WANTED[column.type]}"))
    return pa.array(texts, pa.string()), problems


def _lists(values: list[Any], column: InputColumn, missing: tuple[str, ...]) -> tuple[Any, list[RowProblem]]:
    """Convert lists one by one; text to be split at the separator may be mixed with lists of values."""
    kept: list[Any] = []
    problems = []
    for row, value in enumerate(values):
        try:
            kept.append(_elements(value, column, missing))
        except _REFUSED:
            kept.append(None)
            problem = f"not a list whose elements are {_WANTED[column.type]}"
            problems.append(RowProblem.of(row, column.name, value, problem))
    return pa.array(kept, staged_type(column)), problems


def _elements(value: Any, column: InputColumn, missing: tuple[str, ...]) -> list[Any] | None:
    """Return the elements of one list in the column's staged type, or None where the list is missing.

    Raises:
        TypeError, ValueError, pyarrow.ArrowException: it is no such list.
    """
    if not hasattr(value, "__len__") and _is_missing(value):
        return None
    array: Any
    if isinstance(value, str) and column.separator is not None:
        if value in missing:
            return None
        array, own = pa.array([value]), column
    elif isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        raise TypeError(type(value).__name__)
    else:
        array, own = pa.array([list(value)], from_pandas=True), column.model_copy(update={"list": True})
        if not fits(array.type, own):
            raise TypeError(str(array.type))
    typed, cells = convert(array, own, missing)
    if cells:
        raise ValueError(cells[0].problem)
    elements: list[Any] = typed.to_pylist()[0]
    return elements


def _is_missing(value: Any) -> bool:
    """Whether a value is a missing one: None, NaN, and pandas' NaT and NA, which compare with nothing."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _text(value: Any, kind: str) -> str | None:
    """Return the text of a value.

    Raises:
        TypeError, ValueError, OverflowError: a column of this type holds no such value.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if _is_missing(value):
        return None
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair is no text
        return value
    return _WRITERS[kind](value)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float | decimal.Decimal):
        return repr(value) if isinstance(value, float) else str(value)
    raise TypeError(type(value).__name__)


def _hex(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError("not a whole number of 64 bits")
    return f"{value:x}"


def _string(value: Any) -> str:
    if isinstance(value, bytes):
        text: str = value.decode()
        return text
    raise TypeError(type(value).__name__)


def _time(value: Any) -> str:
    if not isinstance(value, datetime.datetime):
        raise TypeError(type(value).__name__)
    if value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    text: str = value.isoformat(sep=" ")
    return text


_WRITERS: Final[dict[str, Callable[[Any], str]]] = {
    "float": _number,
    "int": _number,
    "string": _string,
    "hex": _hex,
    "timestamp": _time,
    "bool": _number,
}

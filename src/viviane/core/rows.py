"""Conversion of rows in memory, in many forms, to one Arrow table."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa

from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.core.tensors import check_mask, is_tensor, tensor_array

FORMS: Final = (
    "a pandas, Polars, Arrow or Hugging Face table, columns by name, a list of dicts, an array (rows, columns), "
    "or a torch Dataset or DataLoader of dicts"
)

_TICKS: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # in a second


def as_table(rows: Any, names: Sequence[str] | None = None) -> pa.Table:
    """Return rows as an Arrow table, copying as little as possible.

    pandas frames (categories, nullable and mixed types; the index is dropped), Polars frames and lazy frames, Arrow
    tables, record batches and readers, objects with Arrow's PyCapsule interface, Hugging Face data sets, columns by
    name, lists of dicts, NumPy arrays of two dimensions or of records, torch tensors, torch Datasets and DataLoaders
    whose items are dicts, and iterables of any of these. NaN in a pandas frame is a missing value; elsewhere it
    stays NaN. Durations and times of day become seconds, pandas' periods their first moment, its intervals text.

    Args:
        rows: the rows.
        names: names of an array's columns; None gives x0, x1, ...

    Raises:
        ConfigError: the type of the rows is not supported.
        SchemaError: a column occurs twice, or columns differ in length.
        DataError: the values of a column have incompatible types.

    Example:
        >>> as_table([{"item": "pen", "price": 1.5}, {"item": "ink", "price": None}]).to_pydict()
        {'item': ['pen', 'ink'], 'price': [1.5, None]}
        >>> as_table(np.zeros((2, 2))).column_names
        ['x0', 'x1']
    """
    if type(rows).__module__.startswith("scipy.sparse"):  # some are dicts, and rows of others sparse again
        fix = "make it a dense array: X.toarray(); columns of ids need no one-hot encoding"
        raise ConfigError("a sparse matrix is not supported", value=type(rows).__name__, allowed=FORMS, fix=fix)
    table = _whole(rows, names)
    if table is None:
        table = _of_parts(rows, names)
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise SchemaError("a column occurs twice", value=", ".join(twice), fix="rename one of them")
    return plain_table(_in_seconds(table))


def _is_torch_dataset(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.utils.data.Dataset)


def is_frame(rows: Any) -> bool:
    """Return whether rows have named columns, so that `as_table` needs no names.

    Example:
        >>> is_frame({"a": [1]}), is_frame(np.zeros((2, 2)))
        (True, False)
    """
    if isinstance(rows, np.ndarray):
        return rows.dtype.names is not None
    if isinstance(rows, list | tuple):
        return bool(rows) and isinstance(rows[0], Mapping | pa.Table | pa.RecordBatch)
    return not is_tensor(rows)


def refuse_shuffled(rows: Any) -> None:
    """Refuse a DataLoader that shuffles, where a result or a label belongs to each row by its place.

    Raises:
        ConfigError: it does.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(getattr(rows, "sampler", None), torch.utils.data.RandomSampler):
        raise ConfigError(
            "the rows of a DataLoader that shuffles come in another order each time", value=type(rows).__name__,
            fix="make it with shuffle=False",
        )  # fmt: skip


def is_table(rows: Any) -> bool:
    """Return whether rows are one table of a dataframe library, as opposed to an iterable of parts.

    Example:
        >>> is_table(pa.table({"a": [1]})), is_table([{"a": [1]}])
        (True, False)
    """
    library = type(rows).__module__.partition(".")[0]
    return hasattr(rows, "__arrow_c_stream__") or library in ("pandas", "polars", "datasets")


def _whole(rows: Any, names: Sequence[str] | None) -> pa.Table | None:
    """Return the table of an object that contains all rows; None if it has to be iterated."""
    if is_tensor(rows):
        rows = tensor_array(rows, "rows")
    if isinstance(rows, np.ndarray):
        return _of_array(rows, names)
    if isinstance(rows, pa.Table):
        return rows
    library = type(rows).__module__.partition(".")[0]
    convert: Callable[[Any], pa.Table] | None = _OF_LIBRARY.get(library)
    if isinstance(rows, pa.RecordBatch):
        convert = _of_record_batch
    elif isinstance(rows, Mapping) and library != "datasets":
        convert = _of_columns
    elif convert is None and hasattr(rows, "__arrow_c_stream__"):
        convert = _of_stream
    elif convert is None and hasattr(rows, "__array__"):
        return _of_array(np.asarray(rows), names)
    return None if convert is None else convert(rows)


def _of_parts(rows: Any, names: Sequence[str] | None) -> pa.Table:
    """Return the rows of an iterable: of dicts with one row each, or of parts that are tables."""
    if isinstance(rows, str | bytes):
        raise ConfigError("a string is not rows", value=repr(rows[:80]), allowed=FORMS, fix="read the file first")
    items = _items(rows)
    first = next(items, None)
    if first is None:
        raise DataError("there are no rows", allowed=FORMS)
    items = chain([first], items)
    if isinstance(first, Mapping) and not _is_batch(first):
        return _of_dicts(items)
    if isinstance(first, int | float | str | bool) or (
        isinstance(first, list | tuple) and not any(isinstance(one, Mapping) for one in first)
    ):
        if isinstance(rows, list | tuple) and isinstance(first, list | tuple):
            return _of_array(_array_of_lists(rows), names)
        raise ConfigError("rows of this type have no named columns", value=type(rows).__name__, allowed=FORMS)
    return pa.concat_tables([as_table(part, names) for part in items], promote_options="permissive")


def _items(rows: Any) -> Iterator[Any]:
    if _is_torch_dataset(rows) and not isinstance(rows, Iterable):
        if not hasattr(rows, "__len__"):
            raise ConfigError("a torch Dataset without a length", value=type(rows).__name__, fix="give it __len__")
        return (rows[n] for n in range(len(rows)))
    if isinstance(rows, Iterable):
        return iter(rows)
    raise ConfigError("rows of this type are not supported", value=type(rows).__name__, allowed=FORMS)


def _is_batch(item: Mapping[str, Any]) -> bool:
    """Return whether a dict contains columns of several rows, as from a DataLoader, and not one row."""
    return any(
        (isinstance(value, np.ndarray) or is_tensor(value)) and value.ndim > 0 for value in item.values()
    ) and all(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in item.values())


def _of_dicts(items: Iterable[Any]) -> pa.Table:
    columns: dict[str, list[Any]] = {}
    count = 0
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise DataError("a row must be a dict by column", where=f"row {number}", value=type(item).__name__)
        for name in [one for one in item if one not in columns]:
            columns[str(name)] = [None] * number
        for name, values in columns.items():
            value: Any = item.get(name)
            one = (isinstance(value, np.generic) or is_tensor(value)) and not value.ndim
            values.append(value.item() if one else value)
        count = number + 1
    # Order of the first row, then of first occurrence.
    return pa.table({name: _array(name, values) for name, values in columns.items()}) if count else pa.table({})


def _of_columns(columns: Mapping[str, Any]) -> pa.Table:
    arrays = {str(name): _array(str(name), values) for name, values in columns.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise SchemaError("columns differ in length", value=lengths)
    return pa.table(arrays)


def _array_of_lists(rows: Sequence[Any]) -> np.ndarray[Any, Any]:
    try:
        found = np.asarray(rows)
    except ValueError as error:
        raise DataError("rows differ in length", value=str(error)) from error
    return found


def _of_array(array: np.ndarray[Any, Any], names: Sequence[str] | None) -> pa.Table:
    if array.dtype.names is not None:
        return _of_columns({name: array[name] for name in array.dtype.names})
    if array.ndim != 2:
        fix = "reshape one column to (rows, 1), and one row to (1, columns)"
        raise DataError("an array of rows needs two dimensions", value=array.shape, allowed="(rows, columns)", fix=fix)
    chosen = [f"x{n}" for n in range(array.shape[1])] if names is None else list(names)
    if len(chosen) != array.shape[1]:
        raise SchemaError("the array has a wrong number of columns", value=array.shape[1], allowed=str(len(chosen)))
    return pa.table({name: _array(name, array[:, n].copy()) for n, name in enumerate(chosen)})


def _of_stream(rows: Any) -> pa.Table:
    try:
        return pa.table(rows)
    except (pa.ArrowException, TypeError) as error:  # of one column, not of a table
        raise ConfigError("rows of this type have no named columns", value=type(rows).__name__, allowed=FORMS,
                          fix="pass {name: column}") from error  # fmt: skip


def _of_record_batch(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def _of_pandas(frame: Any) -> pa.Table:
    if not hasattr(frame, "columns"):
        raise ConfigError("a single column is not a table", value=type(frame).__name__, fix="frame = series.to_frame()")
    names = [str(name) for name in frame.columns]
    arrays = [_array(name, _known_to_arrow(frame.iloc[:, n]), from_pandas=True) for n, name in enumerate(names)]
    return pa.table(arrays, names=names) if names else pa.table({})


def _known_to_arrow(series: Any) -> Any:
    """Return a pandas series whose values Arrow has a type for: times for periods, text for intervals."""
    kind = type(series.dtype).__name__
    if kind == "PeriodDtype":
        return series.dt.to_timestamp()
    if kind == "SparseDtype":
        return series.sparse.to_dense()
    categories = getattr(series.dtype, "categories", None)
    if kind == "IntervalDtype" or type(getattr(categories, "dtype", None)).__name__ == "IntervalDtype":
        return series.astype(object).map(str, na_action="ignore")
    return series


def _of_polars(frame: Any) -> pa.Table:
    collected = frame.collect() if hasattr(frame, "collect") else frame
    if not hasattr(collected, "columns"):
        raise ConfigError("a single column is not a table", value=type(frame).__name__, fix="frame = series.to_frame()")
    table: pa.Table = collected.to_arrow()
    return table


def _of_hugging_face(data: Any) -> pa.Table:
    if isinstance(data, Mapping):
        raise ConfigError("a set of splits is not one table", value=", ".join(map(str, data)), fix='data["train"]')
    if not hasattr(data, "with_format"):
        raise ConfigError("rows of this type are not supported", value=type(data).__name__, allowed=FORMS)
    if not hasattr(data, "__len__"):  # a stream
        return _of_dicts(data)
    found = data.with_format("arrow")[:]
    table: pa.Table = found if isinstance(found, pa.Table) else pa.table(found)
    return table


_OF_LIBRARY: Final[dict[str, Callable[[Any], pa.Table]]] = {
    "pandas": _of_pandas, "polars": _of_polars, "datasets": _of_hugging_face,
}  # fmt: skip


def _array(name: str, values: Any, *, from_pandas: bool = False) -> Any:
    if is_tensor(values):
        values = tensor_array(values, f"column {name!r}")
    if isinstance(values, np.ndarray) and values.ndim == 2:
        check_mask(values, f"column {name!r}")
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if values.shape[1] else pa.nulls(len(values))
    listed = hasattr(values, "__len__") or hasattr(values, "__iter__")
    if isinstance(values, str | bytes | Mapping) or not listed or getattr(values, "ndim", 1) == 0:
        fix = "for one row pass a list of one dict"
        raise SchemaError("a column must be array or list", where=f"column {name!r}", value=repr(values)[:80], fix=fix)
    if isinstance(values, np.ndarray) and values.dtype == object:
        from_pandas = True
    try:
        return pa.array(values, from_pandas=from_pandas)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        return _mixed(name, values, error)


def _mixed(name: str, values: Any, error: Exception) -> Any:
    """Return values of several types as text, as in a delimited file; only scalars are allowed."""
    texts: list[str | None] = []
    for value in values:
        if (
            value is None
            or (isinstance(value, float) and math.isnan(value))
            or type(value).__name__ in ("NAType", "NaTType")
        ):
            texts.append(None)
        elif isinstance(value, str | int | float | bool | np.generic):
            texts.append(str(value))
        else:
            raise DataError(
                "the values of a column have incompatible types", where=f"column {name!r}", value=str(error)
            ) from error
    return pa.array(texts, pa.string())


def _in_seconds(table: pa.Table) -> pa.Table:
    """Return a table with seconds in place of durations and times of day."""
    import pyarrow.compute as pc

    for n, field in enumerate(table.schema):
        kind = field.type
        if pa.types.is_duration(kind) or pa.types.is_time(kind):
            ticks = table.column(n).cast(pa.int32() if kind.bit_width == 32 else pa.int64())
            seconds = pc.divide(ticks.cast(pa.float64(), safe=False), _TICKS[kind.unit])
            table = table.set_column(n, field.name, seconds)
    return table


def plain_table(table: pa.Table) -> pa.Table:
    """Return a table with plain types: no dictionaries, views, extensions, 64-bit offsets, booleans, decimals.

    Booleans become 0 and 1, decimals and half-precision numbers become float64 and float32.
    """
    fields = [field.with_type(_plain_type(field.type)) for field in table.schema]
    wanted = pa.schema([field.remove_metadata() for field in fields])
    if wanted.types == table.schema.types:
        return table
    return pa.table([table.column(n).cast(field.type) for n, field in enumerate(wanted)], schema=wanted)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType) or types.is_dictionary(kind):
        return _plain_type(kind.value_type if types.is_dictionary(kind) else kind.storage_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if types.is_boolean(kind):
        return pa.int8()
    if types.is_decimal(kind):
        return pa.float64()
    return pa.float32() if types.is_float16(kind) else kind

"""Writing a data set folder: checked against the schema, and atomic."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from viviane.core.errors import ConfigError, DataError, SchemaError, expect
from viviane.core.exchange import tidy
from viviane.core.files import replace_folder, write_json_atomic
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.rows import as_table, is_table
from viviane.core.tensors import tensor_array
from viviane.data.columns import arrow_types, check_columns, is_list
from viviane.data.dataset import INFO_FILE, Dataset
from viviane.data.formats import Format, Manifest, named_format
from viviane.schema import Schema

ROWS_PER_GROUP: Final = 131_072
ROWS_PER_FILE: Final = 8 * ROWS_PER_GROUP
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_dataset(
    path: str | AnyPath,
    schema: Schema,
    source: Any,
    *,
    format: str | Format = "parquet",  # noqa: A002 - the word on the command line
    rows_per_group: int = ROWS_PER_GROUP,
    rows_per_file: int = ROWS_PER_FILE,
    info: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    overwrite: bool = False,
) -> Dataset:
    """Write rows to a data set folder, atomically, and open it.

    Args:
        path: the folder, or its URL; it appears only when everything is written.
        source: an iterable of Arrow tables, or of dicts of arrays or lists by column name, of any length; or one table
            in a form that `viviane.core.rows.as_table` accepts. Arrow tables must have the schema's types; other
            values are converted if this loses no information.
        format: name of a format of `viviane.data.formats`, or a format with its options.
        rows_per_group: rows of a Parquet row group or of a block, the unit of reading.
        rows_per_file: maximum rows of a file.
        info: statistics for info.json, or a function that returns them after the source is exhausted;
            "rows" is added.
        overwrite: replace an existing folder.

    Raises:
        ConfigError: the folder exists, or a size is below 1.
        SchemaError: the columns of a table differ from the schema, or the format cannot store them.
        DataError: a value cannot be converted, or is null; the disk is full. Formats other than Parquet also compare
            all values with the schema (KeyRangeError: an id is out of range); for Parquet the reader does this.

    Example:
        >>> import tempfile
        >>> schema = Schema(dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9, "kind": "multi_hot"}])
        >>> folder = Path(tempfile.mkdtemp()) / "train"
        >>> write_dataset(folder, schema, [{"x": [0.5, 1.5], "c": [[3, 4], []]}]).head().bags["c"].offsets.tolist()
        [0, 2, 2]
    """
    expect("schema", schema, Schema)
    target = location(path)
    if rows_per_group < 1 or rows_per_file < 1:
        raise ConfigError(
            "row groups and files need at least one row",
            value=f"rows_per_group={rows_per_group}, rows_per_file={rows_per_file}",
        )
    if not isinstance(target, RemotePath):
        tidy(target)
    if target.exists() and not overwrite:
        raise ConfigError("the folder exists", where=str(target), fix="choose another, or pass overwrite=True")
    chosen = named_format(format)
    chosen.check_schema(schema)
    wanted = pa.schema([pa.field(name, kind, nullable=False) for name, kind in arrow_types(schema).items()])
    tables = (_conform(part, wanted, schema, number) for number, part in enumerate(_parts(source)))
    with _explain_full_disk(target), replace_folder(target, overwrite=overwrite) as folder:
        place = cast(Path, target.absolute())  # for a URL only its text is used
        files = chosen.write(folder, place, schema, _regroup(tables, wanted, rows_per_group), rows_per_file)
        schema.save(folder)
        rows = sum(file.rows for file in files)
        write_json_atomic(folder / INFO_FILE, {"rows": rows, **(info() if callable(info) else info or {})})
        Manifest.write(folder, chosen, schema, files)  # last: a folder with a manifest is complete
    return Dataset(target)


@contextmanager
def _explain_full_disk(target: AnyPath) -> Iterator[None]:
    """Add advice to the error of a full disk; all other errors, including those of the source, pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        remote = isinstance(target, RemotePath)
        where = f"{tempfile.gettempdir()}, for {target}" if remote else str(target)
        raise DataError(
            "the disk is full: the data set is not written, and the earlier output is unchanged",
            where=where, value=error.strerror or str(error), fix="free disk space, or write to another disk",
        ) from error  # fmt: skip


def _parts(source: Any) -> Iterable[Any]:
    """Return the parts of a source: the source itself if it is one table, frame, mapping or list of rows."""
    if isinstance(source, pa.Table | pa.RecordBatch | Mapping):
        return [source]
    if isinstance(source, list | tuple) and source and isinstance(source[0], Mapping) and _is_row(source[0]):
        return [_columns(source)]
    if isinstance(source, pa.RecordBatchReader) or not isinstance(source, Iterable) or is_table(source):
        return [_columns(source)]
    return source


def _is_row(item: Mapping[str, Any]) -> bool:
    """Return whether a dict is one row: one of its values is a number."""
    return any(isinstance(value, int | float | str | np.generic) for value in item.values())


def _columns(source: Any) -> Mapping[str, Any]:
    table = as_table(source)
    return dict(zip(table.column_names, table.columns, strict=True))


def _regroup(tables: Iterator[pa.Table], wanted: pa.Schema, rows_per_group: int) -> Iterator[pa.Table]:
    """Yield tables of exactly rows_per_group rows, the last one shorter."""
    waiting: list[pa.Table] = []
    count = 0
    for table in tables:
        start = 0
        while table.num_rows - start >= rows_per_group - count:
            end = start + rows_per_group - count
            yield pa.concat_tables([*waiting, table.slice(start, end - start)])
            waiting, count, start = [], 0, end
        if start < table.num_rows:
            waiting.append(table.slice(start))
            count += table.num_rows - start
    if waiting:
        yield pa.concat_tables(waiting)


def _conform(part: Any, wanted: pa.Schema, schema: Schema, number: int) -> pa.Table:
    """Return one part of the source as a table with the wanted columns, in order."""
    where = f"part {number} of the source"
    if isinstance(part, pa.RecordBatch):
        part = pa.Table.from_batches([part])
    if isinstance(part, pa.Table):
        check_columns(part.schema, schema, where)
        arrays: list[Any] = [part.column(name) for name in wanted.names]
    elif isinstance(part, Mapping):
        unknown = [name for name in part if name not in wanted.names and name not in schema.ignored]
        absent = [name for name in wanted.names if name not in part]
        if unknown or absent:
            raise SchemaError(
                "the columns of a part differ from the schema",
                where=where,
                value=f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(absent) or 'none'}",
            )
        arrays = [_array(part[field.name], field, where) for field in wanted]
        if len({len(array) for array in arrays}) > 1:
            raise SchemaError("columns differ in length", where=where, value=[len(array) for array in arrays])
    else:
        raise SchemaError(
            "the source must consist of Arrow tables or dicts of columns", where=where, value=type(part).__name__
        )
    for field, array in zip(wanted, arrays, strict=True):
        if array.null_count or (is_list(array.type) and pc.list_flatten(array).null_count):
            raise DataError(
                "the data contain a null", where=f"{where}, column {field.name!r}, row {_first_null(array)}",
                fix="fill it, or clean the rows with the ETL, which has a value for what is missing",
            )  # fmt: skip
    cast = [_array(array, field, where) for field, array in zip(wanted, arrays, strict=True)]
    return pa.table(cast, schema=wanted)


def _first_null(array: Any) -> int:
    """Return the first row that is missing, or whose list has a missing value."""
    return next(
        row for row, one in enumerate(array.to_pylist()) if one is None or (isinstance(one, list) and None in one)
    )


def _array(values: Any, field: Any, where: str) -> Any:
    """Convert a column to its type: float64 is rounded to float32; ids are never rounded or wrapped."""
    if isinstance(values, torch.Tensor):
        values = tensor_array(values, where)
    try:
        return _converted(values, field.type)
    except SchemaError:
        raise
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(
            "a column cannot be converted without loss",
            where=f"{where}, column {field.name!r}",
            value=_first_line(error),
            allowed=str(field.type),
        ) from error


def _converted(values: Any, kind: Any) -> Any:
    """Convert a column; raise ValueError or an Arrow error if it loses more than the rounding of float32."""
    scalar = kind.value_type if is_list(kind) else kind
    if isinstance(values, np.ndarray) and values.ndim == 2 and is_list(kind):
        flat = _converted(values.reshape(-1), scalar)
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]).cast(kind)
    if isinstance(values, (pa.Array, pa.ChunkedArray)) or (isinstance(values, np.ndarray) and values.dtype != object):
        found: Any = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
        made = found.cast(kind, safe=not pa.types.is_floating(scalar))
    elif pa.types.is_integer(scalar):
        # Given the type, pyarrow truncates floats and decimals in Python lists; casts from inferred types do not.
        found = pa.array(values)
        inner = found.type.value_type if is_list(found.type) else found.type
        numbers = pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_decimal(inner)
        made = found.cast(kind) if numbers else pa.array(values, kind)
    else:
        made = pa.array(values, kind)
    if pa.types.is_floating(scalar):
        _refuse_overflow(values, made)
    return made


def _refuse_overflow(values: Any, made: Any) -> None:
    """Refuse finite values that become infinite in float32; the reader checks for infinite inputs."""
    flat = pc.list_flatten(made) if is_list(made.type) else made
    infinite = pc.is_inf(flat)
    if not pc.any(infinite).as_py():
        return
    given: Any = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
    if isinstance(values, np.ndarray) and values.ndim == 2:
        given = pa.array(values.reshape(-1))
    given = (pc.list_flatten(given) if is_list(given.type) else given).cast(pa.float64())
    grown = pc.and_(infinite, pc.invert(pc.is_inf(given)))
    if pc.any(grown).as_py():
        raise ValueError(f"{given.filter(grown)[0].as_py():g} does not fit float32")


def _first_line(error: Exception) -> str:
    """Return the first line of an error; the integers of an OverflowError may be too long for Python to print."""
    try:
        return (str(error).splitlines() or [type(error).__name__])[0][:500]
    except ValueError:
        return "an integer of thousands of digits"

"""Raw Parquet files: their columns checked before a row is read, their row groups in staged types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from viviane.core.errors import DataError, suggest
from viviane.core.locations import RemotePath
from viviane.etl.cells import BadCell, convert
from viviane.etl.columns import InputColumn
from viviane.etl.sources import Source
from viviane.etl.text import Chunk

ROWS_PER_CHUNK: Final = 65_536
_ACCEPTED: Final = {
    "float": "a float, decimal or integer column",
    "int": "an integer column",
    "string": "a string column",
    "hex": "a string of hexadecimal digits, or an integer column",
    "timestamp": "a timestamp or date column, or text",
    "bool": "a boolean or string column, or an integer column of 0 and 1",
}


def check_parquet(
    source: Source, wanted: tuple[InputColumn, ...], optional: frozenset[str]
) -> tuple[list[str], tuple[InputColumn, ...]]:
    """Compare a file's columns with those wanted; returns the names of all its columns, and the wanted ones it has.

    Raises:
        DataError: the file is truncated or no Parquet file, lacks a column, or has one of another type.
    """
    with _open(source) as file:
        schema = file.schema_arrow
    return schema.names, check_columns(schema, wanted, source.shown, optional)


def check_columns(
    schema: pa.Schema,
    wanted: tuple[InputColumn, ...],
    where: str,
    optional: frozenset[str],
    *,
    text_allowed: bool = False,
) -> tuple[InputColumn, ...]:
    """Compare a table's columns with those wanted.

    `text_allowed`, for rows in memory, also takes the text that a delimited file holds, and floats for whole numbers:
    a frame turns a column of whole numbers into floats as soon as one of them is missing.
    """
    wanted = tuple(column for column in wanted if column.name in schema.names or column.name not in optional)
    for column in wanted:
        if column.name not in schema.names:
            raise DataError(
                "a column is missing", where=where, value=column.name, fix=suggest(column.name, schema.names)
            )
        if schema.names.count(column.name) > 1:
            raise DataError("a column occurs twice", where=where, value=column.name, fix="rename one of them")
        kind = schema.field(column.name).type
        if not fits(kind, column, text_allowed=text_allowed):
            allowed = ("a list column; each element: " if column.is_list else "") + _ACCEPTED[column.type]
            raise DataError(
                "a column has a type that the config does not expect",
                where=f"{where}, column {column.name!r}",
                value=str(kind),
                allowed=allowed,
                fix=_fix(column, kind, in_memory=text_allowed),
            )
    return wanted


def _fix(column: InputColumn, kind: pa.DataType, *, in_memory: bool) -> str:
    """Say what to do: rows in memory, to predict or of an estimator, go through an ETL that is learned already."""
    if not in_memory:
        return "correct the column's type in the config's `input.columns`, or the file"
    if column.type == "string" and pa.types.is_integer(kind):
        return f"convert the column, in pandas with frame[{column.name!r}].astype(str): it was learned as text"
    return "convert the column to what it was when the ETL was learned, or learn it again from such rows"


def parquet_rows(source: Source, wanted: tuple[InputColumn, ...], first_row: int = 0) -> Iterator[tuple[pa.Table, int]]:
    """Yield a file's rows from `first_row` on, as raw tables with the number of their first row (from 0).

    Raises:
        DataError: a page is truncated or altered.
    """
    names = [column.name for column in wanted]
    with _open(source) as file:
        start = 0
        for group in range(file.metadata.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if start + num_rows <= first_row:
                start += num_rows
                continue
            try:
                for batch in file.iter_batches(ROWS_PER_CHUNK, row_groups=[group], columns=names, use_threads=False):
                    skip = max(first_row - start, 0)
                    if skip < batch.num_rows:
                        yield pa.Table.from_batches([batch]).slice(skip), start + skip
                    start += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise _damaged(source, error, f", row group {group}") from error


def read_columns(file: Path, columns: list[str] | None = None, *, use_threads: bool = True) -> pa.Table:
    """Read a file that the ETL wrote: its own columns only, whatever its folder is called.

    `pyarrow.parquet.read_table` would make a column of a folder called date=2024-01-01.
    """
    with pq.ParquetFile(file) as source:
        return source.read(columns=columns, use_threads=use_threads)


def typed_chunk(table: pa.Table, wanted: tuple[InputColumn, ...], first_row: int, missing: tuple[str, ...]) -> Chunk:
    """Convert a table's columns to staged types."""
    columns: dict[str, Any] = {}
    bad: list[BadCell] = []
    for column in wanted:
        raw = table.column(column.name)
        if pa.types.is_dictionary(raw.type):
            raw = raw.cast(raw.type.value_type)
        if _is_text(raw.type) or (column.type == "string" and _is_bytes(raw.type)):
            raw = _checked_text(raw)
            if pa.types.is_string(raw.type) and missing:
                raw = _without_missing(raw, missing)
        columns[column.name], cells = convert(raw, column, missing)
        bad += cells
    lines = np.arange(first_row + 1, first_row + table.num_rows + 1, dtype=np.int64)
    return Chunk(pa.table(columns), lines, bad, [])


def _checked_text(column: Any) -> Any:
    """Return text as strings, or as bytes where some of it is not UTF-8: then each cell is looked at."""
    if not pa.types.is_string(column.type):
        column = column.cast(pa.string(), safe=False)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return column.cast(pa.binary())
    return column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether it is text of a writer that does not say that it is UTF-8."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _without_missing(column: Any, missing: tuple[str, ...]) -> Any:
    return pc.if_else(pc.is_in(column, value_set=pa.array(missing)), pa.scalar(None, pa.string()), column)


def _open(source: Source) -> pq.ParquetFile:
    try:
        place: Any = source.path.ranged() if isinstance(source.path, RemotePath) else source.path
        return pq.ParquetFile(place, pre_buffer=place is not source.path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # a name of a column that is not UTF-8
        raise _damaged(source, error) from error


def _damaged(source: Source, error: Exception, place: str = "") -> DataError:
    return DataError(
        "the Parquet file is truncated, altered or no Parquet file",
        where=f"{source.shown}{place}",
        value=(str(error).splitlines() or [type(error).__name__])[0],
        fix="write or fetch the file again",
    )


def fits(kind: pa.DataType, column: InputColumn, *, text_allowed: bool = False) -> bool:
    """Whether a column of this Arrow type can be converted; `text_allowed`: see `check_columns`."""
    types = pa.types
    if text_allowed and types.is_string(kind) and not column.list:
        return True
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_null(kind):  # every value is missing
        return True
    if column.is_list:
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            kind = kind.value_type
        else:
            return column.separator is not None and _is_text(kind)
    text = _is_text(kind)
    accepted = {
        "float": any(one(kind) for one in (types.is_floating, types.is_integer, types.is_boolean, types.is_decimal)),
        "int": types.is_integer(kind) or types.is_boolean(kind) or (text_allowed and types.is_floating(kind)),
        "string": text or _is_bytes(kind),
        "hex": text or types.is_integer(kind),
        "timestamp": types.is_timestamp(kind) or types.is_date(kind) or text,
        "bool": types.is_boolean(kind) or types.is_integer(kind) or text or (text_allowed and types.is_floating(kind)),
    }
    return bool(accepted[column.type] or types.is_null(kind))

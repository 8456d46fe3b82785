"""Decoding of a Parquet row group into a row buffer: Arrow columns, checked, then stacked.

Stacking is the hot spot: the 39 columns of the Criteo layout become two row-major matrices. One strided
assignment per column was as fast as transposing in cache-sized tiles and as torch.stack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.core.locations import AnyPath, RemotePath, arrow_source
from viviane.data import checks
from viviane.data.checks import CellLocation
from viviane.data.plan import RowGroup
from viviane.data.row_buffer import Jagged, RowBuffer
from viviane.data.storage import FileStamp, refuse_changed, stamp
from viviane.schema import CategoricalColumn, DenseColumn, Schema


def open_parquet(path: AnyPath, compare: Callable[[pa.Schema, str], None]) -> pq.ParquetFile:
    """Open a file and call `compare` with its columns and file name.

    Raises:
        DataError: the file is missing, truncated or not Parquet.
        SchemaError: its columns differ from the schema.
    """
    size, _ = stamp(path)
    try:
        source: Any = path.ranged() if isinstance(path, RemotePath) else path
        file = pq.ParquetFile(source)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # a name of a column that is not UTF-8
        raise DataError(
            "not a complete Parquet file; it may be truncated or partly copied",
            where=str(path),
            value=f"{size} bytes: {_first_line(error)}",
            fix="copy or write the file again",
        ) from error
    try:
        compare(file.schema_arrow, str(path))
    except BaseException:
        file.close()
        raise
    return file


def decode_group(
    path: AnyPath,
    expected: FileStamp,
    group: RowGroup,
    schema: Schema,
    buffer: RowBuffer,
    start: int,
    part: int,
    *,
    verify: bool = True,
) -> None:
    """Read a row group into buffer rows [start, start + num_rows); its bags become part number `part`.

    `verify` compares the checksums of its pages, if the file has them.

    Raises:
        DataError: the file vanished, changed or is damaged; a value is null, not finite, not a label, or too long.
        KeyRangeError: an id is out of range.
    """
    table = read_group(path, expected, group, schema, verify=verify)
    decode_table(
        table, lambda name: CellLocation(str(path), group.index, group.first_row, name), schema, buffer, start, part
    )


def decode_table(
    table: pa.Table, place_of: Callable[[str], CellLocation], schema: Schema, buffer: RowBuffer, start: int, part: int
) -> None:
    """Check a table with the schema's types, and stack it into buffer rows [start, start + num_rows).

    Args:
        table: the rows.
        place_of: returns the location of a column, for messages.
        schema, buffer, start, part: see `decode_group`.

    Raises:
        DataError, KeyRangeError: see `decode_group`.
    """

    def column(name: str) -> tuple[Any, CellLocation]:
        place = place_of(name)
        array = _whole(table.column(name))
        checks.check_no_nulls(array, place)
        return array, place

    rows = slice(start, start + table.num_rows)
    for i, label in enumerate(schema.labels):
        array, place = column(label.name)
        values = array.to_numpy(zero_copy_only=False)
        checks.check_labels(values, label, place)
        buffer.labels[rows, i] = values
    position = 0
    for dense in schema.dense:
        array, place = column(dense.name)
        _dense(array, dense, place, buffer.dense[rows, position : position + dense.dim])
        position += dense.dim
    for i, feature in enumerate(schema.one_hot):
        array, place = column(feature.name)
        ids = array.to_numpy()
        checks.check_ids(ids, feature, place)
        buffer.one_hot[rows, i] = ids
    for feature in schema.bags:
        array, place = column(feature.name)
        weights = column(feature.weights) if feature.weights is not None else None
        buffer.parts[feature.name][part] = _bag(array, feature, place, weights)
    if schema.sample_weight is not None:
        assert buffer.weight is not None
        array, place = column(schema.sample_weight)
        buffer.weight[rows] = array.to_numpy()
        checks.check_weights(buffer.weight[rows], place)


def read_group(
    path: AnyPath, expected: FileStamp, group: RowGroup, schema: Schema, *, named: bool = False, verify: bool = True
) -> pa.Table:
    """Return a row group as stored in the file; `named`: only the schema's columns; `verify`: see `decode_group`.

    Raises:
        DataError: the file vanished, changed or is damaged.
    """
    refuse_changed(path, expected)
    try:
        known = _remote_footer(path, expected) if isinstance(path, RemotePath) else None
        # pre_buffer reads a group's columns from a store in a few large ranges
        with (
            arrow_source(path) as source,
            pq.ParquetFile(
                source, metadata=known, pre_buffer=known is not None, page_checksum_verification=verify
            ) as file,
        ):
            # the file has other columns only if the schema ignores some; selecting columns needs a lookup for each
            names = schema.column_names if named or schema.ignored else None
            table = file.read_row_group(group.index, columns=names, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            "a row group cannot be decoded; the file is damaged",
            where=f"{path}, row group {group.index}",
            value=_first_line(error),
            fix="copy or write the file again",
        ) from error
    if table.num_rows != group.num_rows:
        raise DataError(
            "the number of rows of a row group differs from the file's footer",
            where=f"{path}, row group {group.index}",
            value=table.num_rows,
            allowed=str(group.num_rows),
        )
    return table


@lru_cache(maxsize=1024)
def _remote_footer(path: RemotePath, expected: FileStamp) -> pq.FileMetaData:
    """Return a file's footer, fetched once for all of its row groups."""
    del expected  # part of the cache key: a rewritten file has another footer
    with arrow_source(path) as source:
        return pq.read_metadata(source)


def _whole(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _dense(array: Any, column: DenseColumn, place: CellLocation, out: NDArray[np.float32]) -> None:
    if column.dim == 1 and not isinstance(array, pa.FixedSizeListArray | pa.ListArray | pa.LargeListArray):
        values = array.to_numpy()
        checks.check_finite(values, place)
        out[:, 0] = values
        return
    values, offsets = _flat(array, place)
    lengths = np.diff(offsets)
    if len(lengths) and (lengths.min() != column.dim or lengths.max() != column.dim):
        row = int(np.argmax(lengths != column.dim))
        raise DataError(
            "a dense vector has the wrong length",
            where=place.row(row),
            value=int(lengths[row]),
            allowed=str(column.dim),
        )
    checks.check_finite(values, place, offsets)
    out[:] = values.reshape(len(out), column.dim)


def _flat(array: Any, place: CellLocation) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values of a list array and the offsets of its rows, from 0."""
    values = array.flatten()
    if isinstance(array, pa.FixedSizeListArray):
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
    if values.null_count:
        at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise DataError(
            "a null inside a list", where=place.row(row), fix="replace missing values: id 1 in categorical columns"
        )
    return values.to_numpy(), offsets


def _bag(
    array: Any, column: CategoricalColumn, place: CellLocation, weights: tuple[Any, CellLocation] | None
) -> Jagged:
    ids, offsets = _flat(array, place)
    checks.check_lengths(offsets, column, place)
    checks.check_ids(ids, column, place, offsets)
    if weights is None:
        return Jagged(ids, offsets)
    numbers, their_offsets = _flat(*weights)
    if not np.array_equal(offsets, their_offsets):
        lengths, others = np.diff(offsets), np.diff(their_offsets)
        row = int(np.argmax(lengths != others))
        raise DataError(
            f"the bag needs one weight per id of {column.name!r}",
            where=weights[1].row(row),
            value=f"{lengths[row]} ids, {others[row]} weights",
        )
    checks.check_finite(numbers, weights[1], offsets)
    return Jagged(ids, offsets, numbers)

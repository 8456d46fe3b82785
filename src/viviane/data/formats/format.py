"""The interface of a format: settings that open files as a storage, and write rows to files."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from pydantic import AfterValidator, Field

from viviane.config.base import Settings
from viviane.core.errors import ConfigError, DataError, SchemaError, suggest
from viviane.core.file_names import check_file_name
from viviane.core.locations import AnyPath
from viviane.data.checks import CellLocation
from viviane.data.decode import decode_table
from viviane.data.packed_layout import PackedLayout
from viviane.data.row_buffer import RowBuffer, RowView
from viviane.data.storage import DatasetFiles
from viviane.schema import CategoricalColumn, DenseColumn, LabelColumn, Schema


class BlockEntry(Settings):
    """One block of a file in Viviane's own format.

    Args:
        rows: number of rows.
        start: byte offset in the file.
        nnz: number of ids of each bag column.
        crc32: CRC-32 of the block's bytes.
    """

    rows: int = Field(ge=1)
    start: int = Field(ge=0)
    nnz: tuple[int, ...] = ()
    crc32: int = Field(ge=0)


class FileEntry(Settings):
    """One file of a written data set.

    Args:
        name: path inside the folder.
        rows, bytes: number of rows and bytes.
        sha256: checksum of its bytes; None in data sets written before 0.2.
        blocks: its blocks, in Viviane's own format.
    """

    name: str = Field(min_length=1)
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    blocks: tuple[BlockEntry, ...] = ()


def _check_pattern(pattern: str) -> str:
    if re.fullmatch(r"[^{}]*\{(:0?\d{1,2}d?)?\}[^{}]*", pattern) is None:
        raise ValueError("a file name pattern needs exactly one number field: part-{:05}.parquet")
    if "/" in check_file_name(pattern.format(0), where="file_name", error=ConfigError):
        raise ValueError("a file name pattern must not contain a folder")
    return pattern


FilePattern = Annotated[str, AfterValidator(_check_pattern)]
"""Pattern of the names of files to write, with one field for their number."""


class Format(Settings):
    """A format and its options."""

    format: str

    @abstractmethod
    def files_at(self, path: Path) -> Sequence[AnyPath]:
        """Return the data files of a path: a folder, a file list, or one file.

        Raises:
            DataError: there are no data files.
        """

    @abstractmethod
    def open(
        self, files: Sequence[Path], stored: Schema, schema: Schema, entries: Sequence[FileEntry] | None
    ) -> DatasetFiles:
        """Open data files.

        Args:
            files: in the order of their rows.
            stored: all columns of the files, in order.
            schema: the columns to read.
            entries: the manifest's entries of the files, if there is a manifest.

        Raises:
            DataError: a file is truncated, or is not of this format.
            SchemaError: the files have other columns.
        """

    def schema_of(self, files: Sequence[AnyPath], schema: Schema) -> Schema:
        """Return the columns of the schema that the files have: all of them, unless labels may be missing."""
        return schema

    @abstractmethod
    def check_schema(self, schema: Schema) -> None:
        """Refuse a schema whose rows this format cannot store.

        Raises:
            SchemaError: the format cannot store a column; names it.
        """

    @abstractmethod
    def write(
        self, folder: Path, target: Path, schema: Schema, tables: Iterator[pa.Table], rows_per_file: int
    ) -> tuple[FileEntry, ...]:
        """Write tables, each a group of rows, as data files.

        Args:
            folder: folder to write to.
            target: final path of the folder when it is complete, for paths inside files.
            schema: schema of the tables.
            tables: with the schema's types, checked for nulls.
            rows_per_file: maximum rows per file.
        """


def checked_views(schema: Schema, tables: Iterator[pa.Table]) -> Iterator[tuple[RowView, int]]:
    """Yield tables as checked views with their number of rows.

    Raises:
        DataError, KeyRangeError: a value does not match the schema.
    """
    layout, row = PackedLayout(schema), 0
    for number, table in enumerate(tables):
        buffer = RowBuffer(layout, table.num_rows, 1)

        def place(name: str, number: int = number, row: int = row) -> CellLocation:
            return CellLocation("the rows to write", number, row, name, "part")

        decode_table(table, place, schema, buffer, 0, 0)
        yield buffer.finish(), table.num_rows
        row += table.num_rows


def first_file(files: Sequence[Path]) -> str:
    """Return the name of the first file, for formats that have at least one.

    Raises:
        DataError: a manifest names none.
    """
    if not files:
        raise DataError("the data set names no file", fix="use another copy of it")
    return str(files[0])


def check_stored(stored: Schema, schema: Schema, where: str) -> None:
    """Compare the columns to read with those in the files.

    Raises:
        SchemaError: a column is missing, or has another kind.
    """
    there = {column.name: column for column in stored.columns}
    for column in schema.columns:
        other = there.get(column.name)
        if other is None:
            raise SchemaError(
                "a column of the schema is missing in the files",
                where=where,
                value=column.name,
                fix=suggest(column.name, there),
            )
        mine, theirs = _kind(column), _kind(other)
        weights = getattr(column, "weights", None)
        if mine != theirs or (weights is not None and weights != getattr(other, "weights", None)):
            raise SchemaError(
                "the kind of a column differs from the files", where=f"{where}, column {column.name!r}",
                value=mine if weights is None else f"{mine} with weights {weights!r}", allowed=theirs,
            )  # fmt: skip
    if schema.sample_weight is not None and schema.sample_weight != stored.sample_weight:
        raise SchemaError("the sample weight is missing in the files", where=where, value=schema.sample_weight)


def _kind(column: Any) -> str:
    match column:
        case LabelColumn():
            return "a label"
        case DenseColumn():
            return f"dense, dim {column.dim}"
        case CategoricalColumn(kind="one_hot"):
            return "one-hot ids"
        case _:
            return "bags of ids"


def check_entries(files: Sequence[Path], storage: DatasetFiles, entries: Sequence[FileEntry] | None) -> None:
    """Compare the sizes of files with the manifest.

    Raises:
        DataError: the size of a file differs from the manifest.
    """
    for file, stamp, entry in zip(files, storage.stamps, entries or (), strict=entries is not None):
        if stamp[0] != entry.bytes:
            raise DataError(
                "the size of a file differs from the manifest; it may be truncated or partly copied",
                where=str(file),
                value=f"{stamp[0]} bytes",
                allowed=f"{entry.bytes} bytes",
                fix="copy or write the data set again",
            )

"""What a format is: settings that open files as a storage, and write rows as files."""

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
from viviane.data.block import Block, View
from viviane.data.checks import CellLocation
from viviane.data.decode import decode_table
from viviane.data.storage import DatasetFiles
from viviane.schema import CategoricalColumn, DenseColumn, LabelColumn, Schema


class BlockEntry(Settings):
    """One block of a file in Viviane's own format.

    Args:
        rows: how many.
        start: first byte in the file.
        nnz: ids of each bag column.
        crc32: of the block's bytes.
    """

    rows: int = Field(ge=1)
    start: int = Field(ge=0)
    nnz: tuple[int, ...] = ()
    crc32: int = Field(ge=0)


class FileEntry(Settings):
    """One file of a written data set.

    Args:
        name: inside the folder.
        rows, bytes: how many.
        sha256: check sum of its bytes; None in data sets written before 0.2.
        blocks: in Viviane's own format, its blocks.
    """

    name: str = Field(min_length=1)
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    blocks: tuple[BlockEntry, ...] = ()


def _check_pattern(pattern: str) -> str:
    if re.fullmatch(r"[^{}]*\{(:0?\d{1,2}d?)?\}[^{}]*", pattern) is None:
        raise ValueError("a pattern of file names holds one place for a number: part-{:05}.parquet")
    if "/" in check_file_name(pattern.format(0), where="file_name", error=ConfigError):
        raise ValueError("a pattern of file names has no folder")
    return pattern


FilePattern = Annotated[str, AfterValidator(_check_pattern)]
"""Names of files to write, with one place for their number."""


class Format(Settings):
    """A format and its options."""

    format: str

    @abstractmethod
    def files_at(self, path: Path) -> Sequence[AnyPath]:
        """Return the data files that a path stands for: a folder, a file list, or one file.

        Raises:
            DataError: there are none.
        """

    @abstractmethod
    def open(
        self, files: Sequence[Path], stored: Schema, schema: Schema, entries: Sequence[FileEntry] | None
    ) -> DatasetFiles:
        """Open data files.

        Args:
            files: in the order of their rows.
            stored: every column that stands in the files, in order.
            schema: the columns to read.
            entries: what the manifest says about the files, where there is one.

        Raises:
            DataError: a file is truncated, or is not of this format.
            SchemaError: the files hold other columns.
        """

    def schema_of(self, files: Sequence[AnyPath], schema: Schema) -> Schema:
        """Return the columns of the schema that the files have: all of them, unless a format lets labels be absent."""
        return schema

    @abstractmethod
    def check_schema(self, schema: Schema) -> None:
        """Refuse a schema whose rows this format cannot hold.

        Raises:
            SchemaError: naming the column.
        """

    @abstractmethod
    def write(
        self, folder: Path, target: Path, schema: Schema, tables: Iterator[pa.Table], rows_per_file: int
    ) -> tuple[FileEntry, ...]:
        """Write tables, each a group of rows, as data files.

        Args:
            folder: to write into.
            target: where the folder will stand when it is complete, for paths inside files.
            schema: of the tables.
            tables: with the schema's types, checked for nulls.
            rows_per_file: a file is closed before it would get longer.
        """


def checked_views(schema: Schema, tables: Iterator[pa.Table]) -> Iterator[tuple[View, int]]:
    """Yield tables as checked views with their numbers of rows.

    Raises:
        DataError, KeyRangeError: a value is not what the schema says.
    """
    row = 0
    for number, table in enumerate(tables):
        block = Block(schema, table.num_rows, 1)

        def place(name: str, number: int = number, row: int = row) -> CellLocation:
            return CellLocation("the rows to write", number, row, name, "part")

        decode_table(table, place, schema, block, 0, 0)
        yield block.finish(), table.num_rows
        row += table.num_rows


def check_stored(stored: Schema, schema: Schema, where: str) -> None:
    """Compare the columns to read with those in the files.

    Raises:
        SchemaError: a column is missing, or of another kind.
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
                "a column is of another kind than in the files", where=f"{where}, column {column.name!r}",
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
        DataError: a file is longer or shorter than it was written.
    """
    for file, stamp, entry in zip(files, storage.stamps, entries or (), strict=entries is not None):
        if stamp[0] != entry.bytes:
            raise DataError(
                "a file has another size than the manifest says; it may be truncated or half copied",
                where=str(file),
                value=f"{stamp[0]} bytes",
                allowed=f"{entry.bytes} bytes",
                fix="copy or write the data set again",
            )

"""Parquet files with the schema's types, as the ETL writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.core.errors import DataError
from viviane.core.locations import AnyPath
from viviane.data.columns import arrow_types, check_columns
from viviane.data.decode import decode_group, open_parquet
from viviane.data.formats.format import FileEntry, Format, check_entries
from viviane.data.plan import RowGroup
from viviane.data.row_buffer import RowBuffer
from viviane.data.storage import DatasetFiles
from viviane.schema import Schema

# lz4 decodes two to three times as fast as zstd. Ids, labels and integer-valued dense columns repeat and compress
# with a dictionary; the small limit disables it early for columns that do not repeat.
# Pages have checksums, so that flipped bits are detected on reading.
ENCODING: Final[dict[str, Any]] = {
    "compression": "lz4",
    "dictionary_pagesize_limit": 65_536,
    "write_page_checksum": True,
}


class ParquetFiles(DatasetFiles):
    """Parquet files whose columns have the schema's names and types."""

    unit: ClassVar[str] = "row group"

    def __init__(self, schema: Schema, files: Sequence[AnyPath], entries: Sequence[FileEntry] | None = None) -> None:
        super().__init__(schema, cast("Sequence[Path]", files))  # remote paths have the same interface
        check_entries(self.files, self, entries)
        self._verified: set[RowGroup] = set()  # page checksums are compared once: that takes a fifth of decoding
        for number, path in enumerate(self.files):
            with open_parquet(path, lambda found, where: check_columns(found, schema, where)) as file:
                if entries is not None and file.metadata.num_rows != entries[number].rows:
                    raise DataError(
                        "the number of rows of a file differs from the manifest", where=str(path),
                        value=file.metadata.num_rows, allowed=str(entries[number].rows),
                        fix="copy or write the data set again",
                    )  # fmt: skip
                self.groups += groups_of(number, file)

    def decode(self, group: RowGroup, buffer: RowBuffer, start: int, part: int) -> None:
        """Read a row group into a buffer; see DatasetFiles."""
        path, stamp, first = self.files[group.file], self.stamps[group.file], group not in self._verified
        decode_group(path, stamp, group, self.schema, buffer, start, part, verify=first)
        self._verified.add(group)


class ParquetFormat(Format):
    """Parquet with the schema's types."""

    format: Literal["parquet"] = "parquet"

    def files_at(self, path: AnyPath) -> Sequence[AnyPath]:
        """Return every *.parquet file of a folder, in order of names, except those that start with "." or "_"."""
        files = sorted(file for file in path.glob("*.parquet") if not file.name.startswith((".", "_")))
        if not files:
            raise DataError("the data set has no Parquet files", where=str(path), fix="write it with `viviane etl`")
        return files

    def open(
        self, files: Sequence[AnyPath], stored: Schema, schema: Schema, entries: Sequence[FileEntry] | None
    ) -> DatasetFiles:
        """Read the footer of every file and compare its columns with the schema; see Format."""
        return ParquetFiles(schema, files, entries)

    def schema_of(self, files: Sequence[AnyPath], schema: Schema) -> Schema:
        """Return the schema without labels if the files have no label: rows to predict; see Format."""
        if not schema.labels or not files:
            return schema
        with open_parquet(cast(Path, files[0]), lambda found, where: None) as file:
            names = set(file.schema_arrow.names)
        if any(label.name in names for label in schema.labels):
            return schema
        labels = {label.name for label in schema.labels}
        kept = schema.select(one.name for one in schema.columns if one.name not in labels)
        if schema.sample_weight is not None and schema.sample_weight not in names:
            kept = kept.model_copy(update={"sample_weight": None})
        return kept

    def check_schema(self, schema: Schema) -> None:
        """Accept every schema."""

    def write(
        self, folder: Path, target: Path, schema: Schema, tables: Iterator[pa.Table], rows_per_file: int
    ) -> tuple[FileEntry, ...]:
        """Write `part-00000.parquet, ...`, each table a row group; see Format."""
        types = pa.schema([pa.field(name, kind, nullable=False) for name, kind in arrow_types(schema).items()])
        return write_parquet(folder, types, tables, rows_per_file)


def groups_of(number: int, file: pq.ParquetFile) -> Iterator[RowGroup]:
    """Yield the row groups of file `number`."""
    row = 0
    for index in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(index).num_rows
        yield RowGroup(number, index, row, rows)
        row += rows


def write_parquet(
    folder: Path, types: pa.Schema, tables: Iterator[pa.Table], rows_per_file: int, name: str = "part-{:05}.parquet"
) -> tuple[FileEntry, ...]:
    """Write tables as row groups of files named by a pattern; without any row, one file keeps the types."""
    rows: list[int] = []
    writer: pq.ParquetWriter | None = None
    try:
        for table in tables:
            if writer is None or rows[-1] + table.num_rows > rows_per_file:
                if writer is not None:
                    writer.close()
                writer = pq.ParquetWriter(folder / name.format(len(rows)), types, **ENCODING)
                rows.append(0)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            rows[-1] += table.num_rows
        if writer is None:
            writer = pq.ParquetWriter(folder / name.format(0), types, **ENCODING)
            rows.append(0)
    finally:
        if writer is not None:
            writer.close()
    files = [folder / name.format(number) for number in range(len(rows))]
    return tuple(
        FileEntry(name=file.name, rows=n, bytes=file.stat().st_size) for file, n in zip(files, rows, strict=True)
    )

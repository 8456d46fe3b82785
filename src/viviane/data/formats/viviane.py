"""Viviane's own format: memory-mapped blocks of rows; a batch is a slice of a block.

A data set is a folder: schema.json, info.json, manifest.json, and files `part-00000.rows, ...`, each a sequence of
blocks in the layout of `viviane.data.formats.block_layout`. The manifest lists the rows, the ids and a checksum
(CRC-32) of every block; it is written last. A block's checksum is compared when the block is first read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.data import checks
from viviane.data.buffers import Memory
from viviane.data.formats.block_layout import IdLayout, content, sections
from viviane.data.formats.format import BlockEntry, FileEntry, Format, check_entries, check_stored, checked_views
from viviane.data.formats.mapped_file import MappedFile
from viviane.data.plan import RowGroup
from viviane.data.row_buffer import Columns, Jagged, RowBuffer, RowView
from viviane.data.storage import DatasetFiles, refuse_changed
from viviane.schema import CategoricalColumn, LabelColumn, Schema


class VivianeFormat(Format):
    """Viviane's own format.

    Args:
        layout: "rows": the one-hot ids are one matrix in the narrowest type that holds every column, and a batch is a
            slice of it. "columns": each column has its own narrowest type; smaller files, slower reads from memory.
        check_sums: "first": compare the checksum of a block when it is first read; "never": trust the files.
    """

    format: Literal["viviane"] = "viviane"
    layout: IdLayout = "rows"
    check_sums: Literal["first", "never"] = "first"

    def files_at(self, path: Path) -> list[Path]:
        """Raise an error: only the manifest describes the content of the files."""
        raise DataError("a data set in Viviane's format needs its manifest.json", where=str(path), fix="copy it again")

    def open(
        self, files: Sequence[Path], stored: Schema, schema: Schema, entries: Sequence[FileEntry] | None
    ) -> DatasetFiles:
        """Compare the sizes of files and blocks with the manifest; see Format."""
        if entries is None:
            self.files_at(files[0].parent)
        return VivianeFiles(self, files, stored, schema, entries or ())

    def check_schema(self, schema: Schema) -> None:
        """Accept every schema."""

    def write(
        self, folder: Path, target: Path, schema: Schema, tables: Iterator[pa.Table], rows_per_file: int
    ) -> tuple[FileEntry, ...]:
        """Write `part-00000.rows, ...`, each table a block; see Format."""
        files: list[FileEntry] = []
        blocks: list[BlockEntry] = []
        file: BinaryIO | None = None

        def close() -> None:
            if file is not None:
                size = file.tell()
                file.close()
                rows = sum(block.rows for block in blocks)
                files.append(FileEntry(name=_name(len(files)), rows=rows, bytes=size, blocks=tuple(blocks)))
                blocks.clear()

        try:
            for view, rows in checked_views(schema, tables):
                if not rows:
                    continue
                if file is None or sum(block.rows for block in blocks) + rows > rows_per_file:
                    close()
                    file = (folder / _name(len(files))).open("wb")
                blocks.append(self._write_block(file, schema, view, rows))
            close()
        finally:
            if file is not None:
                file.close()
        return tuple(files)

    def _write_block(self, file: BinaryIO, schema: Schema, view: RowView, rows: int) -> BlockEntry:
        nnz = tuple(int(view.bags[bag.name].offsets[-1]) for bag in schema.bags)
        planned, size = sections(schema, self.layout, rows, nnz)
        start = file.tell()
        check = 0
        for section, end in zip(planned, [*(after.start for after in planned[1:]), size], strict=True):
            data = content(section, view, schema).reshape(-1).view(np.uint8).data
            for piece in (data, bytes(end - section.start - section.num_bytes)):
                file.write(piece)
                check = zlib.crc32(piece, check)
        return BlockEntry(rows=rows, start=start, nnz=nnz, crc32=check)


def _name(number: int) -> str:
    return f"part-{number:05}.rows"


class VivianeFiles(DatasetFiles):
    """Files of Viviane's own format, memory-mapped when first read."""

    mapped = True

    def __init__(
        self,
        options: VivianeFormat,
        files: Sequence[Path],
        stored: Schema,
        schema: Schema,
        entries: Sequence[FileEntry],
    ) -> None:
        super().__init__(schema, files)
        self._options, self._stored, self._entries = options, stored, entries
        where = str(files[0].parent) if files else "the manifest"
        check_stored(stored, schema, where)
        check_entries(files, self, entries)
        for number, entry in enumerate(entries):
            self._add_blocks(number, entry)
        self._stricter = _stricter(stored, schema)
        self._maps: dict[int, MappedFile] = {}
        self._views: dict[tuple[int, int], RowView] = {}

    def _add_blocks(self, number: int, entry: FileEntry) -> None:
        row, end = 0, 0
        for index, block in enumerate(entry.blocks):
            if block.start != end or len(block.nnz) != len(self._stored.bags):
                raise _contradiction(self.files[number], f"block {index} begins at byte {block.start}, not {end}")
            end += sections(self._stored, self._options.layout, block.rows, block.nnz)[1]
            self.groups.append(RowGroup(number, index, row, block.rows))
            row += block.rows
        if end != entry.bytes or row != entry.rows:
            raise _contradiction(
                self.files[number],
                f"{row} rows in {end} bytes of blocks, {entry.rows} rows in {entry.bytes} of the file",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}, "_views": {}}  # a memory map would be pickled with its complete content

    def decode(self, group: RowGroup, buffer: RowBuffer, start: int, part: int) -> None:
        """Copy a block of the file; see DatasetFiles."""
        buffer.fill(self.view(group), start, group.num_rows, part)

    def view(self, group: RowGroup, memory: Memory | None = None) -> RowView:
        """Return a block as stored in the file; its checksum is compared at the first call."""
        path = self.files[group.file]
        refuse_changed(path, self.stamps[group.file])
        view = self._views.get((group.file, group.index))
        if view is None:
            view = self._views[group.file, group.index] = self._open_block(group, self._map(group).array)
        else:
            entry = self._entries[group.file].blocks
            start = entry[group.index].start
            end = entry[group.index + 1].start if group.index + 1 < len(entry) else self.stamps[group.file][0]
            self._map(group).fetch(start, end)
        return view

    def _map(self, group: RowGroup) -> MappedFile:
        found = self._maps.get(group.file)
        if found is None:
            found = self._maps[group.file] = MappedFile(self.files[group.file])
        return found

    def _open_block(self, group: RowGroup, data: NDArray[np.uint8]) -> RowView:
        entry = self._entries[group.file].blocks[group.index]
        planned, size = sections(self._stored, self._options.layout, entry.rows, entry.nnz)
        if self._options.check_sums == "first":
            found = zlib.crc32(data[entry.start : entry.start + size].data)
            if found != entry.crc32:
                raise DataError(
                    "the checksum of a block is wrong; the file is damaged",
                    where=f"{self.files[group.file]}, block {group.index}, bytes {entry.start} to {entry.start + size}",
                    value=f"{found:#010x}",
                    allowed=f"{entry.crc32:#010x}",
                    fix="copy or write the data set again",
                )
        arrays = {(section.kind, section.index): section.array(data, entry.start) for section in planned}
        view = _view(self._stored, self.schema, arrays)
        for column in self._stricter:
            self._check(group, column, view)
        return view

    def _check(self, group: RowGroup, column: LabelColumn | CategoricalColumn, view: RowView) -> None:
        """Compare values with a schema that allows fewer values than the schema of the files."""
        place = self.place(group, column.name)
        if isinstance(column, LabelColumn):
            checks.check_labels(_column(view.labels, self.schema.labels.index(column)), column, place)
        elif column.kind == "one_hot":
            checks.check_ids(_column(view.one_hot, self.schema.one_hot.index(column)), column, place)
        else:
            bag = view.bags[column.name]
            checks.check_lengths(bag.offsets, column, place)
            checks.check_ids(bag.values, column, place, bag.offsets)


def _contradiction(path: Path, value: str) -> DataError:
    return DataError(
        "the manifest contradicts itself; it is damaged", where=str(path), value=value, fix="copy the data set again"
    )


def _column(matrix: Columns, wanted: int) -> NDArray[Any]:
    first, values = next(one for one in matrix if one[0] <= wanted < one[0] + one[1].shape[1])
    return values[:, wanted - first]


_ANY = 1 << 64  # the range of raw ids


def _stricter(stored: Schema, schema: Schema) -> list[LabelColumn | CategoricalColumn]:
    """Return the columns that allow fewer values than those in the files."""
    real = {label.name for label in stored.labels if label.task == "regression"}
    found: list[LabelColumn | CategoricalColumn] = [
        label for label in schema.labels if label.task == "binary" and label.name in real
    ]
    for column in schema.categorical:
        other = stored.categorical_column(column.name)
        shorter = column.max_length is not None and column.max_length < (other.max_length or 1 << 62)
        if (
            (column.num_ids or _ANY) < (other.num_ids or _ANY)
            or shorter
            or column.hotness not in (None, other.hotness)
            or (column.dtype, other.dtype) == ("int32", "int64")
        ):
            found.append(column)
    return found


def _view(stored: Schema, schema: Schema, arrays: dict[Any, NDArray[Any]]) -> RowView:
    # column -> kind and index of its section, first column in it, width
    places = {label.name: ("labels", 0, i, 1) for i, label in enumerate(stored.labels)}
    at = 0
    for dense in stored.dense:
        places[dense.name] = ("dense", 0, at, dense.dim)
        at += dense.dim
    by_column = ("one_hot", 1) in arrays or len(stored.one_hot) == 1
    for i, feature in enumerate(stored.one_hot):
        places[feature.name] = ("one_hot", i if by_column else 0, 0 if by_column else i, 1)
    bags = {}
    for column in schema.bags:
        i = stored.bags.index(stored.categorical_column(column.name))
        bags[column.name] = Jagged(
            arrays["ids", i], arrays["offsets", i], None if column.weights is None else arrays["id_weights", i]
        )
    return RowView(
        _columns([places[column.name] for column in schema.labels], arrays),
        _columns([places[column.name] for column in schema.dense], arrays),
        _columns([places[column.name] for column in schema.one_hot], arrays),
        arrays["weight", 0] if schema.sample_weight is not None else None,
        bags,
    )


def _columns(places: list[tuple[str, int, int, int]], arrays: dict[Any, NDArray[Any]]) -> Columns:
    """Return matrix columns as slices of sections: adjacent columns of the file form one slice."""
    runs: list[tuple[int, str, int, int, int]] = []
    width = 0
    for kind, index, at, count in places:
        if runs and runs[-1][1:3] == (kind, index) and runs[-1][3] + runs[-1][4] == at:
            first, _, _, start, so_far = runs[-1]
            runs[-1] = (first, kind, index, start, so_far + count)
        else:
            runs.append((width, kind, index, at, count))
        width += count
    return tuple((first, arrays[kind, index][:, at : at + count]) for first, kind, index, at, count in runs)

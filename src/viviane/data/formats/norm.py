"""HugeCTR's Norm: binary files with a header, and any number of keys per slot in each row."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from viviane.core.errors import DataError
from viviane.data import checks
from viviane.data.formats.file_list import FILE_LIST, is_file_list, read_file_list, write_file_list
from viviane.data.formats.format import (
    FileEntry,
    FilePattern,
    Format,
    check_entries,
    check_stored,
    checked_views,
    first_file,
)
from viviane.data.formats.norm_pack import pack
from viviane.data.formats.slots import check_slots, slots_of
from viviane.data.plan import RowGroup
from viviane.data.row_buffer import Jagged, RowBuffer
from viviane.data.storage import ROWS_PER_BLOCK, DatasetFiles, refuse_changed
from viviane.ops.norm_records import PROBLEMS, NormLayout, NormRecords, Problem, norm_records, skip_records
from viviane.schema import CategoricalColumn, Schema

HEADER: Final = struct.Struct("<8q")
"""error_check, number_of_records, label_dim, dense_dim, slot_num, three reserved."""
FIRST_HEADER: Final = struct.Struct("<4q")
"""Header of HugeCTR 2.0: number_of_records, label_dim, slot_num, reserved."""
_WRAPPED: Final = 5  # bytes around a checked record: its length before it, its checksum after it


class NormFormat(Format):
    """HugeCTR's Norm. A row is float32 labels | float32 dense values | per slot: int32 nnz, nnz keys.

    Args:
        check_sum: the header and every row carry a checksum (check_type Sum); else none (Non).
        i64_input_key: keys of 8 bytes (int64) instead of 4 (uint32).
        version: "2.0" is HugeCTR's first layout: a header of 32 bytes, int32 labels, keys of 8 bytes, no dense values
            and no checksums, regardless of the two options above.
        slot_sizes: HugeCTR's slot_size_array; None: the columns' num_ids.
        shifted_keys: keys are unique over all slots: an id plus the sizes of the preceding slots.
        file_name: pattern of the names of files to write.
    """

    format: Literal["norm"] = "norm"
    check_sum: bool = True
    i64_input_key: bool = False
    version: Literal["2.0", "2.1"] = "2.1"
    slot_sizes: tuple[int, ...] | None = Field(default=None)
    shifted_keys: bool = True
    file_name: FilePattern = "part-{:05}.norm"

    @property
    def key_bytes(self) -> int:
        """Bytes per key."""
        return 8 if self.i64_input_key or self.version == "2.0" else 4

    @property
    def is_checked(self) -> bool:
        """Whether the header and every row carry a checksum."""
        return self.check_sum and self.version != "2.0"

    def layout(self, schema: Schema) -> NormLayout:
        """Return the layout of one row."""
        numbers = len(schema.labels) + schema.num_dense
        return NormLayout(numbers, len(schema.categorical), self.key_bytes, self.is_checked)

    def files_at(self, path: Path) -> list[Path]:
        """Return the files of a file list, or the file itself if it is not a list; see Format."""
        if path.is_dir() and (path / FILE_LIST).exists():
            return read_file_list(path / FILE_LIST, inside=path)
        if not path.is_file():
            raise DataError("Norm file or file list not found", where=str(path), fix="pass a file list or a file")
        return read_file_list(path) if is_file_list(path) else [path]

    def open(
        self, files: Sequence[Path], stored: Schema, schema: Schema, entries: Sequence[FileEntry] | None
    ) -> DatasetFiles:
        """Read the headers; see Format."""
        return NormFiles(self, files, stored, schema, entries)

    def check_schema(self, schema: Schema) -> None:
        """Refuse weights, and keys that do not fit; see Format."""
        if self.version == "2.0" and schema.num_dense:
            raise DataError(
                "files of HugeCTR 2.0 have no dense columns", where=f"column {schema.dense[0].name!r}",
                fix='remove the dense columns, or use version="2.1"',
            )  # fmt: skip
        check_slots(schema, slots_of(schema, self.slot_sizes, self.shifted_keys), self.key_bytes, "norm")

    def write(
        self, folder: Path, target: Path, schema: Schema, tables: Iterator[pa.Table], rows_per_file: int
    ) -> tuple[FileEntry, ...]:
        """Write `part-00000.norm, ...` and file_list.txt; see Format."""
        slots = slots_of(schema, self.slot_sizes, self.shifted_keys)
        files: list[FileEntry] = []
        rows = 0
        file: Any = None

        def close() -> None:
            if file is not None:
                size = file.tell()
                file.seek(0)
                file.write(self.header(schema, rows))
                file.close()
                files.append(FileEntry(name=self.file_name.format(len(files)), rows=rows, bytes=size))

        try:
            for view, count in checked_views(schema, tables):
                if file is None or rows + count > rows_per_file:
                    close()
                    file, rows = (folder / self.file_name.format(len(files))).open("wb"), 0
                    file.write(self.header(schema, 0))  # the number of rows is written when the file is closed
                file.write(pack(view, count, slots, self.layout(schema), whole_labels=self.version == "2.0").data)
                rows += count
            if file is None:
                file = (folder / self.file_name.format(0)).open("wb")
                file.write(self.header(schema, 0))
            close()
        finally:
            if file is not None:
                file.close()
        write_file_list(folder / FILE_LIST, [target / entry.name for entry in files])
        return tuple(files)

    def header(self, schema: Schema, rows: int) -> bytes:
        """Return the header of a file of this many rows."""
        if self.version == "2.0":
            return FIRST_HEADER.pack(rows, len(schema.labels), len(schema.categorical), 0)
        content = HEADER.pack(
            int(self.check_sum), rows, len(schema.labels), schema.num_dense, len(schema.categorical), 0, 0, 0
        )
        return struct.pack("<i", len(content)) + content + bytes([sum(content) % 256]) if self.check_sum else content

    def expected(self, stored: Schema) -> tuple[tuple[str, int, int | None], ...]:
        """Return name, offset and value of each header field; the value is None for the number of rows."""
        labels, slots = len(stored.labels), len(stored.categorical)
        if self.version == "2.0":
            return ("number_of_records", 0, None), ("label_dim", 1, labels), ("slot_num", 2, slots)
        return (
            ("error_check", 0, int(self.check_sum)), ("number_of_records", 1, None), ("label_dim", 2, labels),
            ("dense_dim", 3, stored.num_dense), ("slot_num", 4, slots),
        )  # fmt: skip


class NormFiles(DatasetFiles):
    """Norm files; rows have different lengths, so they are located by a sequential scan."""

    def __init__(
        self,
        options: NormFormat,
        files: Sequence[Path],
        stored: Schema,
        schema: Schema,
        entries: Sequence[FileEntry] | None,
    ) -> None:
        super().__init__(schema, files)
        self._options, self._stored = options, stored
        self._layout = options.layout(stored)
        self._slots = slots_of(stored, options.slot_sizes, options.shifted_keys)
        check_stored(stored, schema, first_file(files))
        check_entries(files, self, entries)
        self._starts: list[list[int]] = []  # byte offset of each group's first row, and the end of the file
        for number in range(len(files)):
            self._index(number, None if entries is None else entries[number].rows)

    def _index(self, number: int, wanted: int | None) -> None:
        path = self.files[number]
        rows, at = self._read_header(path)
        if wanted is not None and rows != wanted:
            raise DataError(
                "the number of rows in the header differs from the manifest", where=f"{path}, byte 8", value=rows,
                allowed=str(wanted), fix="copy or write the data set again",
            )  # fmt: skip
        starts = [at]
        for index, row in enumerate(range(0, rows, ROWS_PER_BLOCK)):
            count = min(ROWS_PER_BLOCK, rows - row)
            self.groups.append(RowGroup(number, index, row, count))
            if row + count < rows:  # a long file: only a scan finds the start of the next group
                end = skip_records(self._data(number), starts[-1], count, self._layout)
                if isinstance(end, Problem):
                    raise self._damage(number, row, end)
                starts.append(end)
        size = self.stamps[number][0]
        if not rows and size != at:
            raise self._leftover(path, at, size)
        self._starts.append([*starts, size])

    def _read_header(self, path: Path) -> tuple[int, int]:
        """Return the number of rows and the byte offset of the first one."""
        shape = FIRST_HEADER if self._options.version == "2.0" else HEADER
        wrapped = _WRAPPED if self._options.is_checked else 0
        with path.open("rb") as file:
            content = file.read(shape.size + wrapped)
        if len(content) < shape.size + wrapped:
            raise DataError(
                "the file ends inside its header", where=f"{path}, byte {len(content)}", value=f"{len(content)} bytes",
                allowed=f"{shape.size + wrapped} bytes and more", fix="copy the file again",
            )  # fmt: skip
        if wrapped:
            inner = content[4:-1]
            if struct.unpack_from("<i", content)[0] != shape.size or sum(inner) % 256 != content[-1]:
                raise DataError(
                    "the header's length or checksum is wrong", where=f"{path}, byte 0",
                    fix="copy the file again; a file without checksums needs check_sum=False",
                )  # fmt: skip
            content = inner
        fields, rows, byte = shape.unpack(content), 0, 0
        for name, index, value in self._options.expected(self._stored):
            place = 4 * bool(wrapped) + 8 * index
            if value is None:
                rows, byte = fields[index], place
            elif fields[index] != value:
                raise DataError(
                    f"the header's {name} does not match the schema and the format",
                    where=f"{path}, byte {place}",
                    value=fields[index],
                    allowed=str(value),
                    fix="correct the schema or the format's options; or the file is damaged",
                )
        if rows < 0:
            raise DataError("the header has a negative number of rows", where=f"{path}, byte {byte}", value=rows)
        smallest = 4 * (self._layout.num_numbers + self._layout.num_slots) + wrapped
        if rows * smallest > path.stat().st_size:
            raise DataError(
                "the file is too small for the rows in its header; it may be truncated", where=f"{path}, byte {byte}",
                value=rows, allowed=f"at most {path.stat().st_size // smallest} in {path.stat().st_size} bytes",
                fix="copy the file again",
            )  # fmt: skip
        return rows, shape.size + wrapped

    def _data(self, number: int) -> NDArray[np.uint8]:
        return np.asarray(np.memmap(self.files[number], np.uint8, "r"))

    def _damage(self, number: int, first_row: int, problem: Problem) -> DataError:
        return DataError(
            PROBLEMS[problem.code],
            where=f"{self.files[number]}, row {first_row + problem.record}, byte {problem.byte}",
            fix="copy or write the file again; or the schema or the width of keys (i64_input_key) is wrong",
        )

    def _leftover(self, path: Path, end: int, size: int) -> DataError:
        return DataError(
            "there are bytes after the last row of the header's count", where=f"{path}, byte {end}",
            value=f"{size - end} bytes", fix="copy the file again; or the schema or the width of keys is wrong",
        )  # fmt: skip

    def decode(self, group: RowGroup, buffer: RowBuffer, start: int, part: int) -> None:
        """Read rows into a buffer; see DatasetFiles."""
        refuse_changed(self.files[group.file], self.stamps[group.file])
        first, end = self._starts[group.file][group.index : group.index + 2]
        found = norm_records(self._data(group.file)[:end], first, group.num_rows, self._layout)
        if isinstance(found, Problem):
            raise self._damage(group.file, group.first_row, found)
        if found.end != end:
            raise self._leftover(self.files[group.file], found.end, end)
        rows = slice(start, start + group.num_rows)
        self._numbers(found, group, buffer, rows)
        ends = np.cumsum([0, *found.lengths.sum(axis=1, dtype=np.int64)])
        for i, slot in enumerate(self._slots):
            column = next((one for one in self.schema.categorical if one.name == slot.column.name), None)
            if column is not None:
                keys = found.keys[ends[i] : ends[i + 1]]
                keys -= slot.shift
                self._ids(keys, found.lengths[i], column, group, buffer, rows, part)

    def _numbers(self, found: NormRecords, group: RowGroup, buffer: RowBuffer, rows: slice) -> None:
        labels = [label.name for label in self._stored.labels]
        for i, label in enumerate(self.schema.labels):
            values = found.numbers[:, labels.index(label.name)]
            if self._options.version == "2.0":
                values = values.view(np.int32).astype(np.float32)
            checks.check_labels(values, label, self.place(group, label.name))
            buffer.labels[rows, i] = values
        places, at = {}, len(labels)
        for column in self._stored.dense:
            places[column.name] = at
            at += column.dim
        to = 0
        for column in self.schema.dense:
            values = found.numbers[:, places[column.name] : places[column.name] + column.dim]
            offsets = np.arange(len(values) + 1) * column.dim
            checks.check_finite(values.reshape(-1), self.place(group, column.name), offsets)
            buffer.dense[rows, to : to + column.dim] = values
            to += column.dim

    def _ids(
        self,
        keys: NDArray[np.int64],
        lengths: NDArray[np.int32],
        column: CategoricalColumn,
        group: RowGroup,
        buffer: RowBuffer,
        rows: slice,
        part: int,
    ) -> None:
        place = self.place(group, column.name)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        checks.check_ids(keys, column, place, offsets)
        if column.kind != "one_hot":
            checks.check_lengths(offsets, column, place)
            buffer.parts[column.name][part] = Jagged(keys.astype(column.dtype), offsets)
            return
        if len(lengths) and (lengths.min() != 1 or lengths.max() != 1):
            row = int(np.argmax(lengths != 1))
            raise DataError(
                "a one-hot column needs exactly one key per row", where=place.row(row), value=f"{lengths[row]} keys",
                fix='declare the column with kind "multi_hot"',
            )  # fmt: skip
        buffer.one_hot[rows, self.schema.one_hot.index(column)] = keys

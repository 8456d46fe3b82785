"""Files of fixed-length records without a header: labels, dense values, then the keys of each slot.

Shapes: R records, L labels, N dense values, K keys per record (the sum of the slots' hotness).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.data import checks
from viviane.data.buffers import Memory
from viviane.data.formats.format import FileEntry, Format, check_entries, check_stored, checked_views, first_file
from viviane.data.plan import RowGroup
from viviane.data.row_buffer import Jagged, RowBuffer, RowView
from viviane.data.storage import ROWS_PER_BLOCK, DatasetFiles, refuse_changed
from viviane.schema import Schema

DATA_FILE: Final = "data.bin"


@dataclass(frozen=True)
class Record:
    """The layout of one record.

    Args:
        schema: its columns, in order.
        whole_labels: labels are int32, else float32.
        whole_dense: dense values are int32 k and mean ln(k + 1), else float32.
        key_bytes: 4 (unsigned) or 8 (signed).
        padding: id that fills short bags, or None if every bag is full.
    """

    schema: Schema
    whole_labels: bool
    whole_dense: bool
    key_bytes: int
    padding: int | None = None

    @cached_property
    def hotness(self) -> list[int]:
        """Number of keys of each slot."""
        return [1 if column.kind == "one_hot" else column.max_length or 0 for column in self.schema.categorical]

    @cached_property
    def dtype(self) -> Any:
        """The record as a structured NumPy type, without gaps."""
        labels, dense = ("<i4" if whole else "<f4" for whole in (self.whole_labels, self.whole_dense))
        return np.dtype(
            [
                ("labels", labels, (len(self.schema.labels),)),
                ("dense", dense, (self.schema.num_dense,)),
                ("keys", "<u4" if self.key_bytes == 4 else "<i8", (sum(self.hotness),)),
            ]
        )

    def starts(self) -> dict[str, int]:
        """Return the first key of each column."""
        ends = np.cumsum([0, *self.hotness]).tolist()
        return {column.name: start for column, start in zip(self.schema.categorical, ends, strict=False)}

    def pack(self, view: RowView, rows: int, first_row: int) -> NDArray[Any]:
        """Return rows as records.

        Raises:
            DataError: a value is not an integer, or a bag is not full; names the row.
        """
        records = np.zeros(rows, self.dtype)
        labels, dense, one_hot = (matrix[0][1] for matrix in (view.labels, view.dense, view.one_hot))
        records["labels"] = self._whole(labels, "labels", first_row) if self.whole_labels else labels
        records["dense"] = self._counts(dense, first_row) if self.whole_dense else dense
        starts = self.starts()
        for i, column in enumerate(self.schema.one_hot):
            records["keys"][:, starts[column.name]] = one_hot[:, i]
        for column in self.schema.bags:
            start, hotness = starts[column.name], column.max_length or 0
            bag = self._full(view.bags[column.name], hotness, column.name, first_row)
            records["keys"][:, start : start + hotness] = bag
        return records

    def _whole(self, values: NDArray[Any], what: str, first_row: int) -> NDArray[np.int32]:
        # float32 represents integers up to 2^24 exactly; larger values are integers but may have been rounded
        whole: NDArray[np.int32] = np.clip(np.rint(values), -(2**31), 2**31 - 128).astype(np.int32)
        _refuse(whole != values, values, f"{what} are stored as integers", first_row, "32-bit integers")
        return whole

    def _counts(self, values: NDArray[Any], first_row: int) -> NDArray[np.int32]:
        counts = np.clip(np.rint(np.expm1(values.astype(np.float64))), -1, 2**31 - 1)
        again = np.log1p(np.maximum(counts, 0)).astype(np.float32)
        # float32 keeps 24 bits: ln(k + 1) differs by at most one rounding error
        wrong = (np.abs(again - values) > 1.2e-7 * np.maximum(1, np.abs(values))) | (counts < 0)
        _refuse(wrong, values, "dense values are stored as k of ln(k + 1)", first_row, "ln(k + 1) of an integer k")
        return counts.astype(np.int32)

    def _full(self, bag: Jagged, hotness: int, name: str, first_row: int) -> NDArray[Any]:
        lengths = np.diff(bag.offsets)
        if self.padding is None:
            _refuse(
                (lengths != hotness)[:, None], lengths[:, None], f"column {name!r} needs the same number of ids in "
                "every row", first_row, f"{hotness} ids (max_length)",
                "set the format's padding, or use a format that stores lengths: norm, parquet, viviane",
            )  # fmt: skip
            return bag.values.reshape(-1, hotness)
        filled = np.full((len(lengths), hotness), self.padding, bag.values.dtype)
        filled[np.arange(hotness) < lengths[:, None]] = bag.values
        again = _cut(filled, self.padding)
        _refuse(
            (again != lengths)[:, None], lengths[:, None], f"a bag of {name!r} ends with the padding id", first_row,
            f"a last id other than {self.padding}", "choose another padding",
        )  # fmt: skip
        return filled


def _cut(keys: NDArray[Any], padding: int) -> NDArray[np.int64]:
    """Return the length of each row without trailing padding."""
    real = (keys != padding)[:, ::-1]
    return np.where(real.any(axis=1), keys.shape[1] - real.argmax(axis=1), 0).astype(np.int64)


def _refuse(
    wrong: NDArray[np.bool_], values: NDArray[Any], what: str, first_row: int, allowed: str, fix: str | None = None
) -> None:
    if wrong.any():
        row, column = np.argwhere(wrong)[0].tolist()
        fix = fix or "use the format's option for floats, or another format"
        raise DataError(
            what, where=f"row {first_row + row}", value=values[row, column].item(), allowed=allowed, fix=fix
        )


class FixedRecordFiles(DatasetFiles):
    """Files of records, memory-mapped; viewed in place if no conversion is needed."""

    def __init__(
        self,
        record: Record,
        files: Sequence[Path],
        schema: Schema,
        entries: Sequence[FileEntry] | None,
        num_samples: int | None,
    ) -> None:
        super().__init__(schema, files)
        self._record = record
        check_stored(record.schema, schema, first_file(files))
        check_entries(files, self, entries)
        wanted = [entry.rows for entry in entries] if entries is not None else [num_samples] * len(self.files)
        for number, rows in enumerate(wanted):
            self._add_groups(number, rows)
        self.mapped = not record.whole_dense and not schema.bags
        self._checked: set[tuple[int, int]] = set()

    def _add_groups(self, number: int, wanted: int | None) -> None:
        size, length = self.stamps[number][0], self._record.dtype.itemsize
        rows, rest = divmod(size, length)
        if rest:
            raise DataError(
                "the file ends inside a row: it is truncated, or the row length is wrong",
                where=f"{self.files[number]}, row {rows}, byte {rows * length}",
                value=f"{size} bytes",
                allowed=f"a multiple of {length} bytes, the row length of this schema and format",
                fix="copy the file again, or correct the schema and the format's options",
            )
        if wanted is not None and rows != wanted:
            raise DataError(
                "the file has an unexpected number of rows",
                where=str(self.files[number]),
                value=f"{rows} rows of {length} bytes",
                allowed=f"{wanted} rows",
                fix="copy the file again, or correct num_samples",
            )
        for index, start in enumerate(range(0, rows, ROWS_PER_BLOCK)):
            self.groups.append(RowGroup(number, index, start, min(ROWS_PER_BLOCK, rows - start)))

    def view(self, group: RowGroup, memory: Memory | None = None) -> RowView:
        """Return the records of a group, in place if no conversion is needed; see DatasetFiles."""
        if not self.mapped:
            return super().view(group, memory)
        keys = self._records(group)
        starts = self._record.starts()
        one_hot = [(i, starts[column.name]) for i, column in enumerate(self.schema.one_hot)]
        together = one_hot == [(i, one_hot[0][1] + i) for i in range(len(one_hot))]
        matrix = keys["keys"]
        first = one_hot[0][1] if one_hot else 0
        pieces = (
            ((0, matrix[:, first : first + len(one_hot)]),)
            if together
            else tuple((i, matrix[:, at : at + 1]) for i, at in one_hot)
        )
        stored = self._record.schema
        labels = tuple(
            (i, keys["labels"][:, at : at + 1])
            for i, at in enumerate(stored.labels.index(stored.column(one.name)) for one in self.schema.labels)
        )
        dense = tuple((to, keys["dense"][:, at]) for to, at in self._dense())
        if (group.file, group.index) not in self._checked:
            self._check(group, keys)
            self._checked.add((group.file, group.index))
        return RowView(labels, dense, pieces, None, {})

    def _dense(self) -> Iterator[tuple[int, slice]]:
        """Yield (column in the batch, columns in the record) for each dense feature."""
        places, at = {}, 0
        for column in self._record.schema.dense:
            places[column.name] = at
            at += column.dim
        to = 0
        for column in self.schema.dense:
            yield to, slice(places[column.name], places[column.name] + column.dim)
            to += column.dim

    def _records(self, group: RowGroup) -> NDArray[Any]:
        path = self.files[group.file]
        refuse_changed(path, self.stamps[group.file])
        start = group.first_row * self._record.dtype.itemsize
        return np.asarray(np.memmap(path, self._record.dtype, "r", offset=start, shape=(group.num_rows,)))

    def _check(self, group: RowGroup, records: NDArray[Any]) -> None:
        stored, starts = self._record.schema, self._record.starts()
        for label in self.schema.labels:
            index = [one.name for one in stored.labels].index(label.name)
            checks.check_labels(records["labels"][:, index], label, self.place(group, label.name))
        for column, (_, at) in zip(self.schema.dense, self._dense(), strict=True):
            values = records["dense"][:, at].reshape(-1)
            offsets = np.arange(len(records) + 1) * column.dim
            checks.check_finite(values, self.place(group, column.name), offsets)
        for feature in self.schema.one_hot:
            checks.check_ids(records["keys"][:, starts[feature.name]], feature, self.place(group, feature.name))

    def decode(self, group: RowGroup, buffer: RowBuffer, start: int, part: int) -> None:
        """Read the records of a group into a buffer; see DatasetFiles."""
        if self.mapped:
            buffer.fill(self.view(group), start, group.num_rows, part)
            return
        records = self._records(group)
        stored, starts = self._record.schema, self._record.starts()
        rows = slice(start, start + group.num_rows)
        names = [label.name for label in stored.labels]
        for i, label in enumerate(self.schema.labels):
            buffer.labels[rows, i] = records["labels"][:, names.index(label.name)]
        for to, at in self._dense():
            values = records["dense"][:, at]
            out = buffer.dense[rows, to : to + values.shape[1]]
            out[:] = _log_counts(values) if self._record.whole_dense else values
        for i, feature in enumerate(self.schema.one_hot):
            buffer.one_hot[rows, i] = records["keys"][:, starts[feature.name]]
        self._check(group, records)
        for feature in self.schema.bags:
            first = starts[feature.name]
            keys = records["keys"][:, first : first + (stored.categorical_column(feature.name).max_length or 0)]
            bag = _bag(keys, feature.dtype, self._record.padding)
            checks.check_lengths(bag.offsets, feature, self.place(group, feature.name))
            checks.check_ids(bag.values, feature, self.place(group, feature.name), bag.offsets)
            buffer.parts[feature.name][part] = bag


def _log_counts(counts: NDArray[Any]) -> NDArray[Any]:
    """Return ln(k + 1), rounded once."""
    return np.log1p(counts.astype(np.float64))


def _bag(keys: NDArray[Any], dtype: str, padding: int | None) -> Jagged:
    rows, hotness = keys.shape
    if padding is None:
        return Jagged(np.ascontiguousarray(keys).reshape(-1), np.arange(rows + 1, dtype=np.int64) * hotness)
    lengths = _cut(keys, padding)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Jagged(keys[np.arange(hotness) < lengths[:, None]], offsets)


class FixedRecordFormat(Format):
    """Common base of Raw and RawAsync."""

    @abstractmethod
    def record(self, schema: Schema) -> Record:
        """Return the record layout of these columns.

        Raises:
            SchemaError: the format cannot store a column.
        """

    def files_at(self, path: Path) -> list[Path]:
        """Return the file itself: this format has one file."""
        if not path.is_file():
            raise DataError(
                f"a data set in the format {self.format!r} is one file", where=str(path), fix="pass the file's path"
            )
        return [path]

    def open(
        self, files: Sequence[Path], stored: Schema, schema: Schema, entries: Sequence[FileEntry] | None
    ) -> DatasetFiles:
        """Compare the file's size with the length of a row and the number of rows; see Format."""
        return FixedRecordFiles(self.record(stored), files, schema, entries, getattr(self, "num_samples", None))

    def check_schema(self, schema: Schema) -> None:
        """Refuse columns that the records cannot store; see Format."""
        self.record(schema)

    def write(
        self, folder: Path, target: Path, schema: Schema, tables: Iterator[pa.Table], rows_per_file: int
    ) -> tuple[FileEntry, ...]:
        """Write one file; see Format."""
        record = self.record(schema)
        row = 0
        with (folder / DATA_FILE).open("wb") as file:
            for view, rows in checked_views(schema, tables):
                file.write(record.pack(view, rows, row).view(np.uint8).data)
                row += rows
        wanted = getattr(self, "num_samples", None)
        if wanted is not None and row != wanted:
            raise DataError("num_samples differs from the number of rows", value=wanted, allowed=str(row))
        return (FileEntry(name=DATA_FILE, rows=row, bytes=row * record.dtype.itemsize),)

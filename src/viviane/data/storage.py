"""The files of a data set, their row groups, and the decoding of a row group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from viviane.core.errors import DataError
from viviane.core.locations import AnyPath
from viviane.data.buffers import Memory
from viviane.data.checks import CellLocation
from viviane.data.packed_layout import PackedLayout
from viviane.data.plan import RowGroup
from viviane.data.row_buffer import RowBuffer, RowView
from viviane.schema import Schema

ROWS_PER_BLOCK: Final = 131_072
"""Rows of a group in formats whose files have no row groups."""
FileStamp = tuple[int, int]  # size in bytes, modification time in ns


def stamp(path: AnyPath) -> FileStamp:
    """Return a stamp that changes when a file is rewritten.

    Raises:
        DataError: the file does not exist.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            "a file of the data set cannot be opened",
            where=str(path),
            value=error.strerror or str(error),
            fix="restore the file, or open the data set again if it was replaced",
        ) from error
    return status.st_size, status.st_mtime_ns


def refuse_changed(path: AnyPath, expected: FileStamp) -> None:
    """Refuse a file that has changed since the data set was opened.

    Raises:
        DataError: the file vanished or changed.
    """
    if stamp(path) != expected:
        raise DataError("a file changed after the data set was opened", where=str(path), fix="open the data set again")


class DatasetFiles(ABC):
    """The files of one data set in one format, opened and checked as far as is cheap.

    Args:
        schema: the columns to read.
        files: in the order of their rows.
    """

    unit: ClassVar[str] = "block"
    """Name of a group of rows in messages."""
    mapped: bool = False
    """Whether `view` returns the rows of a group in place, without decoding."""

    def __init__(self, schema: Schema, files: Sequence[Path]) -> None:
        self.schema = schema
        self.layout = PackedLayout(schema)
        self.files: list[Path] = list(files)
        self.stamps: list[FileStamp] = [stamp(file) for file in self.files]
        self.groups: list[RowGroup] = []

    @abstractmethod
    def decode(self, group: RowGroup, buffer: RowBuffer, start: int, part: int) -> None:
        """Read a group into buffer rows [start, start + num_rows); its bags become part number `part`.

        Raises:
            DataError: the file vanished, changed or is damaged; a value is null, not finite, not a label, or too long.
            KeyRangeError: an id is out of range.
        """

    def view(self, group: RowGroup, memory: Memory | None = None) -> RowView:
        """Return the rows of a group as stored in the file.

        Args:
            group: the group.
            memory: memory for columns that cannot be viewed in place; None allocates new memory.

        Raises:
            DataError, KeyRangeError: see `decode`.
        """
        buffer = RowBuffer(self.layout, group.num_rows, 1, memory)
        self.decode(group, buffer, 0, 0)
        return buffer.finish()

    def place(self, group: RowGroup, column: str) -> CellLocation:
        """Return the location of a column of a group, for messages."""
        return CellLocation(str(self.files[group.file]), group.index, group.first_row, column, self.unit)

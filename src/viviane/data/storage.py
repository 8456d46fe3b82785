"""The files of a data set, the row groups in them, and how a row group is decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from viviane.core.errors import DataError
from viviane.core.locations import AnyPath
from viviane.data.block import Block, View
from viviane.data.buffers import Memory
from viviane.data.checks import CellLocation
from viviane.data.plan import RowGroup
from viviane.schema import Schema

ROWS_PER_BLOCK: Final = 131_072
"""Rows of a group in formats whose files have no groups of their own."""
FileStamp = tuple[int, int]  # size in bytes, time of change in ns


def stamp(path: AnyPath) -> FileStamp:
    """Return what changes when a file is written again.

    Raises:
        DataError: the file is not there.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            "a file of the data set cannot be opened",
            where=str(path),
            value=error.strerror or str(error),
            fix="put the file back, or open the data set again if it was replaced",
        ) from error
    return status.st_size, status.st_mtime_ns


def refuse_changed(path: AnyPath, expected: FileStamp) -> None:
    """Refuse a file that is no longer as it was when the data set was opened.

    Raises:
        DataError: the file vanished or changed.
    """
    if stamp(path) != expected:
        raise DataError("a file changed after the data set was opened", where=str(path), fix="open the data set again")


class DatasetFiles(ABC):
    """The files of one data set in one format, opened and checked as far as is cheap.

    Args:
        schema: what is read.
        files: in the order of their rows.
    """

    unit: ClassVar[str] = "block"
    """What a group of rows is called in messages."""
    mapped: bool = False
    """Whether `view` shows the rows of a group where they stand, without decoding."""

    def __init__(self, schema: Schema, files: Sequence[Path]) -> None:
        self.schema = schema
        self.files: list[Path] = list(files)
        self.stamps: list[FileStamp] = [stamp(file) for file in self.files]
        self.groups: list[RowGroup] = []

    @abstractmethod
    def decode(self, group: RowGroup, block: Block, start: int, part: int) -> None:
        """Read a group into block rows [start, start + num_rows); its bags become part number `part`.

        Raises:
            DataError: the file vanished, changed or is damaged; a value is null, not finite, no label, too long.
            KeyRangeError: an id is out of range.
        """

    def view(self, group: RowGroup, memory: Memory | None = None) -> View:
        """Return the rows of a group as they are stored in the file.

        Args:
            group: which one.
            memory: for what cannot be shown where it stands; None takes fresh memory.

        Raises:
            DataError, KeyRangeError: see `decode`.
        """
        block = Block(self.schema, group.num_rows, 1, memory)
        self.decode(group, block, 0, 0)
        return block.finish()

    def place(self, group: RowGroup, column: str) -> CellLocation:
        """Name a column of a group, for messages."""
        return CellLocation(str(self.files[group.file]), group.index, group.first_row, column, self.unit)

"""A journal: rows that were written since the last flush, each record whole or not there."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from viviane.core.errors import StoreError
from viviane.store.row_layout import Keys, RowLayout, Rows

_HEAD: Final = struct.Struct("<8sQII")  # magic, number of keys, bytes of a row, check sum of keys and rows
_MAGIC: Final = b"vvJOURN1"
_MOST_ROWS: Final = 1 << 20  # in a record


class Journal:
    """Records of keys and rows, appended before they are written to their place.

    A record that a crash cut off fails its check sum; it and everything after it are left out when the journal is
    replayed, and their `put` had not returned.

    Args:
        path: of the file.
        layout: of the rows.
    """

    def __init__(self, path: Path, layout: RowLayout) -> None:
        self._layout, self._path = layout, path
        self._file = path.open("a+b", buffering=0)

    def append(self, keys: Keys, rows: Rows) -> None:
        """Add rows."""
        for start in range(0, len(keys), _MOST_ROWS):
            own, data = keys[start : start + _MOST_ROWS], rows[start : start + _MOST_ROWS]
            total = zlib.crc32(data.data, zlib.crc32(own.data))
            head = _HEAD.pack(_MAGIC, len(own), self._layout.row_bytes, total)
            before = self._file.seek(0, os.SEEK_END)
            try:
                for part in (head, own.tobytes(), data.data.cast("B")):
                    view = memoryview(part)
                    while view:
                        view = view[self._file.write(view) :]
            except OSError as error:
                self._file.truncate(before)
                raise StoreError("a tier's journal cannot be written", where=str(self._path), value=str(error),
                                 fix="make room") from error  # fmt: skip

    def replay(self) -> Iterator[tuple[Keys, Rows]]:
        """Yield the keys and rows of all whole records, in order."""
        size, row_bytes = self._file.seek(0, os.SEEK_END), self._layout.row_bytes
        at = 0
        while at + _HEAD.size <= size:
            self._file.seek(at)
            magic, count, width, total = _HEAD.unpack(self._file.read(_HEAD.size))
            if magic != _MAGIC or width != row_bytes or count > _MOST_ROWS:
                return
            end = at + _HEAD.size + count * (8 + row_bytes)
            if end > size:
                return
            keys = np.frombuffer(_read(self._file, count * 8), np.int64)
            rows = np.frombuffer(_read(self._file, count * row_bytes), np.uint8).reshape(count, row_bytes)
            if zlib.crc32(rows.data, zlib.crc32(keys.data)) != total:
                return
            yield keys, rows
            at = end

    def clear(self) -> None:
        """Drop all records: their rows are in their places, on the disk."""
        self._file.truncate(0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _read(file: object, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            break
        view = view[count:]
    return data

"""A memory-mapped file as an array of bytes."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class MappedFile:
    """A non-empty file, memory-mapped for reading.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "bytes"
        >>> _ = path.write_bytes(b"abc")
        >>> MappedFile(path).array.tolist()
        [97, 98, 99]
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def fetch(self, start: int, end: int) -> None:
        """Advise the system to prefetch a range of bytes, if it supports that; does not block."""
        if hasattr(mmap, "MADV_WILLNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, end - first)

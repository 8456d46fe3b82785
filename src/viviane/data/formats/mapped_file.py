"""A file as an array of bytes that the operating system reads as they are touched."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class MappedFile:
    """A file that is not empty, mapped into memory to be read.

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
        """Have bytes read ahead, where the system takes such advice; does not wait."""
        if hasattr(mmap, "MADV_WILLNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, end - first)

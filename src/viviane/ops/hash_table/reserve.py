"""Memory that grows without moving: a tensor over addresses of which only the touched pages take memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.core.locations import local_path
from viviane.ops.hash_table.device_memory import DeviceRange

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""A flag of mmap: Linux then does not count pages that are never written."""
_PORTABLE_ROWS = 1 << 24
_SMALL_BYTES = 4 << 20  # this much of a table lies in ordinary pages: small tables stay small
MOST_ROWS = 2**31 - 2


def reserved(count: int, dtype: torch.dtype, when_released: Callable[[], object] | None = None) -> Tensor:
    """Return a vector of zeros on the CPU whose pages take memory only once they are written.

    Views of it stay where they are while more of it comes into use, so that tables grow without copying a row.

    Args:
        count: its length.
        dtype: of its numbers.
        when_released: is called when the last view of it is gone, before the system gets the memory back.

    Raises:
        VivianeError: the system refuses this many addresses.

    Example:
        >>> reserved(1 << 30, torch.float32)[:3]
        tensor([0., 0., 0.])
    """
    num_bytes = max(count, 1) * dtype.itemsize
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        else:
            memory = mmap.mmap(-1, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise VivianeError(
            "the system refuses the addresses for a table",
            value=f"{num_bytes:,} bytes",
            fix="set a smaller max_capacity",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes > 2 * _SMALL_BYTES:
        # Random rows miss the processor's page tables less often. A wish: a kernel without huge pages refuses it.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, _SMALL_BYTES, num_bytes - _SMALL_BYTES)
    if when_released is not None:
        weakref.finalize(memory, when_released).atexit = False
    return torch.frombuffer(memory, dtype=dtype)[:count]


class MappedFile:
    """A vector of zeros in a working file that is mapped into memory: the system keeps the pages in use there.

    The file has no name, where the system has such files not even while it is made: its disk is given back with the
    last view, or when the process ends, however that is. Disk is allocated by `allocate`, so that a full one is an
    error there; a store to a page without disk would end the process.

    Args:
        count: its length.
        dtype: of its numbers.
        folder: of the file; None: that of temporary files.

    Raises:
        VivianeError: the system has no such files, or the folder is a URL or cannot be written.

    Example:
        >>> vector = MappedFile(1 << 30, torch.float32)
        >>> vector.allocate(0, 12)
        >>> vector.tensor[:3]
        tensor([0., 0., 0.])
    """

    def __init__(self, count: int, dtype: torch.dtype, folder: str | Path | None = None) -> None:
        self._where = str(local_path(folder or tempfile.gettempdir()))
        if not hasattr(os, "posix_fallocate"):
            raise VivianeError(
                "rows of a dynamic table in a file need Linux", value=sys.platform, fix="leave memory out"
            )
        num_bytes = max(count, 1) * dtype.itemsize
        try:
            Path(self._where).mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._where, prefix="viviane-rows-", buffering=0)  # noqa: SIM115
            weakref.finalize(self, file.close).atexit = False
            self._file = file.fileno()
            os.ftruncate(self._file, num_bytes)
            memory = mmap.mmap(self._file, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise VivianeError(
                "no file for the rows of a table", where=self._where, value=f"{num_bytes:,} bytes, {error}",
                fix="set a smaller max_capacity, or another embedding_folder",
            ) from error  # fmt: skip
        if hasattr(mmap, "MADV_RANDOM"):
            memory.madvise(mmap.MADV_RANDOM)  # the neighbours of a row would push out others that are used
        self.tensor = torch.frombuffer(memory, dtype=dtype)[:count]
        """(count,); only what was allocated may be written. Views stay valid."""

    def allocate(self, first: int, last: int) -> None:
        """Give the bytes first <= i < last disk.

        Raises:
            VivianeError: the disk is full.
        """
        try:
            os.posix_fallocate(self._file, first, last - first)
        except OSError as error:
            raise VivianeError(
                "no disk is left for the rows of a table", where=self._where, value=str(error),
                fix="make room, or set max_capacity and when_full='evict'",
            ) from error  # fmt: skip


class Reserved:
    """A vector whose memory comes into use part by part, and never moves: on the CPU, in a file, or on a GPU.

    Args:
        count: its length.
        dtype: of its numbers.
        device: where kernels run that use it.
        on_device: on a GPU, how many of its first numbers lie in the GPU's memory, the others in the host's; None: all.
        file: on the CPU, how to make the file that it lies in; None: it lies in memory.

    Example:
        >>> vector = Reserved(1 << 30, torch.float32, torch.device("cpu"))
        >>> vector.commit(0, 3)
        >>> vector.tensor[:3]
        tensor([0., 0., 0.])
    """

    def __init__(
        self,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        on_device: int | None = None,
        file: Callable[[int, torch.dtype], MappedFile] | None = None,
    ) -> None:
        self._item = dtype.itemsize
        self._file = None if file is None else file(count, dtype)
        self._range: DeviceRange | None = None
        if device.type == "cuda":
            here = None if on_device is None else on_device * self._item
            self._range = DeviceRange(max(count, 1) * self._item, device, here)
            self.tensor = self._range.tensor().view(dtype)[:count]
        elif self._file is not None:
            self.tensor = self._file.tensor
        else:
            self.tensor = reserved(count, dtype)
        """(count,); only what was committed may be touched on a GPU. Views stay valid."""

    def commit(self, first: int, last: int) -> None:
        """Give the numbers first <= i < last memory; what they hold is not set on a GPU."""
        if last <= first:
            return
        if self._range is not None:
            self._range.commit(first * self._item, last * self._item)
        elif self._file is not None:
            self._file.allocate(first * self._item, last * self._item)


def rows_of_disk(row_bytes: int, index_bytes: int, folder: str | Path | None) -> int:
    """Return how many rows the free disk of a folder holds, and the memory their keys: a limit for tables in files."""
    place = local_path(folder or tempfile.gettempdir())
    while not place.exists():
        place = place.parent
    return max(1, min(shutil.disk_usage(place).free // row_bytes, rows_of_memory(index_bytes)))


def rows_of_memory(row_bytes: int, device: torch.device | None = None) -> int:
    """Return how many rows the whole memory of a device could hold: a limit for tables without one of their own."""
    if device is not None and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return min(max(memory // row_bytes, 1), MOST_ROWS)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return _PORTABLE_ROWS
    return min(max(memory // row_bytes, 1), MOST_ROWS)

"""Copies of whole rows between arrays of bytes, without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.store.threads import run_all, shares

_AHEAD = 12
_SHARED_ROWS = 1024  # of a thread, at least


@cache
def _kernels() -> tuple[Callable[..., Any], ...]:
    import numba

    from viviane.ops.native.memory import copy_bytes, int64_at, prefetch

    @numba.njit(nogil=True, cache=True)
    def gather(memory: int, row_bytes: int, places: int, count: int, out: int) -> int:
        hits = 0
        for n in range(count):
            later = int64_at(places)[min(n + _AHEAD, count - 1)]
            if later >= 0:
                for line in range(0, row_bytes, 64):
                    prefetch(memory + later * row_bytes + line)
            place = int64_at(places)[n]
            if place >= 0:
                hits += 1
                copy_bytes(out + n * row_bytes, memory + place * row_bytes, row_bytes)
        return hits

    @numba.njit(nogil=True, cache=True)
    def scatter(memory: int, row_bytes: int, places: int, count: int, rows: int) -> None:
        for n in range(count):
            copy_bytes(memory + int64_at(places)[n] * row_bytes, rows + n * row_bytes, row_bytes)

    @numba.njit(nogil=True, cache=True)
    def pack(columns: int, num_columns: int, slots: int, count: int, rows: int, row_bytes: int) -> None:
        for n in range(count):
            later = int64_at(slots)[min(n + _AHEAD, count - 1)]
            for c in range(num_columns):
                memory, size = int64_at(columns)[3 * c], int64_at(columns)[3 * c + 1]
                for line in range(0, size, 64):
                    prefetch(memory + later * size + line)
            slot, out = int64_at(slots)[n], rows + n * row_bytes
            for c in range(num_columns):
                memory, size = int64_at(columns)[3 * c], int64_at(columns)[3 * c + 1]
                copy_bytes(out + int64_at(columns)[3 * c + 2], memory + slot * size, size)

    @numba.njit(nogil=True, cache=True)
    def unpack(
        columns: int, num_columns: int, slots: int, count: int, rows: int, lines: int, row_bytes: int
    ) -> None:  # fmt: skip
        for n in range(count):
            slot, source = int64_at(slots)[n], rows + int64_at(lines)[n] * row_bytes
            for c in range(num_columns):
                memory, size = int64_at(columns)[3 * c], int64_at(columns)[3 * c + 1]
                copy_bytes(memory + slot * size, source + int64_at(columns)[3 * c + 2], size)

    return gather, scatter, pack, unpack


def gather_rows(memory: NDArray[np.uint8], places: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    """Copy rows `places` of `memory` to `out`, and return how many; those of negative places stay as they are.

    Args:
        memory: (R, bytes), bytes a multiple of 8.
        places: (n,).
        out: (n, bytes).

    Example:
        >>> out = np.zeros((2, 8), np.uint8)
        >>> gather_rows(np.ones((3, 8), np.uint8), np.array([2, -1]), out), out.sum(1).tolist()
        (1, [8, 0])
    """
    if not len(places):
        return 0
    gather = _kernels()[0]
    return int(gather(memory.ctypes.data, memory.shape[1], places.ctypes.data, len(places), out.ctypes.data))


def copy_to_rows(memory: NDArray[np.uint8], places: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
    """Copy `rows` to the rows `places` of `memory`, in order: of a repeated place the last one counts.

    Example:
        >>> memory = np.zeros((3, 8), np.uint8)
        >>> copy_to_rows(memory, np.array([2]), np.ones((1, 8), np.uint8)); memory.sum(1).tolist()
        [0, 0, 8]
    """
    if len(places):
        scatter = _kernels()[1]
        scatter(memory.ctypes.data, memory.shape[1], places.ctypes.data, len(places), rows.ctypes.data)


class ColumnMemory:
    """Rows whose columns lie in memory of their own, copied to and from whole rows by all threads.

    Args:
        columns: of each column the address of its memory, the bytes that it has of a row (an even number), and where
            it begins in a whole row. The caller keeps the memory alive.
        row_bytes: of a whole row.

    Example:
        >>> memory, rows = np.arange(6, dtype=np.float32), np.zeros((1, 8), np.uint8)
        >>> columns = ColumnMemory([(memory.ctypes.data, 4, 4)], 8)
        >>> columns.pack(np.array([5]), rows); rows.view(np.float32).tolist()
        [[0.0, 5.0]]
        >>> columns.unpack(np.array([0]), rows, np.array([0])); memory.tolist()
        [5.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """

    def __init__(self, columns: Sequence[tuple[int, int, int]], row_bytes: int) -> None:
        self._columns = np.array(columns, np.int64).reshape(-1, 3)
        self._row_bytes = row_bytes

    def pack(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Copy slots, (n,), to rows, (n, row_bytes); bytes between columns stay."""
        kernel, address, size = _kernels()[2], self._columns.ctypes.data, self._row_bytes
        run_all([
            partial(kernel, address, len(self._columns), slots.ctypes.data + 8 * low, high - low,
                    rows.ctypes.data + low * size, size)
            for low, high in shares(len(slots), _SHARED_ROWS)
        ])  # fmt: skip

    def unpack(self, slots: NDArray[np.int64], rows: NDArray[np.uint8], lines: NDArray[np.int64]) -> None:
        """Copy the rows at `lines`, (n,), of rows, (m, row_bytes), to distinct slots, (n,)."""
        kernel, address, size = _kernels()[3], self._columns.ctypes.data, self._row_bytes
        run_all([
            partial(kernel, address, len(self._columns), slots.ctypes.data + 8 * low, high - low, rows.ctypes.data,
                    lines.ctypes.data + 8 * low, size)
            for low, high in shares(len(slots), _SHARED_ROWS)
        ])  # fmt: skip

"""Copies of whole rows between arrays of bytes, without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_AHEAD = 12


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
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

    return gather, scatter


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

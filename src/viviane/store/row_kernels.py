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

    from viviane.ops.native.memory import prefetch

    @numba.njit(nogil=True, cache=True)
    def gather(memory: Any, address: int, places: Any, out: Any) -> int:
        count, words, hits = len(places), memory.shape[1], 0
        for n in range(count):
            later = places[min(n + _AHEAD, count - 1)]
            if later >= 0:
                for line in range(0, words * 8, 64):
                    prefetch(address + later * words * 8 + line)
            place = places[n]
            if place >= 0:
                hits += 1
                for j in range(words):
                    out[n, j] = memory[place, j]
        return hits

    @numba.njit(nogil=True, cache=True)
    def scatter(memory: Any, places: Any, rows: Any) -> None:
        for n in range(len(places)):
            place = places[n]
            for j in range(memory.shape[1]):
                memory[place, j] = rows[n, j]

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
    words = memory.view(np.int64)
    return int(_kernels()[0](words, words.ctypes.data, places, out.view(np.int64)))


def copy_to_rows(memory: NDArray[np.uint8], places: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
    """Copy `rows` to the rows `places` of `memory`, in order: of a repeated place the last one counts.

    Example:
        >>> memory = np.zeros((3, 8), np.uint8)
        >>> copy_to_rows(memory, np.array([2]), np.ones((1, 8), np.uint8)); memory.sum(1).tolist()
        [0, 0, 8]
    """
    if len(places):
        _kernels()[1](memory.view(np.int64), places, rows.view(np.int64))

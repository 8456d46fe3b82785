"""CRC-32C by tables, sixteen bytes a step (Kounavis and Berry 2005, "slicing")."""

# mypy: ignore-errors
# Types here are Numba's, which a checker of Python cannot see.

from __future__ import annotations

import numpy as np
from numba import njit, types

from viviane.ops.crc32c.reference import POLYNOMIAL
from viviane.ops.native.memory import int64_at, uint8_at

_SLICES = 16


def _tables() -> np.ndarray:
    """Return what each value of a byte adds to the checksum when so many bytes follow it."""
    tables = np.zeros((_SLICES, 256), np.uint32)
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = (first >> np.uint32(1)) ^ np.where(first & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    tables[0] = first
    for slice_ in range(1, _SLICES):
        before = tables[slice_ - 1]
        tables[slice_] = first[before & np.uint32(255)] ^ (before >> np.uint32(8))
    return tables


_TABLES = _tables()
_MASK = 0xFF


@njit(types.int64(types.int64, types.int64, types.int64), nogil=True, cache=True)
def update(address, count, value):
    """Return the checksum of `count` bytes at an address that follow those of `value`."""
    state = np.uint64(value) ^ np.uint64(0xFFFFFFFF)
    mask, eight = np.uint64(_MASK), np.uint64(8)
    words = int64_at(address)
    steps = count // 16
    for step in range(steps):
        low = np.uint64(words[2 * step]) ^ state
        high = np.uint64(words[2 * step + 1])
        found = np.uint32(0)
        for byte in range(8):
            found ^= _TABLES[15 - byte, low & mask]
            low >>= eight
        for byte in range(8):
            found ^= _TABLES[7 - byte, high & mask]
            high >>= eight
        state = np.uint64(found)
    rest = uint8_at(address + 16 * steps)
    for at in range(count - 16 * steps):
        state = np.uint64(_TABLES[0, (state ^ np.uint64(rest[at])) & mask]) ^ (state >> eight)
    return np.int64(state ^ np.uint64(0xFFFFFFFF))

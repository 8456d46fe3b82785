"""CRC-32C by the processor's instruction for it; by tables where it has none (Kounavis and Berry 2005, "slicing")."""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils

from viviane.ops.crc32c.reference import POLYNOMIAL
from viviane.ops.native.memory import int64_at, primitive, uint8_at

_SLICES = 16
_MASK = 0xFF
_ONES = np.uint64(0xFFFFFFFF)


def _instruction():
    """Return LLVM's name of this processor's instruction for eight bytes, and the bits of its checksum, or None."""
    features = binding.get_host_cpu_features()
    if features.get("sse4.2"):
        return "llvm.x86.sse42.crc32.64.64", 64
    if features.get("crc"):
        return "llvm.aarch64.crc32cx", 32
    return None


INSTRUCTION = _instruction()


@primitive
def _add_word(typing, state, word):
    """Return the state after eight bytes, by the processor's instruction."""

    def build(context, builder, signature, args):
        name, bits = INSTRUCTION
        word, sum_ = ir.IntType(64), ir.IntType(bits)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(sum_, [sum_, word]), name)
        state = args[0] if bits == 64 else builder.trunc(args[0], sum_)
        found = builder.call(function, [state, args[1]])
        return found if bits == 64 else builder.zext(found, word)

    return types.uint64(types.uint64, types.uint64), build


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


@njit(forceinline=True)
def _add_bytes(state, address, count):
    part = uint8_at(address)
    for at in range(count):
        state = np.uint64(_TABLES[0, (state ^ np.uint64(part[at])) & np.uint64(_MASK)]) ^ (state >> np.uint64(8))
    return state


@njit(types.int64(types.int64, types.int64, types.int64), nogil=True, cache=True)
def update_by_tables(address, count, value):
    """Return the checksum of `count` bytes at an address that follow those of `value`; sixteen bytes a step."""
    state = np.uint64(value) ^ _ONES
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
    return np.int64(_add_bytes(state, address + 16 * steps, count - 16 * steps) ^ _ONES)


def _update_by_instruction():
    @njit(types.int64(types.int64, types.int64, types.int64), nogil=True, cache=True)
    def update(address, count, value):
        state = np.uint64(value) ^ _ONES
        words = int64_at(address)
        for word in range(count // 8):
            state = _add_word(state, np.uint64(words[word]))
        return np.int64(_add_bytes(state, address + count // 8 * 8, count % 8) ^ _ONES)

    return update


update = update_by_tables if INSTRUCTION is None else _update_by_instruction()
"""The checksum of `count` bytes at an address that follow those of `value`."""

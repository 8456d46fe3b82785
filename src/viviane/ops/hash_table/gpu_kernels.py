"""Triton kernels of the index: find, claim a slot, give it back; and initial values as a function of the key."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

BLOCK: Final = 128
LAWS: Final = {"uniform": 0, "normal": 1, "constant": 2}

_golden = tl.constexpr(0x9E3779B97F4A7C15)
_line_bit = tl.constexpr(16)


@triton.jit
def mix64(x):
    """Mix 64 bits (uint64) by the finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def home(keys, lines):
    """Return the line where each key belongs: bits 16.. of mix(key), modulo a power of two."""
    return ((mix64(keys.to(tl.uint64)) >> (_line_bit + 1)).to(tl.int64)) & (lines - 1)


@triton.jit
def look(slots, state, own, line, active):
    """Return the slot (-1: none) of each key in a line, its row + 1, and how many keys passed the line."""
    j = tl.arange(0, 8)[None, :]
    found = tl.load(state + line[:, None] * 8 + j, mask=active[:, None], other=0)
    stored = tl.load(slots + line[:, None] * 4 + j, mask=active[:, None] & (j < 4), other=0)
    hit = (stored == own[:, None]) & (found != 0) & (j < 4)
    slot = tl.max(tl.where(hit, j, -1), axis=1)
    row = tl.max(tl.where(hit, found, 0), axis=1)
    passed = tl.max(tl.where(j == 4, found, 0), axis=1)
    return slot, row, passed


@triton.jit(do_not_specialize=["count", "lines"])
def find_kernel(keys, slots, state, rows, count, lines, block: tl.constexpr):
    """Put the row of each key, or -1."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0).to(tl.int64)
    line = home(own, lines)
    result = tl.full((block,), -1, tl.int64)
    steps = lines
    while (tl.max(active.to(tl.int32), axis=0) > 0) & (steps > 0):
        slot, row, passed = look(slots, state, own, line, active)
        result = tl.where(active & (slot >= 0), row.to(tl.int64) - 1, result)
        active = active & (slot < 0) & (passed > 0)
        line = (line + 1) & (lines - 1)
        steps -= 1
    tl.store(rows + n, result, mask=n < count)


@triton.jit(do_not_specialize=["count", "lines"])
def insert_kernel(keys, rows, slots, state, count, lines, block: tl.constexpr):
    """Claim the first empty slot from each key's line on; keys are distinct and absent, and there are slots enough."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0)
    row = tl.load(rows + n, mask=active, other=0).to(tl.int32) + 1
    line = home(own, lines)
    j = tl.arange(0, 8)[None, :]
    while tl.max(active.to(tl.int32), axis=0) > 0:
        found = tl.load(state + line[:, None] * 8 + j, mask=active[:, None], other=1, volatile=True)
        free = tl.min(tl.where((found == 0) & (j < 4), j, 4), axis=1)
        tries = active & (free < 4)
        # Lanes that try nothing ask for what an unused number of their line never is.
        before = tl.atomic_cas(state + line * 8 + tl.where(tries, free, 5), tl.where(tries, 0, -1), row)
        won = tries & (before == 0)
        tl.store(slots + line * 4 + free, own, mask=won)
        passes = active & (free == 4)
        tl.atomic_add(state + line * 8 + 4, 1, mask=passes)
        line = tl.where(passes, (line + 1) & (lines - 1), line)
        active = active & ~won


@triton.jit(do_not_specialize=["count", "lines"])
def erase_kernel(keys, slots, state, count, lines, block: tl.constexpr):
    """Empty the slots of keys that are distinct and there."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0)
    line = home(own, lines)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        slot, _, _ = look(slots, state, own, line, active)
        here = active & (slot >= 0)
        tl.store(state + line * 8 + slot, tl.zeros((block,), tl.int32), mask=here)
        active = active & ~here
        tl.atomic_add(state + line * 8 + 4, -1, mask=active)
        line = (line + 1) & (lines - 1)


@triton.jit(do_not_specialize=["count", "dim"])
def draw_kernel(weight, rows, keys, seed, numbers, count, dim, kind: tl.constexpr, block: tl.constexpr):
    """Draw numbers of rows, see `viviane.ops.hash_table.initial_rows`; element n is of row n / dim."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = n < count
    i = n // dim
    column = n - i * dim
    a, b = tl.load(numbers), tl.load(numbers + 1)
    start = mix64(tl.load(keys + i, mask=inside, other=0).to(tl.uint64) + tl.load(seed).to(tl.uint64) * _golden)
    x = mix64(start + (column + 1).to(tl.uint64) * _golden)
    if kind == 2:
        drawn = tl.zeros((block,), tl.float64) + a
    elif kind == 0:
        drawn = a + b * ((x >> 40).to(tl.int64).to(tl.float64) * (1.0 / 16777216.0))
    else:
        first = ((x >> 32).to(tl.int64).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        second = (x & 0xFFFFFFFF).to(tl.int64).to(tl.float64) * (1.0 / 4294967296.0)
        drawn = a + b * (tl.sqrt(-2.0 * tl.log(first)) * tl.cos(6.283185307179586 * second))
    place = tl.load(rows + i, mask=inside, other=0) * dim + column
    tl.store(weight + place, drawn.to(tl.float32).to(weight.dtype.element_ty), mask=inside)

"""Triton kernels that search an index: rows of keys, notes of their use, and copies of their vectors in one go.

A line has 64 bytes: five keys, their rows + 1 as int32 (0: none), and how many keys passed the line because it was
full. Key 0 marks an empty slot; the real key 0 is stored, as key 1, in a separate line after all others.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LINE_WORDS: Final = 8  # int64
LINE_HALVES: Final = 16  # int32
LINE_SLOTS: Final = 5

# Layout of the counters of an index, a vector of int64; those of a call in two sets, used in turn.
NUM_ROWS: Final = 0
NUM_FREE: Final = 1
NUM_KEYS: Final = 2
FIRST_SET: Final = 8
SET_SIZE: Final = 8
MISSING: Final = 0  # entries of the call that wait for a row
NEW: Final = 1  # distinct keys that got one
FAILED: Final = 2  # the first entry whose key found no room
ARRIVED: Final = 3  # programs that came to a barrier
WANTED: Final = 4  # distinct keys that ask for a row
NUM_COUNTERS: Final = FIRST_SET + 2 * SET_SIZE
NEVER: Final = 2**62

_line_bit = tl.constexpr(16)


@triton.jit
def mix64(x):
    """Mix 64 bits (uint64) by the finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def begin(keys, num_lines):
    """Return the content of a slot for each key, and the line where it belongs: bits 16.. of mix(key)."""
    home = ((mix64(keys.to(tl.uint64)) >> (_line_bit + 1)).to(tl.int64)) & (num_lines - 1)
    return tl.where(keys == 0, 1, keys), tl.where(keys == 0, num_lines, home)


@triton.jit
def look(lines, own, line, active):
    """Return the slot (-1: none) of each key in a line, its row + 1 (below one: not given yet), and who passed."""
    j = tl.arange(0, 8)[None, :]
    words = tl.load(lines + line[:, None] * 8 + j, mask=active[:, None], other=0)
    slot = tl.max(tl.where((words == own[:, None]) & (j < 5), j, -1), axis=1)
    pair = tl.sum(tl.where(j == (5 + (slot >> 1))[:, None], words, 0), axis=1)
    row = (pair >> ((slot & 1) * 32)).to(tl.int32).to(tl.int64)
    passed = tl.sum(tl.where(j == 7, words, 0), axis=1) >> 32
    return slot, row, passed


@triton.jit
def search(lines, keys, active, num_lines, otherwise):
    """Return the row of each key, int64; `otherwise` where it is absent or has no row yet."""
    own, line = begin(keys, num_lines)
    rows = tl.zeros_like(own) + otherwise
    steps = num_lines
    while (tl.max(active.to(tl.int32), axis=0) > 0) & (steps > 0):
        slot, row, passed = look(lines, own, line, active)
        rows = tl.where((slot >= 0) & (row > 0), row - 1, rows)
        active = active & (slot < 0) & (passed > 0)
        line = (line + 1) & (num_lines - 1)
        steps -= 1
    return rows


@triton.jit
def note(notes, uses, row, n, found, stamp, mark, marks: tl.constexpr):
    """Note the use of found rows: their stamp, one more use, and the last entry of this call."""
    # Rows of frequent keys are stamped once, not by each of their entries.
    before = tl.load(notes + 2 * row, mask=found, other=0)
    tl.store(notes + 2 * row, tl.zeros_like(row) + stamp, mask=found & (before != stamp))
    if uses is not None:
        tl.atomic_add(uses + row, tl.zeros_like(row) + 1, mask=found, sem="relaxed")
    if marks:
        tl.atomic_max(notes + 2 * row + 1, (tl.zeros_like(n) + mark << 32) + n, mask=found, sem="relaxed")


@triton.jit(do_not_specialize=["count", "num_lines", "stamp", "otherwise"])
def find_kernel(keys, lines, rows, notes, uses, count, num_lines, stamp, otherwise, block: tl.constexpr):
    """Put the row of each key; where `notes` are given, note its use."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0).to(tl.int64)
    row = search(lines, own, active, num_lines, otherwise)
    tl.store(rows + n, row.to(rows.dtype.element_ty), mask=active)
    if notes is not None:
        note(notes, uses, row, n, active & (row >= 0), stamp, 0, False)


@triton.jit(do_not_specialize=["count", "num_lines"])
def copy_kernel(
    keys,
    lines,
    table,
    out,
    there,
    count,
    num_lines,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Copy the vector of each key, zeros where it is absent, and return which keys are present."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0).to(tl.int64)
    row = search(lines, own, active, num_lines, -1)
    found = active & (row >= 0)
    cols = tl.arange(0, width)[None, :]
    here = active[:, None] & (cols < dim)
    vectors = tl.load(table + (row * dim)[:, None] + cols, mask=found[:, None] & (cols < dim), other=0.0)
    tl.store(out + (n * dim)[:, None] + cols, vectors, mask=here, eviction_policy="evict_first")
    tl.store(there + n, found, mask=active)


@triton.jit(do_not_specialize=["count", "num_lines"])
def erase_kernel(keys, lines, halves, count, num_lines, block: tl.constexpr):
    """Empty the slots of keys that are distinct and there."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own, line = begin(tl.load(keys + n, mask=active, other=0), num_lines)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        slot, _, _ = look(lines, own, line, active)
        here = active & (slot >= 0)
        tl.store(lines + line * 8 + slot, tl.zeros_like(own), mask=here)
        tl.store(halves + line * 16 + 10 + slot, tl.zeros((block,), tl.int32), mask=here)
        active = active & ~here
        tl.atomic_add(halves + line * 16 + 15, tl.full((block,), -1, tl.int32), mask=active, sem="relaxed")
        line = (line + 1) & (num_lines - 1)

"""Triton kernels of a row cache on a GPU: search and copy of rows in one launch, and the writer's stores.

A line of the index has 64 bytes: how many keys passed the line because it was full, then seven entries. An entry is 0,
or 31 bits of the key's hash above 32 bits with its place + 1. A place has a row and a record of 16 bytes, which one
access to memory brings: the key, its table and the time of its last use. Rows of the first places are in the GPU's
memory, the others in the host's: to kernels one range of addresses.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from viviane.ops.hash_table.gpu_kernels import mix64

LINE_WORDS: Final = 8
LINE_ENTRIES: Final = 7
RECORD_WORDS: Final = 4
TABLE_WORD: Final = 2
USE_WORD: Final = 3

_spread = tl.constexpr(0x9E3779B97F4A7C15)
_low = tl.constexpr(0xFFFFFFFF)
_record = tl.constexpr(RECORD_WORDS)
_table = tl.constexpr(TABLE_WORD)
_use = tl.constexpr(USE_WORD)


def keys_a_program(words: int) -> int:
    """Return how many keys a program looks up: as many as its registers have room for rows, at most 32.

    Example:
        >>> [keys_a_program(words) for words in (16, 128, 256, 1024)]
        [32, 32, 16, 4]
    """
    fitting: int = 4096 // triton.next_power_of_2(words)
    return max(4, min(32, fitting))


@triton.jit
def _key_of(records, place):
    """Return where the record of each place has its key."""
    return (records + place * _record).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def _search(lines, records, own, table, active, num_lines):
    """Return the place of each key of a table, -1 where it is absent."""
    bits = mix64(own.to(tl.uint64) ^ (table.to(tl.uint64) + 1) * _spread)
    tag = (bits >> 33).to(tl.int64)
    line = bits.to(tl.int64) & (num_lines - 1)
    place = tl.zeros_like(own) - 1
    j = tl.arange(0, 8)[None, :]
    steps = num_lines
    while (tl.max(active.to(tl.int32), axis=0) > 0) & (steps > 0):
        words = tl.load(lines + line[:, None] * 8 + j, mask=active[:, None], other=0)
        at = (words & _low) - 1
        here = active[:, None] & (j > 0) & (at >= 0) & ((words >> 32) == tag[:, None])
        same_key = tl.load(_key_of(records, at), mask=here, other=0) == own[:, None]
        same = here & same_key & (tl.load(records + at * _record + _table, mask=here, other=-1) == table[:, None])
        found = tl.max(tl.where(same, at, -1), axis=1)
        place = tl.where(active & (found >= 0), found, place)
        passed = tl.sum(tl.where(j == 0, words, 0), axis=1)
        active = active & (found < 0) & (passed > 0)
        line = (line + 1) & (num_lines - 1)
        steps -= 1
    return place


@triton.jit(do_not_specialize=["count", "num_lines", "now"])
def find_kernel(
    keys,
    tables,
    lines,
    records,
    memory,
    out,
    places,
    count,
    num_lines,
    stride,
    now,
    words: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Copy the rows of keys, `stride` words apart, and put the place of each, -1 where it is absent."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0)
    table = tl.load(tables + n, mask=active, other=0)
    place = _search(lines, records, own, table, active, num_lines)
    tl.store(places + n, place, mask=active)
    there = active & (place >= 0)
    cols = tl.arange(0, width)[None, :]
    here = there[:, None] & (cols < words)
    rows = tl.load(memory + (place * words)[:, None] + cols, mask=here, other=0)
    before = _last_use(records, place, there)
    tl.store(out + (n * stride)[:, None] + cols, rows, mask=here)
    _note_use(records, place, there, before, now)


@triton.jit
def _last_use(records, place, found):
    return tl.load(records + place * _record + _use, mask=found, other=0)


@triton.jit
def _note_use(records, place, found, before, now):
    """Store the time of use; most rows of a busy cache have it already."""
    tl.store(records + place * _record + _use, tl.zeros_like(before) + now, mask=found & (before != now))


@triton.jit(do_not_specialize=["count", "per_feature", "num_lines", "first", "step"])
def find_request_kernel(
    keys,
    skipped,
    found,
    time,
    starts,
    tables,
    lines,
    records,
    memory,
    out,
    count,
    per_feature,
    num_lines,
    stride,
    first,
    step,
    aligned: tl.constexpr,
    words: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Copy the rows of the keys of features to their columns, zeros where a key is absent or skipped.

    Key n belongs to feature n // per_feature and to row n % per_feature of `out`, `stride` words apart. `keys`,
    `skipped` and `found` lie in page-locked memory of the host; the time of use, and the table and the first column
    of each feature, on the device.
    """
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0)
    # 32 bits: a division of 64 bits takes a hundred instructions.
    feature = n.to(tl.int32) // per_feature
    table = tl.load(tables + feature, mask=active, other=0)
    start = tl.load(starts + feature, mask=active, other=0) if starts is not None else first + feature * step
    start = tl.multiple_of(start.to(tl.int64), [aligned])
    wanted = active if skipped is None else active & (tl.load(skipped + n, mask=active, other=1) == 0)
    place = _search(lines, records, own, table, wanted, num_lines)
    there = active & (place >= 0)
    cols = tl.arange(0, width)[None, :]
    rows = tl.load(memory + (place * words)[:, None] + cols, mask=there[:, None] & (cols < words), other=0)
    before = _last_use(records, place, there)
    out = out.to(tl.pointer_type(tl.int32), bitcast=True)
    target = out + ((n.to(tl.int32) - feature * per_feature).to(tl.int64) * stride + start)[:, None] + cols
    tl.store(target, rows, mask=active[:, None] & (cols < words))
    # Last: rows are on their way before threads wait for what these need.
    tl.store(found + n, there.to(tl.uint8), mask=active)
    _note_use(records, place, there, before, tl.load(time))


@triton.jit(do_not_specialize=["count", "now"])
def write_kernel(
    keys,
    tables,
    rows,
    sources,
    places,
    records,
    memory,
    count,
    now,
    words: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Fill spare places, which no entry names: from `rows`, or from the places `sources` of rows that move."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    place = tl.load(places + n, mask=active, other=0)
    cols = tl.arange(0, width)[None, :]
    here = active[:, None] & (cols < words)
    if sources is not None:
        source = tl.load(sources + n, mask=active, other=0)
        row = tl.load(memory + (source * words)[:, None] + cols, mask=here, other=0)
        use = _last_use(records, source, active)
    else:
        row = tl.load(rows + (n * words)[:, None] + cols, mask=here, other=0)
        use = tl.zeros((block,), tl.int32) + now
    tl.store(_key_of(records, place), tl.load(keys + n, mask=active, other=0), mask=active)
    tl.store(records + place * _record + _table, tl.load(tables + n, mask=active, other=0), mask=active)
    tl.store(records + place * _record + _use, use, mask=active)
    tl.store(memory + (place * words)[:, None] + cols, row, mask=here)


@triton.jit(do_not_specialize=["count"])
def switch_kernel(numbers, content, lines, count, block: tl.constexpr):
    """Store lines of the index: each entry is one store of 64 bits, which names the old place or the new one."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    line, word = n // 8, n % 8
    active = line < count
    number = tl.load(numbers + line, mask=active, other=0)
    tl.store(lines + number * 8 + word, tl.load(content + n, mask=active, other=0), mask=active)

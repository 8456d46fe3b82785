"""Triton kernels that find keys and give new ones rows, in order of their first entries, without sorting.

Two launches; the second ends at once where no key is new:

    take      find each key; one that is absent wins or finds a slot, by a swap of the key itself, and the slot's row is
              then the least entry of the key, below zero
    settle    in three phases, all programs waiting for each other in between:
              1  count the entries of each block that are the first of their key
              2  first entries take rows by their rank: freed ones, unused ones, those of evicted keys
              3  other entries read the row of their slot

Which slot a key wins depends on the race, its row does not.
"""

# mypy: ignore-errors
# Types here are Triton's, which a checker of Python cannot see.

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.hash_table.gpu_kernels import (
    ARRIVED,
    FAILED,
    NEVER,
    NEW,
    NUM_FREE,
    NUM_KEYS,
    NUM_ROWS,
    SET_SIZE,
    WANTED,
    begin,
    note,
    search,
)

_num_rows = tl.constexpr(NUM_ROWS)
_num_free = tl.constexpr(NUM_FREE)
_num_keys = tl.constexpr(NUM_KEYS)
_new = tl.constexpr(NEW)
_failed = tl.constexpr(FAILED)
_arrived = tl.constexpr(ARRIVED)
_wanted = tl.constexpr(WANTED)
_set_size = tl.constexpr(SET_SIZE)
_never = tl.constexpr(NEVER)
_least = tl.constexpr(-(2**31))
_nowhere = tl.constexpr(-1)
_first = tl.constexpr(2**60)  # added to the place of a key's first entry


@triton.jit
def _claim(lines, halves, keys, active, num_lines):
    """Return the place of each key's row, counted in int32; keys had none before the launch, and slots are enough."""
    own, home = begin(keys, num_lines)
    j = tl.arange(0, 8)[None, :]
    # Lanes without a key look anywhere, each elsewhere: swaps of one word wait for each other.
    line = tl.where(active, home, tl.arange(0, own.shape[0]).to(tl.int64) & (num_lines - 1))
    todo, place, won = active, home * 16 + 10, active & (home < 0)
    while tl.max(todo.to(tl.int32), axis=0) > 0:
        words = tl.load(lines + line[:, None] * 8 + j, mask=todo[:, None], other=-1, volatile=True)
        slots = j < 5
        same = tl.max(tl.where((words == own[:, None]) & slots, j, -1), axis=1)
        empty = tl.min(tl.where((words == 0) & slots, j, 5), axis=1)
        tries = todo & (same < 0) & (empty < 5)
        # Lanes that try nothing ask to replace their own key by itself.
        before = tl.atomic_cas(lines + line * 8 + tl.minimum(empty, 4), tl.where(tries, 0, own), own)
        wins = tries & (before == 0)
        here = todo & ((same >= 0) | wins | (tries & (before == own)))
        place = tl.where(here, line * 16 + 10 + tl.where(same >= 0, same, empty), place)
        won = won | wins
        passes = todo & (same < 0) & (empty == 5)
        line = tl.where(passes, (line + 1) & (num_lines - 1), line)
        todo = todo & ~here
    _pass(halves, home, place, won, 1, num_lines)
    return place


@triton.jit
def _pass(halves, home, place, active, by, num_lines):
    """Add to the number of keys that passed each line from home up to the one of a place."""
    line = home
    going = active & (line != place // 16)
    while tl.max(going.to(tl.int32), axis=0) > 0:
        tl.atomic_add(halves + line * 16 + 15, tl.zeros_like(line).to(tl.int32) + by, mask=going, sem="relaxed")
        line = tl.where(going, (line + 1) & (num_lines - 1), line)
        going = going & (line != place // 16)


@triton.jit(do_not_specialize=["count", "num_lines", "stamp", "mark"])
def take_kernel(
    keys,
    allowed,
    lines,
    halves,
    rows,
    places,
    notes,
    uses,
    call,
    next_call,
    count,
    num_lines,
    stamp,
    mark,
    marks: tl.constexpr,
    block: tl.constexpr,
):
    """Find keys and note their use; those that are absent and allowed get a slot, and their entries a place."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    own = tl.load(keys + n, mask=active, other=0).to(tl.int64)
    row = search(lines, own, active, num_lines, -1)
    tl.store(rows + n, row.to(rows.dtype.element_ty), mask=active)
    note(notes, uses, row, n, active & (row >= 0), stamp, mark, marks)
    waiting = active & (row < 0)
    if allowed is not None:
        waiting = waiting & (tl.load(allowed + n, mask=waiting, other=0) != 0)
    missing = tl.sum(waiting.to(tl.int64), axis=0)
    if missing > 0:
        tl.atomic_add(call, missing, sem="relaxed")
        place = _claim(lines, halves, own, waiting, num_lines)
        tl.atomic_min(halves + place, n.to(tl.int32) + _least, mask=waiting, sem="relaxed")
        tl.store(places + n, tl.where(waiting, place, _nowhere), mask=active)
    else:
        tl.store(places + n, tl.full((block,), _nowhere, tl.int64), mask=active)
    if tl.program_id(0) == 0:
        j = tl.arange(0, _set_size)
        tl.store(next_call + j, tl.where(j == _failed, _never, 0).to(tl.int64))


@triton.jit(do_not_specialize=["count", "num_lines"])
def put_kernel(keys, rows, lines, halves, count, num_lines, block: tl.constexpr):
    """Put distinct absent keys into slots, with rows that they have already."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    active = n < count
    place = _claim(lines, halves, tl.load(keys + n, mask=active, other=0), active, num_lines)
    row = tl.load(rows + n, mask=active, other=0).to(tl.int32)
    tl.store(halves + place, row + 1, mask=active)


@triton.jit
def _meet(call, times: tl.constexpr):
    """Wait until all programs have come here, for the first or a later time; all of them run at once."""
    tl.debug_barrier()
    arrived = tl.atomic_add(call + _arrived, 1, sem="acq_rel")
    while arrived < times * tl.num_programs(0):
        arrived = tl.atomic_add(call + _arrived, 0, sem="acq_rel")
    tl.debug_barrier()


@triton.jit
def _count_firsts(halves, places, sums, call, count, block: tl.constexpr):
    for b in range(tl.program_id(0), tl.cdiv(count, block), tl.num_programs(0)):
        n = tl.arange(0, block).to(tl.int64) + b * block
        place = tl.load(places + n, mask=n < count, other=-1)
        first = (place >= 0) & (tl.load(halves + place, mask=place >= 0, other=0) == n.to(tl.int32) + _least)
        tl.store(places + n, place + _first, mask=first)
        total = tl.sum(first.to(tl.int32), axis=0)
        tl.store(sums + b, total)
        tl.atomic_add(call + _wanted, total.to(tl.int64), sem="relaxed")


@triton.jit
def _row_of(rank, first, counters, free, victims, max_rows, limit):
    """Return the row of each rank; -1 from a limit on."""
    num_free, num_rows = tl.load(counters + _num_free), tl.load(counters + _num_rows)
    fresh = max_rows - num_rows
    given = first & (rank < limit)
    row = num_rows + rank - num_free
    row = tl.where(rank < num_free, tl.load(free + (num_free - 1 - rank), mask=given & (rank < num_free), other=0), row)
    if victims is not None:
        late = rank - num_free - fresh
        row = tl.where(late >= 0, tl.load(victims + late, mask=given & (late >= 0), other=0), row)
    return tl.where(given, row, -1)


@triton.jit
def _give_rows(
    keys, lines, halves, rows, places, sums, row_keys, notes, uses, free, victims, new_rows, new_entries, counters,
    call, count, num_lines, stamp, mark, max_rows, limit, counts: tl.constexpr, marks: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    for b in range(tl.program_id(0), tl.cdiv(count, block), tl.num_programs(0)):
        before = tl.zeros((block,), tl.int32)
        for i in range(0, b, block):
            q = i + tl.arange(0, block)
            before += tl.load(sums + q, mask=q < b, other=0)
        n = tl.arange(0, block).to(tl.int64) + b * block
        place = tl.load(places + n, mask=n < count, other=-1)
        first = place >= _first
        place = tl.where(first, place - _first, 0)
        ones = first.to(tl.int32)
        rank = (tl.sum(before, axis=0) + tl.cumsum(ones, axis=0) - ones).to(tl.int64)
        row = _row_of(rank, first, counters, free, victims, max_rows, limit)
        own = tl.load(keys + n, mask=first, other=0).to(tl.int64)
        given = first & (row >= 0)
        tl.store(halves + place, row.to(tl.int32) + 1, mask=given)
        tl.store(rows + n, row.to(rows.dtype.element_ty), mask=given)
        tl.store(row_keys + row, own, mask=given)
        tl.store(notes + 2 * row, tl.zeros_like(row) + stamp, mask=given)
        tl.store(notes + 2 * row + 1, (tl.zeros_like(n) + mark << 32) + n if marks else tl.zeros_like(n), mask=given)
        if uses is not None:
            tl.store(uses + row, tl.zeros_like(row) + counts, mask=given)
        tl.store(new_rows + rank, row, mask=given)
        tl.store(new_entries + rank, n, mask=given)
        tl.atomic_add(call + _new, tl.sum(given.to(tl.int64), axis=0), sem="relaxed")
        lost = first & (row < 0)
        if tl.max(lost.to(tl.int32), axis=0) > 0:
            _, home = begin(own, num_lines)
            _pass(halves, home, place, lost, -1, num_lines)
            tl.store(halves + place, tl.zeros((block,), tl.int32), mask=lost)
            tl.store(lines + (place // 16) * 8 + (place % 16 - 10), tl.zeros_like(own), mask=lost)
            tl.atomic_min(call + _failed, tl.min(tl.where(lost, n, count), axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def _fill_others(
    halves, rows, places, notes, uses, counters, call, count, mark, max_rows, counts: tl.constexpr, marks: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    stop = tl.minimum(tl.load(call + _failed), count)
    for b in range(tl.program_id(0), tl.cdiv(count, block), tl.num_programs(0)):
        n = tl.arange(0, block).to(tl.int64) + b * block
        place = tl.load(places + n, mask=n < stop, other=-1)
        other = (place >= 0) & (place < _first)
        row = tl.load(halves + place, mask=other, other=0).to(tl.int64) - 1
        tl.store(rows + n, row.to(rows.dtype.element_ty), mask=other)
        if (uses is not None) & counts:
            tl.atomic_add(uses + row, tl.zeros_like(row) + 1, mask=other, sem="relaxed")
        if marks:
            tl.atomic_max(notes + 2 * row + 1, (tl.zeros_like(n) + mark << 32) + n, mask=other, sem="relaxed")
    if tl.program_id(0) == 0:
        new = tl.load(call + _new)
        num_free, num_rows = tl.load(counters + _num_free), tl.load(counters + _num_rows)
        freed = tl.minimum(new, num_free)
        tl.store(counters + _num_free, num_free - freed)
        tl.store(counters + _num_rows, tl.minimum(num_rows + new - freed, max_rows))
        tl.store(counters + _num_keys, tl.load(counters + _num_keys) + new)


@triton.jit(do_not_specialize=["count", "num_lines", "stamp", "mark", "max_rows", "limit"])
def settle_kernel(
    keys,
    lines,
    halves,
    rows,
    places,
    sums,
    row_keys,
    notes,
    uses,
    free,
    victims,
    new_rows,
    new_entries,
    counters,
    call,
    count,
    num_lines,
    stamp,
    mark,
    max_rows,
    limit,
    counts: tl.constexpr,
    marks: tl.constexpr,
    start: tl.constexpr,
    end: tl.constexpr,
    block: tl.constexpr,
):
    """Run phases start to end; at most `limit` keys get rows, and those after them leave their slots again."""
    if tl.load(call) > 0:
        if start <= 1:
            _count_firsts(halves, places, sums, call, count, block)
        if (start <= 1) & (end >= 2):
            _meet(call, 1)
        if (start <= 2) & (end >= 2):
            _give_rows(
                keys, lines, halves, rows, places, sums, row_keys, notes, uses, free, victims, new_rows, new_entries,
                counters, call, count, num_lines, stamp, mark, max_rows, limit, counts, marks, block,
            )  # fmt: skip
        if (start <= 2) & (end >= 3):
            _meet(call, 3 - start)
        if end >= 3:
            _fill_others(halves, rows, places, notes, uses, counters, call, count, mark, max_rows, counts, marks, block)

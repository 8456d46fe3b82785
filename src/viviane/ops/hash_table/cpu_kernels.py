"""Kernels of the index on the CPU: find, insert, erase."""

from __future__ import annotations

from functools import cache
from typing import Final

from numba import int64, njit

from viviane.ops.hash_table.cpu_order import NONE, drop, push, put_back, sift_up, take_first
from viviane.ops.hash_table.cpu_slots import (
    ASIDE,
    BASE,
    FIRST_FREE,
    HEAP,
    KEYS,
    LINE_BYTES,
    MAX_ROWS,
    NUM_ASIDE,
    NUM_EVICTED,
    NUM_FREE,
    NUM_ROWS,
    ORDER,
    PLACES,
    SEGMENT_LINES,
    SLOTS,
    SPLIT,
    STAMPS,
    USES,
    add,
    home,
    home_among,
    slot_of,
    take_out,
)
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel
from viviane.ops.native.memory import int32_at, int64_at, prefetch, read_whole, take_ticket

COMPLETE: Final = 0
FULL: Final = 1
CROWDED: Final = 2

_AHEAD: Final = 24
_BEHIND: Final = 12


@cache
def find_kernel(key_size: int, touches: bool, counts: bool, key: str) -> Kernel:
    """Build the kernel that finds keys, and stamps their rows where it `touches`; `counts`: adds one to their uses."""

    @kernel
    def find_keys(call):  # type: ignore[no-untyped-def]
        _ = key
        head, keys, rows = int64_at(call[OPERANDS]), call[OPERANDS + 1], int64_at(call[OPERANDS + 2])
        count, stamp, blocks = call[OPERANDS + 3], call[OPERANDS + 4], call[1]
        base, split, lines = head[BASE], head[SPLIT], head[SEGMENT_LINES]
        slots_address, stamps_address, uses_address = head[SLOTS], head[STAMPS], head[USES]
        rows_of_slots, stamps = int32_at(slots_address), int64_at(stamps_address)
        block = take_ticket(call)
        while block < blocks:
            begin, end = count * block // blocks, count * (block + 1) // blocks
            for n in range(begin, min(begin + _AHEAD, end)):
                prefetch(slots_address + LINE_BYTES * home_among(base, split, lines, read_whole(keys, n, key_size)))
            # Rows are stamped some entries later, when their stamps have come from memory.
            for n in range(begin, end + (_BEHIND if touches else 0)):
                if n < end:
                    ahead = read_whole(keys, min(n + _AHEAD, end - 1), key_size)
                    prefetch(slots_address + LINE_BYTES * home_among(base, split, lines, ahead))
                    own = read_whole(keys, n, key_size)
                    place = slot_of(slots_address, lines, own, home_among(base, split, lines, own))
                    row = int64(rows_of_slots[place]) - 1 if place >= 0 else -1
                    rows[n] = row
                    if touches:
                        prefetch(stamps_address + 8 * row)
                        if counts:
                            prefetch(uses_address + 8 * row)
                if touches and n >= begin + _BEHIND:
                    row = rows[n - _BEHIND]
                    if row >= 0:
                        stamps[row] = stamp
                        if counts:
                            take_ticket(int64_at(uses_address + 8 * row))
            block = take_ticket(call)

    return find_keys


@njit
def set_score(head, row, score):  # type: ignore[no-untyped-def]
    """Give a row the caller's score; one that falls moves up in the heap at once."""
    int64_at(head[USES])[row] = score
    if head[ORDER] != NONE:
        place = int64_at(head[PLACES])[row]
        if place >= 0 and score < int64_at(head[HEAP])[2 * place]:
            sift_up(head, place, score, row)


@cache
def score_kernel(key: str) -> Kernel:
    """Build the kernel that stamps found rows and gives them the caller's scores, in order."""

    @kernel
    def score_rows(call):  # type: ignore[no-untyped-def]
        _ = key
        head, rows, scores = int64_at(call[OPERANDS]), int64_at(call[OPERANDS + 1]), int64_at(call[OPERANDS + 2])
        count, stamp = call[OPERANDS + 3], call[OPERANDS + 4]
        if take_ticket(call) == 0:
            for n in range(count):
                if rows[n] >= 0:
                    int64_at(head[STAMPS])[rows[n]] = stamp
                    set_score(head, rows[n], scores[n])

    return score_rows


@njit
def take_row(head, guard):  # type: ignore[no-untyped-def]
    """Return a row for a new key: freed, never used, or of the key that goes first; -1 where there is none."""
    if head[FIRST_FREE] >= 0:
        row = head[FIRST_FREE]
        head[FIRST_FREE] = int64_at(head[KEYS])[row]
        head[NUM_FREE] -= 1
        return row
    if head[NUM_ROWS] < head[MAX_ROWS]:
        head[NUM_ROWS] += 1
        return head[NUM_ROWS] - 1
    if head[ORDER] == NONE:
        return -1
    row = take_first(head, guard)
    if row >= 0:
        old = int64_at(head[KEYS])[row]
        take_out(head, old, slot_of(head[SLOTS], head[SEGMENT_LINES], old, home(head, old)))
        head[NUM_EVICTED] += 1
    return row


@njit
def give_back(head, row):  # type: ignore[no-untyped-def]
    """Add a row without key to the freed ones."""
    int64_at(head[STAMPS])[row] = -1
    int64_at(head[KEYS])[row] = head[FIRST_FREE]
    head[FIRST_FREE] = row
    head[NUM_FREE] += 1


@njit
def insert_key(head, key, stamp, guard):  # type: ignore[no-untyped-def]
    """Give an absent key a row, without uses yet; -1: there is none, -2: no slot."""
    row = take_row(head, guard)
    if row < 0:
        return -1
    if not add(head, key, row):
        give_back(head, row)
        return -2
    int64_at(head[KEYS])[row] = key
    int64_at(head[STAMPS])[row] = stamp
    if head[USES] != 0:
        int64_at(head[USES])[row] = 0
    if head[ORDER] != NONE:
        # It joins the heap at the end of the call, which may not take it back.
        int64_at(head[PLACES])[row] = -1
        int64_at(head[ASIDE])[head[NUM_ASIDE]] = row
        head[NUM_ASIDE] += 1
    return row


@cache
def insert_kernel(key_size: int, key: str) -> Kernel:
    """Build the kernel that gives the keys of some entries rows, one after another."""

    @kernel
    def insert_keys(call):  # type: ignore[no-untyped-def]
        _ = key
        head, keys, rows = int64_at(call[OPERANDS]), call[OPERANDS + 1], int64_at(call[OPERANDS + 2])
        entries, count = int64_at(call[OPERANDS + 3]), call[OPERANDS + 4]
        stamp, guard, scores = call[OPERANDS + 5], call[OPERANDS + 6], call[OPERANDS + 7]
        new_rows, new_entries = int64_at(call[OPERANDS + 8]), int64_at(call[OPERANDS + 9])
        result = int64_at(call[OPERANDS + 10])
        found, status = 0, COMPLETE
        count = count if take_ticket(call) == 0 else 0
        for j in range(count):
            if j + _AHEAD < count:
                prefetch(head[SLOTS] + LINE_BYTES * home(head, read_whole(keys, entries[j + _AHEAD], key_size)))
            n = entries[j]
            own = read_whole(keys, n, key_size)
            place = slot_of(head[SLOTS], head[SEGMENT_LINES], own, home(head, own))
            if place >= 0:
                row = int64(int32_at(head[SLOTS])[place]) - 1
                int64_at(head[STAMPS])[row] = stamp
            else:
                row = insert_key(head, own, stamp, guard)
                if row < 0:
                    status = FULL if row == -1 else CROWDED
                    break
                new_rows[found] = row
                new_entries[found] = n
                found += 1
            rows[n] = row
            if scores != 0:
                set_score(head, row, int64_at(scores)[n])
            elif head[USES] != 0:
                int64_at(head[USES])[row] += 1
        if head[ORDER] != NONE:
            put_back(head)
        result[0] = found
        result[1] = status

    return insert_keys


@cache
def erase_kernel(key_size: int, key: str) -> Kernel:
    """Build the kernel that takes keys out, one after another."""

    @kernel
    def erase_keys(call):  # type: ignore[no-untyped-def]
        _ = key
        head, keys, count = int64_at(call[OPERANDS]), call[OPERANDS + 1], call[OPERANDS + 2]
        count = count if take_ticket(call) == 0 else 0
        for n in range(count):
            own = read_whole(keys, n, key_size)
            place = slot_of(head[SLOTS], head[SEGMENT_LINES], own, home(head, own))
            if place >= 0:
                row = int64(int32_at(head[SLOTS])[place]) - 1
                take_out(head, own, place)
                if head[ORDER] != NONE:
                    drop(head, row)
                give_back(head, row)

    return erase_keys


@cache
def restore_kernel(key: str) -> Kernel:
    """Build the kernel that puts keys into given rows of an empty index, and frees others."""

    @kernel
    def restore_keys(call):  # type: ignore[no-untyped-def]
        _ = key
        head, keys, rows = int64_at(call[OPERANDS]), int64_at(call[OPERANDS + 1]), int64_at(call[OPERANDS + 2])
        count, free, num_free = call[OPERANDS + 3], int64_at(call[OPERANDS + 4]), call[OPERANDS + 5]
        result = int64_at(call[OPERANDS + 6])
        result[0] = COMPLETE
        if take_ticket(call) == 0:
            for n in range(count):
                if not add(head, keys[n], rows[n]):
                    result[0] = CROWDED
                    break
                int64_at(head[KEYS])[rows[n]] = keys[n]
                if head[ORDER] != NONE:
                    push(head, rows[n])
            for n in range(num_free):
                if head[ORDER] != NONE:
                    int64_at(head[PLACES])[free[n]] = -1
                give_back(head, free[n])

    return restore_keys

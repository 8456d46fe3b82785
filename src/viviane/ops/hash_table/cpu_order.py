"""Which key goes first, inside kernels: a heap with four children a node, brought up to date only where it is read.

An entry is (score, row), smallest first. A use raises a row's score but does not touch the heap: an entry's score is
a lower bound. The row on top is looked at when a victim is wanted: where its score has risen since, it moves down.
"""

# mypy: ignore-errors
# Types here are Numba's, which a checker of Python cannot see.

from __future__ import annotations

from typing import Final

from numba import njit

from viviane.ops.hash_table.cpu_slots import (
    ASIDE,
    HEAP,
    HEAP_SIZE,
    NUM_ASIDE,
    ORDER,
    PLACES,
    STAMPS,
    USES,
)
from viviane.ops.native.memory import int64_at

NONE: Final = 0
BY_STAMP: Final = 1
BY_USES: Final = 2
BY_EPOCH_AND_USES: Final = 3
ORDERS: Final = {"none": NONE, "stamp": BY_STAMP, "uses": BY_USES, "epoch_uses": BY_EPOCH_AND_USES}

_CLOCK: Final = (1 << 32) - 1


@njit(forceinline=True)
def score_of(head, row):
    """Return a row's present score."""
    order = head[ORDER]
    if order == BY_STAMP:
        return int64_at(head[STAMPS])[row]
    uses = int64_at(head[USES])[row]
    if order == BY_USES:
        return uses
    return (int64_at(head[STAMPS])[row] & ~_CLOCK) + min(uses, _CLOCK)


@njit(forceinline=True)
def _write(head, i, score, row):
    heap = int64_at(head[HEAP])
    heap[2 * i] = score
    heap[2 * i + 1] = row
    int64_at(head[PLACES])[row] = i


@njit(forceinline=True)
def _before(score, row, other, other_row):
    return score < other or (score == other and row < other_row)


@njit
def sift_up(head, i, score, row):
    """Put an entry at place i or above it."""
    heap = int64_at(head[HEAP])
    while i > 0:
        above = (i - 1) >> 2
        if not _before(score, row, heap[2 * above], heap[2 * above + 1]):
            break
        _write(head, i, heap[2 * above], heap[2 * above + 1])
        i = above
    _write(head, i, score, row)


@njit
def sift_down(head, i, score, row):
    """Put an entry at place i or below it."""
    heap, size = int64_at(head[HEAP]), head[HEAP_SIZE]
    while True:
        first = 4 * i + 1
        if first >= size:
            break
        least = first
        for child in range(first + 1, min(first + 4, size)):
            if _before(heap[2 * child], heap[2 * child + 1], heap[2 * least], heap[2 * least + 1]):
                least = child
        if not _before(heap[2 * least], heap[2 * least + 1], score, row):
            break
        _write(head, i, heap[2 * least], heap[2 * least + 1])
        i = least
    _write(head, i, score, row)


@njit
def push(head, row):
    """Add a row by its present score."""
    size = head[HEAP_SIZE]
    head[HEAP_SIZE] = size + 1
    sift_up(head, size, score_of(head, row), row)


@njit
def drop(head, row):
    """Take a row out, if it is in."""
    heap, places = int64_at(head[HEAP]), int64_at(head[PLACES])
    i = places[row]
    if i < 0:
        return
    places[row] = -1
    last = head[HEAP_SIZE] - 1
    head[HEAP_SIZE] = last
    if i < last:
        score, moved = heap[2 * last], heap[2 * last + 1]
        sift_up(head, i, score, moved)
        if places[moved] == i:
            sift_down(head, i, score, moved)


@njit
def _refresh(head):
    """Bring all scores up to date and rebuild the heap in one pass, bottom up."""
    heap, size = int64_at(head[HEAP]), head[HEAP_SIZE]
    for i in range(size):
        heap[2 * i] = score_of(head, heap[2 * i + 1])
    for i in range((size - 2) >> 2, -1, -1):
        sift_down(head, i, heap[2 * i], heap[2 * i + 1])


@njit
def take_first(head, guard):
    """Return the row that goes first among those with stamps below guard, out of the heap; -1 where there is none.

    Rows under guard are put aside until `put_back`.
    """
    heap, stamps, aside = int64_at(head[HEAP]), int64_at(head[STAMPS]), int64_at(head[ASIDE])
    stale = 0
    while head[HEAP_SIZE] > 0:
        row = heap[1]
        if stamps[row] >= guard:
            drop(head, row)
            aside[head[NUM_ASIDE]] = row
            head[NUM_ASIDE] += 1
            continue
        score = score_of(head, row)
        if score <= heap[0]:
            drop(head, row)
            return row
        stale += 1
        if stale > 64 + head[HEAP_SIZE] // 8:  # from here on one pass over all is cheaper
            _refresh(head)
            stale = 0
        else:
            sift_down(head, 0, score, row)
    return -1


@njit
def put_back(head):
    """Return to the heap what was put aside."""
    aside = int64_at(head[ASIDE])
    for i in range(head[NUM_ASIDE]):
        push(head, aside[i])
    head[NUM_ASIDE] = 0

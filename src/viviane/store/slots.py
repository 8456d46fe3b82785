"""Which rows of a table have a slot in a cache, and which row gives its slot to another: no values, only places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.core.errors import StoreError
from viviane.ops.hash_table import reserved

_NEVER = np.int64(-1)


class CacheFullError(StoreError):
    """The rows of one batch, or of those that wait for a step, do not fit into a cache."""


@dataclass(frozen=True)
class Region:
    """Rows of a table and the slots that they share.

    Args:
        name: of the table.
        first_row, num_rows: its rows.
        first_slot, num_slots: its slots.
    """

    name: str
    first_row: int
    num_rows: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True)
class Admission:
    """What changed when the rows of a batch got slots.

    Args:
        slots: (N,), of each entry; int32 or int64 as the rows were given.
        new_rows, new_slots: (M,), rows that were not there, each once, and the slots they got.
        old_rows: (M,), the rows that had these slots; -1: none.
        old_dirty: (M,), whether those had been changed since they were fetched.
    """

    slots: NDArray[Any]
    new_rows: NDArray[np.int64]
    new_slots: NDArray[np.int64]
    old_rows: NDArray[np.int64]
    old_dirty: NDArray[np.bool_]


class SlotMap:
    """The slots of a cache: a second-chance clock for each table, which passes over rows in use.

    A row in use has the stamp of a batch that is not done; such rows are never evicted. Of the others, those that were
    used since the clock's hand passed them stay for one more round (CLOCK, Corbato 1968).

    Memory: 4 bytes for each row of the tables, which take memory only where rows were used, and 18 bytes a slot.

    Args:
        regions: tables; their rows follow one another from 0, and so do their slots.
        pinned: rows behind all tables, as many slots behind all others, that are always there: rows of zeros.

    Example:
        >>> slots = SlotMap([Region("item", 0, 100, 0, 2)], pinned=2)
        >>> first = slots.admit(np.array([7, 9, 7, 100]), stamp=1, guard=1)
        >>> first.slots.tolist(), first.new_rows.tolist()
        ([0, 1, 0, 2], [7, 9])
        >>> slots.mark_dirty(np.array([0]))
        >>> later = slots.admit(np.array([8]), stamp=2, guard=2)
        >>> later.slots.tolist(), later.old_rows.tolist(), later.old_dirty.tolist()
        ([0], [7], [True])
        >>> slots.admit(np.array([1, 2, 3]), stamp=3, guard=3)
        Traceback (most recent call last):
        ...
        viviane.store.slots.CacheFullError: the rows of a batch do not fit into the cache of their table
          where:   table 'item'
          value:   '3 distinct rows in use at once'
          allowed: 2 rows
          do:      give the table more memory, or use a smaller batch
    """

    def __init__(self, regions: Sequence[Region], *, pinned: int) -> None:
        self.regions = list(regions)
        rows = sum(one.num_rows for one in self.regions)
        self.num_slots = sum(one.num_slots for one in self.regions)
        self.slot_of: NDArray[np.int32] = reserved(rows + pinned, torch.int32).numpy()
        """Of each row its slot + 1, or 0."""
        every = self.num_slots + pinned
        self.owner = np.full(every, -1, np.int64)
        """Of each slot its row, or -1."""
        self.dirty = np.zeros(every, np.bool_)
        self._stamps = np.full(every, _NEVER)
        self._used = np.zeros(every, np.bool_)
        self._bounds = np.array([one.first_row for one in self.regions] + [rows], np.int64)
        self._first = np.array([one.first_slot for one in self.regions], np.int64)
        self._count = np.array([one.num_slots for one in self.regions], np.int64)
        self._hands = np.zeros(len(self.regions), np.int64)
        self.slot_of[rows:] = np.arange(self.num_slots + 1, every + 1)
        self.owner[self.num_slots :] = np.arange(rows, rows + pinned)
        self.hits = self.misses = 0

    def admit(self, rows: NDArray[Any], stamp: int, guard: int) -> Admission:
        """Give all rows of a batch slots.

        Args:
            rows: (N,), int32 or int64, repeated as they are.
            stamp: of the batch; rises from call to call.
            guard: rows with this stamp or a later one are in use.

        Raises:
            CacheFullError: too many rows are in use; nothing has changed.
        """
        absent = int(_kernels()[0](rows, self.slot_of, self._stamps, self._used, stamp))
        slots = np.empty(len(rows), rows.dtype)
        new_rows, new_slots, old_rows = (np.empty(absent, np.int64) for _ in range(3))
        old_dirty = np.empty(absent, np.bool_)
        found, failed = _kernels()[1](
            rows, slots, self.slot_of, self.owner, self.dirty, self._stamps, self._used, self._bounds, self._first,
            self._count, self._hands, stamp, guard, new_rows, new_slots, old_rows, old_dirty,
        )  # fmt: skip
        if failed >= 0:
            self._take_back(new_rows[:found], new_slots[:found], old_rows[:found], old_dirty[:found])
            raise self._full(rows, self.regions[failed], guard)
        self.misses += found
        self.hits += len(rows) - absent
        return Admission(slots, new_rows[:found], new_slots[:found], old_rows[:found], old_dirty[:found])

    def _take_back(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], old: NDArray[np.int64], dirty: NDArray[np.bool_]
    ) -> None:
        self.slot_of[rows] = 0
        self.owner[slots], self.dirty[slots], self._stamps[slots] = old, dirty, _NEVER
        there = old >= 0
        self.slot_of[old[there]] = slots[there] + 1

    def _full(self, rows: NDArray[Any], region: Region, guard: int) -> CacheFullError:
        first, stop = region.first_row, region.first_row + region.num_rows
        inside = slice(region.first_slot, region.first_slot + region.num_slots)
        in_use = self.owner[inside][(self._stamps[inside] >= guard) & (self.owner[inside] >= 0)]
        own = rows[(rows >= first) & (rows < stop)]
        needed = len(np.union1d(own, in_use))
        return CacheFullError(
            "the rows of a batch do not fit into the cache of their table", where=f"table {region.name!r}",
            value=f"{needed:,} distinct rows in use at once", allowed=f"{region.num_slots:,} rows",
            fix="give the table more memory, or use a smaller batch",
        )  # fmt: skip

    def mark_dirty(self, slots: NDArray[Any]) -> None:
        """Note that slots were changed."""
        self.dirty[slots] = True

    def resident(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which rows from `first` on and below `stop` have slots, and these."""
        slots = self.slot_of[first:stop]
        rows = np.flatnonzero(slots)
        return rows + first, slots[rows].astype(np.int64) - 1

    def dirty_slots(self) -> NDArray[np.int64]:
        """Return the slots that were changed since they were fetched or written back, by rising row."""
        slots = np.flatnonzero(self.dirty[: self.num_slots])
        return slots[np.argsort(self.owner[slots])]

    def clear(self, region: Region) -> None:
        """Let all rows of a table go, without writing anything back."""
        inside = slice(region.first_slot, region.first_slot + region.num_slots)
        rows = self.owner[inside]
        self.slot_of[rows[rows >= 0]] = 0
        self.owner[inside], self.dirty[inside], self._stamps[inside], self._used[inside] = -1, False, _NEVER, False


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    import numba

    @numba.njit(nogil=True, cache=True)
    def note_use(rows: Any, slot_of: Any, stamps: Any, used: Any, stamp: int) -> int:
        absent = 0
        for n in range(len(rows)):
            slot = slot_of[rows[n]]
            if slot > 0:
                stamps[slot - 1] = stamp
                used[slot - 1] = True
            else:
                absent += 1
        return absent

    @numba.njit(nogil=True, cache=True)
    def free_slot(owner: Any, stamps: Any, used: Any, first: int, count: int, hand: int, guard: int) -> int:
        for step in range(2 * count + 1):
            slot = first + (hand + step) % count
            if owner[slot] < 0:
                return step
            if stamps[slot] < guard:
                if not used[slot]:
                    return step
                used[slot] = False
        return -1

    @numba.njit(nogil=True, cache=True)
    def place(
        rows: Any, slots: Any, slot_of: Any, owner: Any, dirty: Any, stamps: Any, used: Any, bounds: Any, firsts: Any,
        counts: Any, hands: Any, stamp: int, guard: int, new_rows: Any, new_slots: Any, old_rows: Any, old_dirty: Any,
    ) -> tuple[int, int]:  # fmt: skip
        found = 0
        for n in range(len(rows)):
            row = rows[n]
            slot = slot_of[row]
            if slot == 0:
                t = np.searchsorted(bounds, row, side="right") - 1
                first, count, hand = firsts[t], counts[t], hands[t]
                step = free_slot(owner, stamps, used, first, count, hand, guard)
                if step < 0:
                    return found, t
                at = (hand + step) % count
                hands[t] = (at + 1) % count
                slot = first + at + 1
                old = owner[slot - 1]
                new_rows[found], new_slots[found], old_rows[found] = row, slot - 1, old
                old_dirty[found] = old >= 0 and dirty[slot - 1]
                if old >= 0:
                    slot_of[old] = 0
                owner[slot - 1], stamps[slot - 1] = row, stamp
                dirty[slot - 1], used[slot - 1] = False, True
                slot_of[row] = slot
                found += 1
            slots[n] = slot - 1
        return found, -1

    return note_use, place

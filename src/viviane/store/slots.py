"""Which rows of a table have a slot in a cache, and which row gives its slot to another: no values, only places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.core.errors import StoreError
from viviane.ops.hash_table import reserved
from viviane.store.threads import run_all, shares

_TICKETS: Final = 1 << 30
_SMALL: Final = 32_768  # entries: fewer are not shared out among threads


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
        new_rows, new_slots: (M,), rows that were not there, each once, rising, and the slots they got.
        old_rows: (M,), the rows that had these slots, rising within a table where they have to be written; -1: none.
        old_dirty: (M,), whether those had been changed since they were fetched.
        left: (M,), the ticket of the admission that wrote the new row back when it took its slot; 0: none did.
        ticket: of this admission.
    """

    slots: NDArray[Any]
    new_rows: NDArray[np.int64]
    new_slots: NDArray[np.int64]
    old_rows: NDArray[np.int64]
    old_dirty: NDArray[np.bool_]
    left: NDArray[np.int64]
    ticket: int


class SlotMap:
    """The slots of a cache: a second-chance clock for each table, which passes over rows in use.

    A row in use has the stamp of a batch that is not done; such rows are never evicted. Of the others, those that were
    used since the clock's hand passed them stay for one more round (CLOCK, Corbato 1968).

    New rows and the rows they replace are paired in the order of their addresses, so that tiers read and write in
    address order. Threads share large batches by entries, then by tables; the result does not depend on their number.

    Memory: 4 bytes for each row of the tables, which take memory only where rows were used, and 17 bytes a slot.

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
        """Of each row its slot + 1; 0 or less: it has none."""
        every = self.num_slots + pinned
        self.owner = np.full(every, -1, np.int64)
        """Of each slot its row, or -1."""
        self.dirty = np.zeros(every, np.bool_)
        self._marks = np.zeros(every + 1, np.int64)[1:]
        self._bounds = np.array([one.first_row for one in self.regions] + [rows + pinned], np.int64)
        self._hands = [0] * len(self.regions)
        self._absent = np.empty(0, np.int64)
        self._room = np.empty((5, 0), np.int64)
        self.slot_of[rows:] = np.arange(self.num_slots + 1, every + 1)
        self.owner[self.num_slots :] = np.arange(rows, rows + pinned)
        self.hits = self.misses = 0

    def admit(self, rows: NDArray[Any], stamp: int, guard: int) -> Admission:
        """Give all rows of a batch slots.

        Args:
            rows: (N,), int32 or int64, repeated as they are.
            stamp: of the batch; rises from call to call, from 1.
            guard: rows with this stamp or a later one are in use.

        Raises:
            CacheFullError: too many rows are in use; no row has lost its slot.
        """
        if len(self._absent) < len(rows):
            self._absent = np.empty(len(rows), np.int64)
        slots = np.empty(len(rows), rows.dtype)
        pieces = self._find(rows, slots, 2 * stamp + 1)
        chosen = self._choose(rows, pieces, stamp, guard)
        ticket = 1 + stamp % _TICKETS
        total = sum(chosen)
        new_rows, new_slots, old_rows, left = (np.empty(total, np.int64) for _ in range(4))
        old_dirty = np.empty(total, np.bool_)
        start, jobs = 0, []
        for (region, own, room), count in zip(self._rooms(pieces), chosen, strict=True):
            part = slice(start, start + count)
            start += count
            if count:
                jobs.append(partial(
                    _kernels().give_slots, rows, self._absent, own, region.first_row, slots, self.slot_of, self.owner,
                    self.dirty, room, ticket, new_rows[part], new_slots[part], old_rows[part], old_dirty[part],
                    left[part],
                ))  # fmt: skip
        self._run(jobs, total)
        self.misses += total
        self.hits += len(rows) - int(pieces[:, :, 1].sum())
        return Admission(slots, new_rows, new_slots, old_rows, old_dirty, left, ticket)

    def _find(self, rows: NDArray[Any], slots: NDArray[Any], mark: int) -> NDArray[np.int64]:
        """Write the slots that rows have; return (T, P, 2): start and length of each table's absent entries."""
        parts = shares(len(rows), _SMALL)
        counts = np.empty((len(parts), len(self.regions)), np.int64)
        run_all([
            partial(
                _kernels().find_slots, rows, slots, self.slot_of.ctypes.data, self._marks.ctypes.data, low, high, mark,
                self._bounds, self._absent, counts[i],
            )
            for i, (low, high) in enumerate(parts)
        ])  # fmt: skip
        lows = np.array([low for low, _ in parts], np.int64)[:, None]
        starts = lows + np.cumsum(counts, axis=1) - counts
        return np.ascontiguousarray(np.stack([starts, counts], axis=-1).transpose(1, 0, 2))

    def _rooms(self, pieces: NDArray[np.int64]) -> list[tuple[Region, NDArray[np.int64], NDArray[np.int64]]]:
        """Return for each table its pieces and its part of the working memory."""
        sizes = pieces[:, :, 1].sum(1).tolist()
        if self._room.shape[1] < sum(sizes):
            self._room = np.empty((5, 2 * sum(sizes)), np.int64)
        stops = np.cumsum(sizes).tolist()
        return [
            (region, pieces[t], self._room[:, stops[t] - sizes[t] : stops[t]]) for t, region in enumerate(self.regions)
        ]

    def _choose(self, rows: NDArray[Any], pieces: NDArray[np.int64], stamp: int, guard: int) -> list[int]:
        """Choose the slots that each table's new rows get, and return how many."""
        found: list[tuple[int, int]] = [(0, hand) for hand in self._hands]

        def choose(t: int, region: Region, own: NDArray[np.int64], room: NDArray[np.int64]) -> None:
            found[t] = _kernels().choose_slots(
                rows, self._absent, own, region.first_row, region.num_rows, region.first_slot, region.num_slots,
                self._hands[t], guard, 2 * stamp + 1, self.owner, self._marks, room,
            )  # fmt: skip

        rooms = self._rooms(pieces)
        jobs = [partial(choose, t, *one) for t, one in enumerate(rooms) if one[2].shape[1]]
        self._run(jobs, sum(one[2].shape[1] for one in rooms))
        failed = next((t for t, (count, _) in enumerate(found) if count < 0), None)
        if failed is not None:
            for (count, _), (_, _, room) in zip(found, rooms, strict=True):
                self._marks[room[1, : max(count, 0)]] = 0
            raise self._full(rows, self.regions[failed], guard)
        self._hands = [hand for _, hand in found]
        return [count for count, _ in found]

    def _run(self, jobs: Sequence[partial[Any]], entries: int) -> None:
        if entries < _SMALL:
            for job in jobs:
                job()
        elif jobs:
            run_all(jobs)

    def _full(self, rows: NDArray[Any], region: Region, guard: int) -> CacheFullError:
        first, stop = region.first_row, region.first_row + region.num_rows
        inside = slice(region.first_slot, region.first_slot + region.num_slots)
        in_use = self.owner[inside][(self._marks[inside] >= 2 * guard) & (self.owner[inside] >= 0)]
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

    def release(self, slots: NDArray[Any]) -> None:
        """Let rows go, without writing anything back."""
        self.slot_of[self.owner[slots]] = 0
        self.owner[slots], self.dirty[slots], self._marks[slots] = -1, False, 0

    def put_back(self, admission: Admission) -> None:
        """Undo an admission whose evicted rows could not be written: rows that it evicted have their slots again."""
        slots, old = admission.new_slots, admission.old_rows
        self.slot_of[admission.new_rows] = 0
        self.owner[slots], self.dirty[slots] = old, admission.old_dirty
        self._marks[slots] = np.where(old >= 0, 2, 0)
        there = old >= 0
        self.slot_of[old[there]] = slots[there] + 1

    def resident(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which rows from `first` on and below `stop` have slots, and these."""
        slots = self.slot_of[first:stop]
        rows = np.flatnonzero(slots > 0)
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
        self.owner[inside], self.dirty[inside], self._marks[inside] = -1, False, 0


def _kernels() -> Any:
    from viviane.store import cpu_slot_kernels

    return cpu_slot_kernels

"""Some rows of a tier in host memory: what was used recently is read and written there, the rest below."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, StoreError
from viviane.ops.hash_table import reserved
from viviane.store.row_kernels import copy_to_rows, gather_rows
from viviane.store.row_layout import Found, Keys, Rows
from viviane.store.slots import Region, SlotMap
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.threads import run_all, shares
from viviane.store.tier import SCAN_ROWS, Tier, check_batch_rows

_SHARE_ROWS = 1024


class HostCacheTier:
    """Up to `max_rows` rows of a tier of contiguous ids in host memory; `put` writes to memory, eviction writes below.

    A row that is in memory is read and written there only: what the tier below holds of it may be older, until `flush`
    or eviction writes the row down. Evicted rows are written in the order of their ids.

    Args:
        below: the tier that holds the other rows; closed with this one.
        num_ids: ids lie below this.
        max_rows: rows in memory; at least 1.
        name: in messages.

    Example:
        >>> from viviane.store.row_layout import Column, RowLayout
        >>> from viviane.store.array import ArrayTier
        >>> layout = RowLayout([Column("weight", "float32", 2)])
        >>> tier = HostCacheTier(ArrayTier(layout, 100), 100, max_rows=2)
        >>> tier.put(np.array([1, 2, 3]), np.ones((3, 8), np.uint8))
        >>> out = tier.layout.zeros(3)
        >>> tier.fetch(np.array([3, 2, 1]), out).tolist(), tier.below.stats().rows_written > 0
        ([True, True, True], True)
    """

    def __init__(self, below: Tier, num_ids: int, *, max_rows: int, name: str = "host") -> None:
        if max_rows < 1:
            raise ConfigError("a host cache needs room for a row", value=max_rows, allowed="at least 1")
        self.below, self.name, self.layout, self.num_ids = below, name, below.layout, num_ids
        self.max_rows = min(max_rows, num_ids)
        self._slots = SlotMap([Region(name, 0, num_ids, 0, self.max_rows)], pinned=0)
        self._memory = reserved(self.max_rows * self.layout.row_bytes, torch.uint8).numpy().reshape(self.max_rows, -1)
        self._counter = StatsCounter(self.layout.row_bytes)
        self._lock = threading.RLock()
        self._clock = 0
        self._is_open = True

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError("the tier is closed", where=f"tier {self.name!r}")

    def _inside(self, keys: Keys) -> Found:
        return (keys >= 0) & (keys < self.num_ids)

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`. Rows from below stay in memory."""
        self.layout.check_out(keys, out)
        found = self._inside(keys)
        with self._counter.fetching() as count, self._lock:
            self._check_open()
            places = np.flatnonzero(found)
            for low in range(0, len(places), self.max_rows):
                part = places[low : low + self.max_rows]
                self._fetch_some(keys, out, part, found)
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits)
        return found

    def _fetch_some(self, keys: Keys, out: Rows, places: NDArray[np.int64], found: Found) -> None:
        """Copy the rows of some entries, no more than fit into memory, and say which were found."""
        wanted = np.ascontiguousarray(keys[places])
        slots, new_rows, new_slots = self._admit(wanted)
        if len(new_rows):
            rows = self.layout.empty(len(new_rows))
            try:
                there = self.below.fetch(new_rows, rows)
            except BaseException:
                self._slots.release(new_slots)
                raise
            self._copy_in(new_slots[there], rows[there])
            self._slots.release(new_slots[~there])
            slots = np.where(self._slots.slot_of[wanted] > 0, slots, -1)
        found[places] = slots >= 0
        copied = self.layout.empty(len(places))
        parts = shares(len(places), _SHARE_ROWS)
        run_all([partial(gather_rows, self._memory, slots[low:high], copied[low:high]) for low, high in parts])
        there = slots >= 0
        if there.all():
            out[places] = copied
        else:
            out[places[there]] = copied[there]

    def _admit(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Give keys slots and write below what these held; return all slots, and the new keys with theirs."""
        self._clock += 1
        admission = self._slots.admit(keys, self._clock, self._clock)
        dirty = admission.old_dirty
        if dirty.any():
            rows = self.layout.empty(int(dirty.sum()))
            gather_rows(self._memory, admission.new_slots[dirty], rows)
            try:
                self.below.put(admission.old_rows[dirty], rows)
            except BaseException:  # the rows are in memory still: let their keys have them again
                self._slots.put_back(admission)
                raise
        return admission.slots, admission.new_rows, admission.new_slots

    def _copy_in(self, slots: NDArray[np.int64], rows: Rows) -> None:
        copy_to_rows(self._memory, slots, np.ascontiguousarray(rows))

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows; see `viviane.store.Tier`.

        Raises:
            StoreError: an id lies outside the tier, or the tier below cannot be written to.
        """
        self.layout.check_rows(keys, rows)
        inside = self._inside(keys)
        if not inside.all():
            raise StoreError(
                "an id lies outside the tier", where=f"tier {self.name!r}", value=int(keys[~inside][0]),
                allowed=f"0 <= id < {self.num_ids}",
            )  # fmt: skip
        with self._counter.putting(len(keys)), self._lock:
            self._check_open()
            for low in range(0, len(keys), self.max_rows):
                part = slice(low, low + self.max_rows)
                slots, _, _ = self._admit(keys[part])
                self._copy_in(slots, rows[part])
                self._slots.mark_dirty(slots)

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there."""
        self.layout.check_keys(keys)
        with self._lock:
            self._check_open()
            own = np.unique(keys[self._inside(keys)])
            slots = self._slots.slot_of[own].astype(np.int64) - 1
            only_here = own[slots >= 0]
            absent_below = ~self.below.fetch(only_here, self.layout.empty(len(only_here)))
            self._slots.release(slots[slots >= 0])
            count = self.below.erase(own) + int(np.count_nonzero(absent_below))
        self._counter.erased(count)
        return count

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows, as the tier below does; rows in memory are written down first."""
        check_batch_rows(batch_rows)
        self._write_down()
        yield from self.below.scan(batch_rows)

    def _write_down(self) -> None:
        with self._lock:
            self._check_open()
            dirty = self._slots.dirty_slots()
            for low in range(0, len(dirty), SCAN_ROWS):
                slots = dirty[low : low + SCAN_ROWS]
                rows = self.layout.empty(len(slots))
                gather_rows(self._memory, slots, rows)
                self.below.put(self._slots.owner[slots], rows)
                self._slots.dirty[slots] = False

    def num_rows(self) -> int:
        """Return the number of keys; rows in memory are written down first."""
        self._write_down()
        return self.below.num_rows()

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened; the tier below counts for itself."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Write all changed rows down, and return when the tier below has them where they survive a crash."""
        self._write_down()
        self.below.flush()

    def close(self) -> None:
        """Write all changed rows down, and close the tier below."""
        with self._lock:
            if not self._is_open:
                return
            self._write_down()
            self._is_open = False
            self._memory = np.empty((0, self.layout.row_bytes), np.uint8)
            self.below.close()

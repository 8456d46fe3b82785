"""The cache tier: a bounded copy of rows in this process, read without a lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from viviane.ops.row_cache import RowCache
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows


class CacheTier:
    """Rows in host memory, at most `capacity`; others make room for new ones.

    Args:
        layout: of the rows.
        capacity: most rows; a cache as large as its table holds all of it.
        eviction: "oldest" removes the rows that were not read for longest, "random" any.
        resolution: the share of `capacity` that is left when room is made.
        name: in statistics.

    Example:
        >>> from viviane.store import Column
        >>> cache = CacheTier(RowLayout([Column("weight", "float32", 2)]), capacity=100)
        >>> cache.put(np.array([5]), np.ones((1, 8), np.uint8))
        >>> cache.num_rows()
        1
    """

    def __init__(
        self,
        layout: RowLayout,
        capacity: int,
        *,
        eviction: Literal["oldest", "random"] = "oldest",
        resolution: float = 0.98,
        name: str = "cache",
    ) -> None:
        self.name, self.layout = name, layout
        self._rows = RowCache(capacity, layout.row_bytes, eviction=eviction, resolution=resolution)
        self._stats = StatsCounter(layout.row_bytes)

    @property
    def capacity(self) -> int:
        """Most rows."""
        return self._rows.capacity

    @property
    def num_evicted(self) -> int:
        """Rows that made room for others."""
        return self._rows.num_evicted

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out`, whose rows may lie apart, and return which were found."""
        with self._stats.fetching() as count:
            found = self._rows.find(keys, out)
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits)
        return found

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows."""
        self.layout.check_rows(keys, rows)
        with self._stats.putting(len(keys)):
            self._rows.insert(keys, rows)

    def replace(self, keys: Keys, rows: Rows) -> None:
        """Replace the rows of those keys that are there."""
        self.layout.check_rows(keys, rows)
        with self._stats.putting(len(keys)):
            self._rows.insert(keys, rows, only="present")

    def fill(self, keys: Keys, rows: Rows) -> None:
        """Insert rows of those keys that are not there."""
        self.layout.check_rows(keys, rows)
        with self._stats.putting(len(keys)):
            self._rows.insert(keys, rows, only="absent")

    def erase(self, keys: Keys) -> int:
        """Remove keys, and return how many were there."""
        removed = self._rows.erase(keys)
        self._stats.erased(removed)
        return removed

    def evict_older(self, seconds: float) -> int:
        """Remove rows that were not read for that long."""
        return self._rows.evict_older(seconds)

    def keys(self) -> Keys:
        """Return the keys that are there, those read last first."""
        return self._rows.keys()

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows."""
        check_batch_rows(batch_rows)
        return self._rows.scan(batch_rows)

    def num_rows(self) -> int:
        """Return the number of keys."""
        return len(self._rows)

    def stats(self) -> TierStats:
        """Return what was counted."""
        return self._stats.snapshot()

    def flush(self) -> None:
        """Nothing survives a crash here."""

    def close(self) -> None:
        """Forget all rows."""
        self._rows.clear()

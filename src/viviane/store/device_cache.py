"""The cache tier on a GPU: rows of one table in a cache that several tables share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.ops.row_cache import DeviceRowCache
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows


class DeviceCacheTier:
    """A table's rows in a GPU's memory, and in page-locked memory of the host behind it.

    Lookups for the GPU call the cache itself, for all tables at once (`DeviceRowCache.find_for`), and count what they
    found with `fetched`; `fetch` copies rows to the host.

    Args:
        layout: of the rows.
        cache: which other tables' tiers share.
        table: the table's number in it.
        capacity: the table's share, for filling the cache before the first request.
        name: in statistics.
    """

    def __init__(
        self, layout: RowLayout, cache: DeviceRowCache, table: int, capacity: int, *, name: str = "device cache"
    ) -> None:
        self.name, self.layout, self.cache, self.table, self.capacity = name, layout, cache, table, capacity
        self._stats = StatsCounter(layout.row_bytes)

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out`, in the host's memory, and return which were found."""
        with self._stats.fetching() as count:
            found = self.cache.find(keys, out, self.table)
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits)
        return found

    def fetched(self, seconds: float, hits: int, misses: int) -> None:
        """Count the table's part of a lookup on the GPU."""
        self._stats.fetched(seconds, hits, misses)

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows."""
        self._insert(keys, rows, "all")

    def replace(self, keys: Keys, rows: Rows) -> None:
        """Replace the rows of those keys that are there."""
        self._insert(keys, rows, "present")

    def fill(self, keys: Keys, rows: Rows) -> None:
        """Insert rows of those keys that are not there."""
        self._insert(keys, rows, "absent")

    def _insert(self, keys: Keys, rows: Rows, only: Any) -> None:
        self.layout.check_rows(keys, rows)
        with self._stats.putting(len(keys)):
            self.cache.insert(keys, rows, self.table, only=only)

    def erase(self, keys: Keys) -> int:
        """Remove keys, and return how many were there."""
        removed = self.cache.erase(keys, self.table)
        self._stats.erased(removed)
        return removed

    notes_use = False

    def touch(self, keys: Keys) -> None:
        """Nothing to do: lookups note the time of use on the GPU."""

    def make_room(self) -> int:
        """Let rows of the host's memory that are used more change places with some of the GPU's; none is removed."""
        self.cache.promote()
        return 0

    def keys(self) -> Keys:
        """Return the keys that are there, those read last first."""
        return self.cache.keys(self.table)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, NDArray[np.uint8]]]:
        """Yield all keys with their rows."""
        check_batch_rows(batch_rows)
        return self.cache.scan(batch_rows, self.table)

    def num_rows(self) -> int:
        """Return the number of keys."""
        return len(self.keys())

    def stats(self) -> TierStats:
        """Return what was counted."""
        return self._stats.snapshot()

    def flush(self) -> None:
        """Nothing survives a crash here."""

    def close(self) -> None:
        """Forget all rows of the table."""
        self.cache.clear(self.table)

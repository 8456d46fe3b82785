"""Rows in this process's memory: an open-addressing index of keys, and rows that never move."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import torch

from viviane.core.errors import StoreError
from viviane.ops.hash_table import make_index, reserved, rows_of_memory, stamp_of
from viviane.store.row_kernels import copy_to_rows, gather_rows
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows


class HostTier:
    """Rows in host memory; nothing survives the process.

    An index of 64-byte lines with five keys each (`viviane.ops.hash_table`) gives each key a row number. Rows lie one
    after another in memory that the system gives as it is written, so growth moves no row. An erased key's row goes to
    the next new key.

    Memory: rows, about 20 to 27 bytes of index a key, and 16 bytes a row for its key and time of use.

    Args:
        layout: of the rows.
        max_rows: most rows at a time; None: as many as the machine's memory could hold.
        name: in messages.

    Example:
        >>> from viviane.store.row_layout import Column
        >>> tier = HostTier(RowLayout([Column("weight", "float32", 2)]))
        >>> tier.put(np.array([7, -1]), np.ones((2, 8), np.uint8))
        >>> out = tier.layout.zeros(2)
        >>> tier.fetch(np.array([-1, 8]), out).tolist(), out.sum(1).tolist(), tier.num_rows()
        ([True, False], [8, 0], 2)
    """

    def __init__(self, layout: RowLayout, *, max_rows: int | None = None, name: str = "host") -> None:
        self.name = name
        self.layout = layout
        self.max_rows = max_rows or rows_of_memory(layout.row_bytes)
        self._index = make_index(self.max_rows)
        self._memory = reserved(self.max_rows * layout.row_bytes, torch.uint8).numpy().reshape(self.max_rows, -1)
        self._counter = StatsCounter(layout.row_bytes)
        self._lock = threading.RLock()
        self._clock = 0
        self._is_open = True

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError("the tier is closed", where=f"tier {self.name!r}")

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        with self._counter.fetching() as count, self._lock:
            self._check_open()
            places = self._index.find(torch.from_numpy(keys)).numpy()
            hits = gather_rows(self._memory, places, out)
            count(hits=hits, misses=len(keys) - hits)
        return places >= 0

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows; see `viviane.store.Tier`.

        Raises:
            StoreError: the tier has no room; nothing is changed then.
        """
        self.layout.check_rows(keys, rows)
        with self._counter.putting(len(keys)), self._lock:
            self._check_open()
            copy_to_rows(self._memory, self._places(keys), rows)

    def _places(self, keys: Keys) -> Keys:
        """Return the rows of keys; new ones get rows."""
        self._clock += 1
        given = torch.from_numpy(keys)
        places = self._index.find(given)
        absent = (places < 0).nonzero().squeeze(1)
        if len(absent):
            added = self._index.insert(given, places, absent, stamp_of(0, min(self._clock, 2**32 - 1)))
            if not added.complete:
                self._index.erase(given[added.entries])
                raise StoreError(
                    "the tier is full", where=f"tier {self.name!r}",
                    value=f"{len(self._index):,} rows, and {len(torch.unique(given[absent])):,} more",
                    allowed=f"{self.max_rows:,} rows of {self.layout.row_bytes} bytes", fix="give it more memory",
                )  # fmt: skip
        return places.numpy()

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there."""
        self.layout.check_keys(keys)
        with self._lock:
            self._check_open()
            count = self._index.erase(torch.from_numpy(keys))
        self._counter.erased(count)
        return count

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows, in order of their places."""
        check_batch_rows(batch_rows)
        start = 0
        while True:
            with self._lock:
                self._check_open()
                stop = min(start + batch_rows, self._index.num_rows)
                used = np.flatnonzero(self._index.stamps[start:stop].numpy() >= 0) + start
                keys, rows = self._index.keys.numpy()[used], self._memory[used]
            if len(keys):
                yield keys, rows
            if stop <= start or stop == self._index.num_rows:
                return
            start = stop

    def num_rows(self) -> int:
        """Return the number of keys."""
        with self._lock:
            return len(self._index)

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows, keys, times of use and index in use."""
        used = self._index.num_rows
        return used * (self.layout.row_bytes + 16) + self._index.num_slots // 5 * 64

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Do nothing: memory does not survive a crash."""

    def close(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self._is_open = False
            self._memory = np.empty((0, self.layout.row_bytes), np.uint8)

"""Rows of contiguous ids in this process's memory, without an index."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import torch

from viviane.core.errors import ConfigError, StoreError
from viviane.ops.hash_table import reserved
from viviane.store.row_kernels import copy_to_rows, gather_rows
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.threads import run_all, shares
from viviane.store.tier import SCAN_ROWS, check_batch_rows

_SHARE_BYTES: Final = 256 << 10  # rows that one thread copies at least


class ArrayTier:
    """Rows of ids 0 <= id < num_ids in host memory, without an index; nothing survives the process.

    Row i stands at byte i * row_bytes, unless `place_by` says where. Threads share large calls. Keys that rise are read
    and written in the order of addresses.

    Memory: row_bytes + 1 an id, which the system gives as rows are written.

    Args:
        layout: of the rows.
        num_ids: ids lie below this.
        name: in messages.
        memory: (num_ids * row_bytes,), uint8, zeros, that others may read and write between calls; None: its own.

    Attributes:
        memory: (num_ids, row_bytes), the rows.

    Example:
        >>> from viviane.store.row_layout import Column
        >>> tier = ArrayTier(RowLayout([Column("weight", "float32", 2)]), 100)
        >>> tier.put(np.array([99, 3]), np.ones((2, 8), np.uint8))
        >>> out = tier.layout.zeros(2)
        >>> tier.fetch(np.array([3, 4]), out).tolist(), out.sum(1).tolist(), tier.num_rows()
        ([True, False], [8, 0], 2)
    """

    def __init__(
        self, layout: RowLayout, num_ids: int, *, name: str = "host", memory: torch.Tensor | None = None
    ) -> None:
        if num_ids < 1:
            raise ConfigError("an array tier needs at least one id", value=num_ids)
        self.name, self.layout, self.num_ids = name, layout, num_ids
        memory = reserved(num_ids * layout.row_bytes, torch.uint8) if memory is None else memory
        self.memory: Rows = memory.numpy().reshape(num_ids, layout.row_bytes)
        self._present = reserved(num_ids, torch.bool).numpy()
        self._counter = StatsCounter(layout.row_bytes)
        self._lock = threading.RLock()
        self._is_open = True
        self._place: Callable[[Keys], Keys] | None = None

    def place_by(self, place: Callable[[Keys], Keys]) -> None:
        """Let another keep the rows in an order of its own.

        Args:
            place: returns for ids, all inside the tier, which rows of `memory` are theirs; no two ids share one.
        """
        with self._lock:
            self._place = place

    def _placed(self, keys: Keys) -> Keys:
        return keys if self._place is None else self._place(keys)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError("the tier is closed", where=f"tier {self.name!r}")

    def _known(self, keys: Keys) -> Found:
        """Return which keys have rows; ids outside of the tier have none."""
        if not len(keys) or (int(keys.min()) >= 0 and int(keys.max()) < self.num_ids):
            return self._present[keys]
        inside = (keys >= 0) & (keys < self.num_ids)
        found: Found = inside & self._present[np.where(inside, keys, 0)]
        return found

    def _shares(self, keys: Keys) -> list[tuple[int, int]]:
        return shares(len(keys), max(1, _SHARE_BYTES // self.layout.row_bytes))

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        with self._counter.fetching() as count, self._lock:
            self._check_open()
            found = self._known(keys)
            if found.all():
                places = self._placed(keys)
            else:
                places = np.full(len(keys), -1)
                places[found] = self._placed(keys[found])
            parts = self._shares(keys)
            run_all([partial(gather_rows, self.memory, places[low:high], out[low:high]) for low, high in parts])
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits)
        return found

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows; see `viviane.store.Tier`.

        Raises:
            StoreError: an id lies outside the tier; nothing is changed then.
        """
        self.layout.check_rows(keys, rows)
        outside = (keys < 0) | (keys >= self.num_ids)
        if outside.any():
            raise StoreError(
                "an id lies outside the tier", where=f"tier {self.name!r}", value=int(keys[outside][0]),
                allowed=f"0 <= id < {self.num_ids}",
            )  # fmt: skip
        with self._counter.putting(len(keys)), self._lock:
            self._check_open()
            # Of a repeated key the last row counts, which threads would not know.
            parts = self._shares(keys) if bool((keys[1:] > keys[:-1]).all()) else [(0, len(keys))]
            places = self._placed(keys)
            run_all([partial(copy_to_rows, self.memory, places[low:high], rows[low:high]) for low, high in parts])
            self._present[keys] = True

    def note_written(self, first: int, stop: int) -> None:
        """Note that ids first <= id < stop have rows, which were written to `memory`."""
        with self._lock:
            self._present[first:stop] = True

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there."""
        self.layout.check_keys(keys)
        with self._lock:
            self._check_open()
            there = np.unique(keys[self._known(keys)])
            self._present[there] = False
        self._counter.erased(len(there))
        return len(there)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows, by rising key."""
        check_batch_rows(batch_rows)
        for start in range(0, self.num_ids, batch_rows):
            with self._lock:
                self._check_open()
                keys = np.flatnonzero(self._present[start : start + batch_rows]) + start
                rows = self.memory[self._placed(keys)]
            if len(keys):
                yield keys, rows

    def num_rows(self) -> int:
        """Return the number of keys."""
        with self._lock:
            return int(np.count_nonzero(self._present))

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Do nothing: memory does not survive a crash."""

    def close(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self._is_open = False
            self.memory = np.empty((0, self.layout.row_bytes), np.uint8)
            self._present = np.empty(0, np.bool_)

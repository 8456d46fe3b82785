"""Upper bounds of the counters of an index on a GPU, kept by the host without waiting for the device.

A call adds at most as many keys as it has entries. When the bounds come near the capacity, the counters are copied to
the host asynchronously; the host waits for the copy only if its bounds would exceed the capacity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from viviane.ops.hash_table.gpu_kernels import NUM_FREE, NUM_KEYS, NUM_ROWS

_CALLS_AHEAD = 4  # the counters are copied when this many more calls could reach the capacity


class CounterBounds:
    """Bounds of an index's counters.

    Args:
        counters: of the index, on its device.
    """

    def __init__(self, counters: Tensor) -> None:
        self._counters = counters
        cuda = counters.is_cuda
        self._seen = torch.zeros(len(counters), dtype=torch.int64, pin_memory=cuda)
        self._event: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self._on_its_way = False
        self._since = 0
        self._most, self._open = 0, False  # the least limit asked about since the last call was added
        self._committed = 0
        self.most_keys = 0
        """No more keys than this."""
        self.most_rows = 0
        """No more rows allocated than this."""

    def read(self) -> list[int]:
        """Wait for the counters, and return them."""
        found: list[int] = self._counters.tolist()
        self._on_its_way = False
        self.most_keys, self.most_rows = found[NUM_KEYS], found[NUM_ROWS]
        return found

    def add(self, count: int) -> None:
        """Count a call that adds at most `count` keys; copy the counters when the bounds come near the capacity."""
        self._news()
        self._open = False
        self.most_keys += count
        self.most_rows += count
        self._since += count
        if self._event is None or self._on_its_way or not self._short(count):
            return
        self._seen.copy_(self._counters, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self._counters.device))
        self._on_its_way, self._since = True, 0

    def _short(self, count: int) -> bool:
        ahead = _CALLS_AHEAD * count
        return self.most_keys + ahead > self._most or self.most_rows + ahead > self._committed

    def _news(self) -> None:
        if self._event is not None and self._on_its_way and self._event.query():
            self._on_its_way = False
            self.most_keys = min(self.most_keys, int(self._seen[NUM_KEYS]) + self._since)
            self.most_rows = min(self.most_rows, int(self._seen[NUM_ROWS]) + self._since)

    def takes(self, count: int, most: int) -> bool:
        """Whether `count` more keys leave no more than `most`; waits for the counters where the bound says no."""
        self._news()
        self._most = min(self._most, most) if self._open else most
        self._open = True
        if self.most_keys + count <= most:
            return True
        self.read()
        return self.most_keys + count <= most

    def fit_rows(self, count: int, committed: int) -> None:
        """Wait for the counters where `count` more rows could go beyond those that have memory; NEVER: all have."""
        self._news()
        self._committed = committed
        if self.most_rows + count > committed:
            self.read()

    def free_rows(self) -> int:
        """Wait for the number of freed rows."""
        return self.read()[NUM_FREE]

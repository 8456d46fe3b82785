"""The rows of a table outside of a cache: in its tier, or as they begin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.embedding.config import TableConfig
from viviane.embedding.initializers import fill_keys
from viviane.ops.row_update import initial_state
from viviane.store import RowLayout, Tier
from viviane.store.threads import run_all, shares
from viviane.store.tier import Exchange, Exchanging

MakeTier: TypeAlias = Callable[[TableConfig, RowLayout], Tier]
"""Opens the tier of a table."""
_SHARED_ROWS: Final = 4096
"""Of a thread, at least: with smaller shares threads wait for the interpreter's lock."""


class TierRows:
    """Rows of one table by key, with their optimizer state.

    Args:
        table: its settings.
        layout: of the rows.
        rule: its optimizer; None: it is not trained.
        seed: of the initial values.
        tier: where rows are that were trained and have no slot; None: the table is whole in its slots.
    """

    def __init__(
        self, table: TableConfig, layout: RowLayout, rule: AnyOptimizer | None, seed: int, tier: Tier | None
    ) -> None:
        self._table, self._layout, self._seed, self._tier = table, layout, seed, tier
        self._state = initial_state(rule)
        self.fill: Callable[[Tensor, Tensor], None] | None = None
        """Writes the weights of keys as they begin, (K, D); None: as the table's settings say."""

    def fetch(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Write the rows of keys, (n, row_bytes), out of the tier, or as they begin."""
        found = np.zeros(len(keys), np.bool_) if self._tier is None else self._tier.fetch(keys, rows)
        if not found.all():
            fresh = np.flatnonzero(~found)
            rows[fresh] = self.beginning(keys[fresh])

    def put(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Write changed rows to the tier."""
        assert self._tier is not None
        self._tier.put(keys, rows)

    def exchange(self, change: Exchange) -> NDArray[np.bool_] | None:
        """Write and read the rows of a pass where the tier can do both together, see `Exchanging`; None elsewhere."""
        return self._tier.exchange(change) if isinstance(self._tier, Exchanging) else None

    def beginning(self, keys: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return rows as they are before the first step."""
        rows = self._layout.zeros(len(keys))
        if self.fill is not None:
            weight = torch.empty(len(keys), self._table.dim, dtype=self._table.torch_dtype)
            self.fill(weight, torch.from_numpy(keys))
            self._layout.column(rows, "weight")[:] = bytes_of(weight)
        else:
            parts = shares(len(keys), _SHARED_ROWS)
            run_all([partial(self._fill, keys[low:high], rows[low:high]) for low, high in parts])
        for state, value in self._state.items():
            column = self._layout.column(rows, state)
            column[:] = np.full(column.shape[1] // 4, value, np.float32).view(np.uint8)
        return rows

    def beginning_on(self, device: torch.device, first: int, stop: int) -> Tensor:
        """Return rows first <= row < stop as they are before the first step, (n, row_bytes), uint8, on a device."""
        if self.fill is not None:
            return torch.from_numpy(self.beginning(np.arange(first, stop))).to(device)
        rows = torch.zeros(stop - first, self._layout.row_bytes, dtype=torch.uint8, device=device)
        weight = torch.empty(stop - first, self._table.dim, dtype=self._table.torch_dtype, device=device)
        fill_keys(weight, torch.arange(first, stop, device=device), self._table, self._seed)
        self._column(rows, "weight")[:] = weight.view(torch.uint8)
        for state, value in self._state.items():
            column = self._column(rows, state)
            column[:] = torch.full((column.shape[1] // 4,), value, device=device).view(torch.uint8)
        return rows

    def _column(self, rows: Tensor, name: str) -> Tensor:
        start = self._layout.offsets[name]
        return rows[:, start : start + self._layout[name].num_bytes]

    def _fill(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        weight = torch.empty(len(keys), self._table.dim, dtype=self._table.torch_dtype)
        fill_keys(weight, torch.from_numpy(keys), self._table, self._seed)
        self._layout.column(rows, "weight")[:] = bytes_of(weight)


def bytes_of(values: Tensor) -> NDArray[np.uint8]:
    """Return numbers (n, ...) as bytes (n, bytes).

    Example:
        >>> bytes_of(torch.ones(2, 1, dtype=torch.float16)).tolist()
        [[0, 60], [0, 60]]
    """
    found: NDArray[np.uint8] = values.contiguous().view(len(values), -1).view(torch.uint8).numpy()
    return found

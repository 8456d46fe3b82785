"""The memory of a dynamic table: rows and optimizer state that grow in place, and rows for keys that have none.

Shapes: C the present capacity, D the width. The whole memory has M rows that keys may own, then two of zeros (as in
`viviane.ops.key_rows`: nothing here, and a missing value that counts), then room for initial values of absent keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.ops.hash_table import initial_rows, reserved, rows_of_memory
from viviane.ops.row_update import initial_state, state_shape

_INDEX_BYTES = 64  # of a key: slots, stamp, uses, heap


class DynamicRows:
    """Values of a dynamic table.

    Args:
        table: its settings.
        rule: its optimizer, or None.
        seed: of initial values.
    """

    def __init__(self, table: DynamicTableConfig, rule: AnyOptimizer | None, seed: int) -> None:
        self.table = table
        self.rule = rule
        self.seed = seed
        one = torch.zeros(1, table.dim)
        self._initial = initial_state(rule)
        numbers = sum(torch.Size(state_shape(name, one, rule)).numel() for name in self._initial if rule is not None)
        row_bytes = table.dim * table.torch_dtype.itemsize
        self.max_rows = table.max_capacity or rows_of_memory(row_bytes + 4 * numbers + _INDEX_BYTES)
        self.null_row = self.max_rows
        self._guests = self.max_rows + 2
        self._row_bytes = row_bytes
        self.reset()

    def reset(self) -> None:
        """Begin with fresh memory."""
        table, dim = self.table, self.table.dim
        whole = self._guests + rows_of_memory(self._row_bytes)
        self.storage = reserved(whole * dim, table.torch_dtype).view(whole, dim)
        """(M + 2 + room, D): what lookups read."""
        self._states: dict[str, Tensor] = {}
        for name in self._initial:
            assert self.rule is not None
            shape = state_shape(name, torch.empty(self.max_rows, 0), self.rule)
            shape = (self.max_rows,) if len(shape) == 1 else (self.max_rows, dim)
            self._states[name] = reserved(torch.Size(shape).numel(), torch.float32).view(shape)
        self._show(table.initial_capacity)

    def _show(self, capacity: int) -> None:
        self.weight = self.storage[:capacity]
        """(C, D): rows that keys may own at present."""
        self.state = {name: part[:capacity] for name, part in self._states.items()}
        """Optimizer state by name, each (C, D) or (C,)."""

    @property
    def capacity(self) -> int:
        """C."""
        return len(self.weight)

    def grow(self, num_rows: int) -> None:
        """Make room for at least `num_rows` rows; nothing moves, and earlier views stay valid."""
        if num_rows > self.capacity:
            self._show(min(self.max_rows, max(num_rows, 2 * self.capacity)))

    def begin(self, rows: Tensor, keys: Tensor) -> None:
        """Give rows the initial values of their new keys, and fresh optimizer state."""
        initial_rows(self.weight, rows, keys, *self.table.law, self.seed)
        self.begin_state(rows)

    def begin_state(self, rows: Tensor) -> None:
        """Give rows fresh optimizer state."""
        for name, part in self.state.items():
            part.index_fill_(0, rows, self._initial[name])

    def stand_in(self, rows: Tensor, keys: Tensor) -> None:
        """Point absent keys (row -1) to what they read, in place; valid until the next call."""
        absent = (rows < 0).nonzero().squeeze(1)
        if not len(absent):
            return
        if self.table.absent == "zero":
            rows[absent] = self.null_row + 1
            return
        guests = torch.arange(self._guests, self._guests + len(absent))
        initial_rows(self.storage, guests, keys[absent], *self.table.law, self.seed)
        rows[absent] = guests

    def memory_bytes(self, num_rows: int) -> int:
        """Bytes of rows and state in use."""
        parts = [self.storage, *self._states.values()]
        return sum(num_rows * part[:1].numel() * part.element_size() for part in parts)

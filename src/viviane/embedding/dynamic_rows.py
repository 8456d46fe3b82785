"""The memory of a dynamic table: rows and optimizer state that grow in place, and rows for keys that have none.

Shapes: C the present capacity, D the width. The whole memory has M rows that keys may own, then two of zeros (as in
`viviane.ops.key_rows`: nothing here, and a missing value that counts), then room for initial values of absent keys.

On a GPU as on the CPU all of it is a range of addresses of which only the used part takes memory: growth copies
nothing, and needs no room beside what the grown table takes.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.ops.hash_table import Added, MappedFile, Reserved, initial_rows, rows_of_disk, rows_of_memory, start_rows
from viviane.ops.row_update import initial_state, state_row_bytes, state_shape

_INDEX_BYTES = 64  # of a key: slots, stamp, uses, heap
_COPIED_BYTES: Final = 8 << 20  # at once, of rows in a file
_READERS: Final = 16
_LEAST_SHARE: Final = 64  # rows of one of them


class DynamicRows:
    """Values of a dynamic table.

    Args:
        table: its settings.
        rule: its optimizer, or None.
        seed: of initial values.
        device: where lookups run.
        folder: of the files of rows, with memory="file"; None: that of temporary files.
    """

    def __init__(
        self,
        table: DynamicTableConfig,
        rule: AnyOptimizer | None,
        seed: int,
        device: torch.device | None = None,
        folder: Path | None = None,
    ) -> None:
        self.table = table
        self.rule = rule
        self.seed = seed
        self.device = device or torch.device("cpu")
        if self.device.type not in ("cpu", "cuda"):
            raise ConfigError("dynamic tables know no such device", value=str(device), allowed="cpu, cuda")
        self._make_file = partial(MappedFile, folder=folder) if table.memory == "file" else None
        if table.memory == "file" and self.device.type != "cpu":
            raise ConfigError(
                "memory='file' is for tables on the CPU", where=f"table {table.name!r}", value=str(self.device),
                fix="set memory='host' or 'split', or train with device='cpu'",
            )  # fmt: skip
        if table.memory in ("host", "split") and self.device.type != "cuda":
            raise ConfigError(
                f"memory={table.memory!r} is for tables on a GPU", where=f"table {table.name!r}",
                fix="build the table with device='cuda', or leave memory out",
            )  # fmt: skip
        self._initial = initial_state(rule)
        row_bytes = table.dim * table.torch_dtype.itemsize
        memory = self.device if table.memory == "device" else None
        whole_bytes = row_bytes + state_row_bytes(rule, table.dim)
        self.max_rows = table.max_capacity or (
            rows_of_memory(whole_bytes + _INDEX_BYTES, memory) if self._make_file is None
            else rows_of_disk(whole_bytes, _INDEX_BYTES, folder)
        )  # fmt: skip
        self.null_row = self.max_rows
        self._guests = self.max_rows + 2
        self._most_guests = rows_of_memory(row_bytes, memory)
        self.reset()

    def reset(self) -> None:
        """Begin with fresh memory."""
        table, dim = self.table, self.table.dim
        self._parts: list[tuple[Reserved, int]] = []
        whole = self._guests + self._most_guests
        self.storage = self._reserve(whole, dim, table.torch_dtype).view(whole, dim)
        """(M + 2 + room, D): what lookups read."""
        self._parts[0][0].commit(self.null_row * dim, self._guests * dim)
        if self.device.type == "cuda":
            self.storage[self.null_row : self._guests].zero_()
        self._states: dict[str, Tensor] = {}
        for name in self._initial:
            assert self.rule is not None
            shape = state_shape(name, torch.empty(self.max_rows, 0), self.rule)
            width = 1 if len(shape) == 1 else dim
            part = self._reserve(self.max_rows, width, torch.float32)
            self._states[name] = part if len(shape) == 1 else part.view(self.max_rows, dim)
        self._show(table.initial_capacity)

    def _reserve(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows = {"device": None, "file": None, "host": 0, "split": self.table.device_rows}[self.table.memory]
        on_device = None if rows is None else rows * width
        part = Reserved(num_rows * width, dtype, self.device, on_device, self._make_file)
        self._parts.append((part, width))
        return part.tensor

    def _show(self, capacity: int) -> None:
        for part, width in self._parts:
            part.commit(0, capacity * width)
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

    def make_room(self, num_rows: int, more: int) -> None:
        """Take disk for rows that keys may get, before they do: where there is none, no key is left without its row."""
        if self._make_file is not None:
            self.grow(min(self.max_rows, num_rows + more))

    def read_ahead(self, rows: Tensor, with_state: bool) -> None:
        """Read the pages of rows in a file in many threads, so that the disk has many requests at a time.

        What follows reads one row after another, and would wait for the disk at each. One byte of each page is enough,
        and costs little where the pages are in memory. Rows that no key has read a page for nothing.
        """
        if self._make_file is None:
            return
        views = []
        for part in (self.weight, *(self.state.values() if with_state else ())):
            row_bytes = part[:1].numel() * part.element_size()
            views.append((part.view(-1).view(torch.uint8).numpy(), row_bytes, page_offsets(row_bytes, mmap.PAGESIZE)))

        def touch(own: NDArray[np.int64]) -> None:
            for values, row_bytes, offsets in views:
                first = own * row_bytes
                for offset in offsets:
                    values.take(first + offset, mode="clip")

        wanted = rows.numpy().astype(np.int64, copy=False)
        shares = np.array_split(wanted, max(1, min(_READERS, len(wanted) // _LEAST_SHARE)))
        list(_readers().map(touch, shares))

    def begin(self, rows: Tensor, keys: Tensor) -> None:
        """Give rows the initial values of their new keys, and fresh optimizer state."""
        initial_rows(self.weight, rows, keys, *self.table.law, self.seed)
        self.begin_state(rows)

    def begin_added(self, keys: Tensor, added: Added, draw: bool) -> None:
        """Do the same for the rows that a call added, on the device; `draw`: values too."""
        start_rows(self.weight if draw else None, self.state, self._initial, keys, added, self.table.law, self.seed)

    def begin_state(self, rows: Tensor) -> None:
        """Give rows fresh optimizer state."""
        for name, part in self.state.items():
            part.index_fill_(0, rows, self._initial[name])

    def copied(self, part: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of some rows of `weight` or of a state; in a file again, piece by piece, with memory="file"."""
        if self._make_file is None:
            return part[rows]
        width = part[:1].numel()
        file = self._make_file(len(rows) * width, part.dtype)
        if len(rows):
            file.allocate(0, len(rows) * width * part.element_size())
        copy = file.tensor.view(len(rows), *part.shape[1:])
        step = max(1, _COPIED_BYTES // (width * part.element_size()))
        for first in range(0, len(rows), step):
            copy[first : first + step] = part[rows[first : first + step]]
        return copy

    def fill_absent(self, rows: Tensor, keys: Tensor) -> None:
        """Point absent keys (row -1) to what they read, in place; valid until the next call."""
        if self.table.absent == "zero":
            rows.masked_fill_(rows < 0, self.null_row + 1)
            return
        absent = (rows < 0).nonzero().squeeze(1)
        if not len(absent):
            return
        first, last = self._guests, self._guests + len(absent)
        self._parts[0][0].commit(first * self.table.dim, last * self.table.dim)
        absent_rows = torch.arange(first, last, device=rows.device)
        initial_rows(self.storage, absent_rows, keys[absent], *self.table.law, self.seed)
        rows[absent] = absent_rows

    def memory_bytes(self, num_rows: int) -> int:
        """Bytes of rows and state in use."""
        parts = [self.storage, *self._states.values()]
        return sum(num_rows * part[:1].numel() * part.element_size() for part in parts)


def page_offsets(row_bytes: int, page_bytes: int) -> list[int]:
    """Return bytes of a row, as offsets from its first, that lie in all pages it has, wherever it begins.

    Example:
        >>> page_offsets(256, 4096), page_offsets(8192, 4096)
        ([0, 255], [0, 4096, 8191])
    """
    return [*range(0, row_bytes - 1, page_bytes), row_bytes - 1]


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, "viviane-rows")

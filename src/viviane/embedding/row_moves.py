"""How rows come into the slots of a cache and leave them: the contract, and the form for slots in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.store import RowLayout
from viviane.store.row_mover import RowMover
from viviane.store.slots import Admission, Region

PIECE_ROWS: Final = 65_536
"""Rows that a thread has in hand at a time."""

Arrival = Callable[[], None]
"""Lets lookups wait for the rows of a batch."""


@dataclass(frozen=True)
class TableRows:
    """A table as moves see it.

    Args:
        region: its rows and slots.
        fetch: writes the rows of keys, (n,), into bytes (n, row_bytes): out of its tier, or as they begin.
        put: writes changed rows of keys to its tier.
    """

    region: Region
    fetch: Callable[[NDArray[np.int64], NDArray[np.uint8]], None]
    put: Callable[[NDArray[np.int64], NDArray[np.uint8]], None]


@dataclass(frozen=True)
class SlotGroup:
    """Neighbouring tables of one optimizer: their rows have one layout, and their slots lie in the same tensors.

    Args:
        layout: of a row with its state.
        columns: by name, the slots of all these tables: (slots, D), or (slots,).
        first_slot: the slot of the tensors' first row.
        tables: in the order of their rows.
    """

    layout: RowLayout
    columns: Mapping[str, Tensor]
    first_slot: int
    tables: tuple[TableRows, ...]

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of these tables, and the first behind them."""
        last = self.tables[-1].region
        return self.tables[0].region.first_row, last.first_row + last.num_rows

    @property
    def has_gaps(self) -> bool:
        """Whether rows have bytes that are in no column, which are zero."""
        return sum(one.num_bytes for one in self.layout.columns) < self.layout.row_bytes

    def pack(self, slots: Tensor, packed: Tensor) -> None:
        """Copy slots, (n,), counted from `first_slot`, to bytes (n, row_bytes) on their device."""
        for name, part in self.columns.items():
            self._view(packed, name, part).copy_(part.index_select(0, slots))

    def unpack(self, slots: Tensor, packed: Tensor) -> None:
        """Copy bytes (n, row_bytes) to distinct slots, (n,)."""
        for name, part in self.columns.items():
            part.index_copy_(0, slots, self._view(packed, name, part))

    def _view(self, packed: Tensor, name: str, part: Tensor) -> Tensor:
        """Return a column of packed rows as numbers of the column's type and shape."""
        start = self.layout.offsets[name]
        found = packed[:, start : start + self.layout[name].num_bytes].view(part.dtype)
        return found if part.dim() == 2 else found[:, 0]


class RowMoves(Protocol):
    """Moves rows between slots and tiers, in the order of `start`."""

    row_ids: Tensor
    """(slots,), int64: of each slot its row, beside the slots; right for rows that have arrived."""

    def start(self, admission: Admission) -> None:
        """Begin to write back what changed slots held, and to fetch what they are to hold.

        Work that the caller gave to the device before it reads and writes the old rows.
        """

    def arrival(self) -> Arrival:
        """Return what lets lookups wait for all rows that were on their way when it was asked for."""

    def finish(self) -> None:
        """Wait until no row is on its way."""


class HostMoves:
    """Slots in host memory: a thread moves rows straight between slots and tiers, while the caller computes.

    Args:
        groups: the tables.
        owner: (slots,), of each slot its row, kept by the map of slots.
    """

    def __init__(self, groups: tuple[SlotGroup, ...], owner: NDArray[np.int64]) -> None:
        self._groups = groups
        self.row_ids = torch.from_numpy(owner)
        self._mover = RowMover("row mover")
        self._last = 0

    def start(self, admission: Admission) -> None:
        """Queue the moves of a batch."""
        groups = self._groups  # the thread does not keep this object
        self._last = self._mover.start(lambda: _move(groups, admission))

    def arrival(self) -> Arrival:
        """Return what waits for all moves queued so far."""
        mover, ticket = self._mover, self._last
        return lambda: mover.wait(ticket)

    def finish(self) -> None:
        """Wait for all moves."""
        self._mover.wait()


@torch.no_grad()
def _move(groups: tuple[SlotGroup, ...], admission: Admission) -> None:
    for group in groups:
        for table in group.tables:
            _move_table(group, table, admission)


def _move_table(group: SlotGroup, table: TableRows, admission: Admission) -> None:
    own = rows_between(admission.new_rows, table.region.first_row, table.region.first_row + table.region.num_rows)
    if own.start == own.stop:
        return
    slots, first = admission.new_slots[own] - group.first_slot, table.region.first_row
    dirty = np.flatnonzero(admission.old_dirty[own])
    # All is written before anything is read: a disk goes through its file once in each direction.
    for low in range(0, len(dirty), PIECE_ROWS):
        part = dirty[low : low + PIECE_ROWS]
        changed = group.layout.zeros(len(part))
        group.pack(torch.from_numpy(slots[part]), torch.from_numpy(changed))
        table.put(admission.old_rows[own][part] - first, changed)
    for low in range(0, len(slots), PIECE_ROWS):
        keys = admission.new_rows[own][low : low + PIECE_ROWS] - first
        rows = group.layout.zeros(len(keys))
        table.fetch(keys, rows)
        group.unpack(torch.from_numpy(slots[low : low + PIECE_ROWS]), torch.from_numpy(rows))


def rows_between(rows: NDArray[np.int64], first: int, stop: int) -> slice:
    """Return where the rows first <= row < stop stand among rising rows.

    Example:
        >>> rows_between(np.array([1, 4, 9]), 2, 9)
        slice(1, 2, None)
    """
    low, high = np.searchsorted(rows, [first, stop]).tolist()
    return slice(low, high)

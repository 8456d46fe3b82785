"""How rows come into the slots of a cache and leave them: the contract, and the form for slots in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.store import RowLayout
from viviane.store.row_kernels import ColumnMemory
from viviane.store.row_mover import RowMover
from viviane.store.slots import Admission, Region
from viviane.store.tier import Exchange

PIECE_ROWS: Final = 65_536
"""Rows that a thread has in hand at a time."""

RowSets = Sequence[NDArray[np.uint8]]
"""Rows of one table that some passes need, each set a bit for each row, the lowest bit of a byte first."""

Arrival = Callable[[], None]
"""Lets lookups wait for the rows of a batch."""


@dataclass(frozen=True)
class TableRows:
    """A table as moves see it.

    Args:
        region: its rows and slots.
        fetch: writes the rows of keys, (n,), into bytes (n, row_bytes): out of its tier, or as they begin.
        put: writes changed rows of keys to its tier.
        exchange: does both for the rows of a pass and returns which of the coming ones were there, or does nothing
            and returns None.
    """

    region: Region
    fetch: Callable[[NDArray[np.int64], NDArray[np.uint8]], None]
    put: Callable[[NDArray[np.int64], NDArray[np.uint8]], None]
    exchange: Callable[[Exchange], NDArray[np.bool_] | None] = lambda change: None


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

    def memory(self) -> ColumnMemory:
        """Return the slots as memory of this process, where they are: `pack` and `unpack` by all threads."""
        columns = [
            (part.data_ptr(), self.layout[name].num_bytes, self.layout.offsets[name])
            for name, part in self.columns.items()
        ]
        return ColumnMemory(columns, self.layout.row_bytes)

    def _view(self, packed: Tensor, name: str, part: Tensor) -> Tensor:
        """Return a column of packed rows as numbers of the column's type and shape."""
        start = self.layout.offsets[name]
        found = packed[:, start : start + self.layout[name].num_bytes].view(part.dtype)
        return found if part.dim() == 2 else found[:, 0]


class RowMoves(Protocol):
    """Moves rows between slots and tiers, in the order of `start`."""

    row_ids: Tensor
    """(slots,), int64: of each slot its row, beside the slots; right for rows that have arrived."""

    def start(self, admission: Admission, *, later: RowSets | None = None) -> None:
        """Begin to write back what changed slots held, and to fetch what they are to hold.

        Work that the caller gave to the device before it reads and writes the old rows.

        Args:
            admission: of a batch.
            later: the admission is of a pass over one table, and these are the rows of the passes that follow.
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

    def start(self, admission: Admission, *, later: RowSets | None = None) -> None:
        """Queue the moves of a batch or a pass."""
        groups = self._groups  # the thread does not keep this object
        self._last = self._mover.start(lambda: _move(groups, admission, later))

    def arrival(self) -> Arrival:
        """Return what waits for all moves queued so far."""
        mover, ticket = self._mover, self._last
        return lambda: mover.wait(ticket)

    def finish(self) -> None:
        """Wait for all moves."""
        self._mover.wait()


@torch.no_grad()
def _move(groups: tuple[SlotGroup, ...], admission: Admission, later: RowSets | None) -> None:
    for group in groups:
        for table in group.tables:
            own = rows_between(
                admission.new_rows, table.region.first_row, table.region.first_row + table.region.num_rows
            )
            if own.start < own.stop:
                _TableMove(group, table, admission, own).run(later)


class _TableMove:
    """The moves of one table; its rows stand at `own` in the admission."""

    def __init__(self, group: SlotGroup, table: TableRows, admission: Admission, own: slice) -> None:
        self._group, self._table = group, table
        self._memory = group.memory()
        self._slots = admission.new_slots[own] - group.first_slot
        self._coming = admission.new_rows[own] - table.region.first_row
        dirty = admission.old_dirty[own]
        self._leaving = admission.old_rows[own][dirty] - table.region.first_row
        self._left_slots = self._slots[dirty]
        self._left_before = np.cumsum(dirty, dtype=np.int64)
        """Of each new row, how many changed rows must have left when it takes its slot."""

    def run(self, later: RowSets | None) -> None:
        came = None
        if later is not None:
            change = Exchange(
                self._leaving, self._give, self._coming, self._take, self._left_before, next_use(self._leaving, later)
            )  # fmt: skip
            came = self._table.exchange(change)
        # All is written before anything is read: a disk goes through its file once in each direction.
        for low in range(0, len(self._leaving) if came is None else 0, PIECE_ROWS):
            places = np.arange(low, min(low + PIECE_ROWS, len(self._leaving)))
            rows = self._group.layout.empty(len(places))
            self._give(places, rows)
            self._table.put(self._leaving[places], rows)
        rest = np.arange(len(self._coming)) if came is None else np.flatnonzero(~came)
        for low in range(0, len(rest), PIECE_ROWS):
            part = rest[low : low + PIECE_ROWS]
            rows = self._group.layout.zeros(len(part))
            self._table.fetch(self._coming[part], rows)
            self._take(part, rows, np.arange(len(part)))

    def _give(self, places: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        if self._group.has_gaps:
            rows[:] = 0
        self._memory.pack(self._left_slots[places], rows)

    def _take(self, places: NDArray[np.int64], rows: NDArray[np.uint8], lines: NDArray[np.int64]) -> None:
        self._memory.unpack(self._slots[places], rows, lines)


def next_use(rows: NDArray[np.int64], later: RowSets) -> NDArray[np.int16]:
    """Return of each row the number of the first later pass that needs it, or -1.

    Args:
        rows: of a table, (n,).
        later: the rows of later passes.

    Example:
        >>> next_use(np.array([1, 8, 9]), [np.array([2, 0], np.uint8), np.array([2, 1], np.uint8)])
        array([ 0,  1, -1], dtype=int16)
    """
    found = np.full(len(rows), -1, np.int16)
    bytes_of_rows, bits = rows >> 3, (1 << (rows & 7)).astype(np.uint8)
    for number in reversed(range(len(later))):
        found[later[number][bytes_of_rows] & bits != 0] = number
    return found


def rows_between(rows: NDArray[np.int64], first: int, stop: int) -> slice:
    """Return where the rows first <= row < stop stand among rising rows.

    Example:
        >>> rows_between(np.array([1, 4, 9]), 2, 9)
        slice(1, 2, None)
    """
    low, high = np.searchsorted(rows, [first, stop]).tolist()
    return slice(low, high)

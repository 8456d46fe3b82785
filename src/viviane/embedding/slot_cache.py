"""Which rows of tables have slots, and how rows come there: the contract, and the form that the host plans.

Shapes: N entries of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.embedding.row_lease import Admitted, RowLease
from viviane.embedding.row_moves import PIECE_ROWS, HostMoves, RowMoves, RowSets, SlotGroup
from viviane.embedding.staged_moves import StagedMoves
from viviane.store import TierStats
from viviane.store.slots import Region, SlotMap
from viviane.store.streams import TransferStreams


@dataclass(frozen=True)
class PassMove:
    """Rows of a change from one pass to the next.

    Args:
        rows: that the pass needs.
        read: of these, rows that were not in memory.
        written: changed rows that left memory.
    """

    rows: int = 0
    read: int = 0
    written: int = 0

    def __add__(self, other: PassMove) -> PassMove:
        return PassMove(self.rows + other.rows, self.read + other.read, self.written + other.written)


class SlotCache(Protocol):
    """Gives rows slots and moves them between slots and tiers.

    Stamps number batches and rise from 1; rows used with a stamp from `guard` on keep their slots.
    """

    plans_on_host: bool
    """Whether keys in host memory are needed before their batch is looked up."""
    row_ids: Tensor
    """(slots,), int64: of each slot its row, beside the slots; right for rows that have arrived."""

    def admit(self, rows: Tensor, stamp: int, guard: int) -> Admitted:
        """Give the rows of a batch, (N,), slots, and begin to fetch what is missing.

        Raises:
            CacheFullError: here or in `settle`: too many rows are in use; nothing has changed.
        """

    def load(self, rows: NDArray[np.int64], stamp: int, guard: int, later: RowSets = ()) -> PassMove:
        """Give distinct, rising rows of a table slots, and return when they are there.

        Args:
            rows: (n,), of all tables together.
            stamp, guard: as of `admit`.
            later: the rows of that table that the passes after this one need.
        """

    def fill_whole(self, region: Region) -> None:
        """Put a table that has a slot for each row into its slots."""

    def mark_updated(self, slots: Tensor, leases: Sequence[RowLease], regions: Sequence[Region]) -> None:
        """Note that rows are changed.

        Args:
            slots: of the rows.
            leases: of the batches that they are of.
            regions: the tables that they are of.
        """

    def set_dirty(self, slots: NDArray[np.int64], dirty: bool) -> None:
        """Note whether slots differ from their tier; nothing moves."""

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of rows, or -1; nothing moves."""

    def clear(self, region: Region) -> None:
        """Let all rows of a table go, without writing anything back; nothing moves."""

    def finish(self) -> None:
        """Wait until no row is on its way."""

    def hits_and_misses(self) -> tuple[int, int]:
        """Return how many entries had slots, and how many rows had to be fetched."""

    def moved(self) -> TierStats:
        """Return the rows and bytes that were moved without the tiers, which have not counted them."""


class HostSlotCache:
    """Slots planned by the CPU; threads move rows.

    Args:
        regions: the tables.
        groups: the same, by layout.
        pinned: rows behind all tables that are always there.
        streams: copy rows between host memory and a device; None: slots lie in host memory.
    """

    plans_on_host = True

    def __init__(
        self, regions: Sequence[Region], groups: tuple[SlotGroup, ...], pinned: int, streams: TransferStreams | None
    ) -> None:
        self.slots = SlotMap(regions, pinned=pinned)
        self.moves: RowMoves = (
            HostMoves(groups, self.slots.owner) if streams is None else StagedMoves(groups, self.slots.owner, streams)
        )
        self.row_ids = self.moves.row_ids
        self._is_staged = streams is not None

    def admit(self, rows: Tensor, stamp: int, guard: int) -> Admitted:
        """Give the rows of a batch slots; see `SlotCache`."""
        admission = self.slots.admit(np.ascontiguousarray(rows.cpu().numpy()), stamp, guard)
        if len(admission.new_rows):
            self.moves.start(admission)
        found = torch.from_numpy(admission.slots).to(rows.device)
        # Rows that have slots already may be on their way for another batch: all moves so far are waited for.
        return Admitted(found, self.moves.arrival(), _settled, admission.slots)

    def load(self, rows: NDArray[np.int64], stamp: int, guard: int, later: RowSets = ()) -> PassMove:
        """Give rows slots and wait for them; see `SlotCache`."""
        admission = self.slots.admit(rows, stamp, guard)
        self.moves.start(admission, later=later)
        self.moves.finish()
        return PassMove(len(rows), len(admission.new_rows), int(admission.old_dirty.sum()))

    def fill_whole(self, region: Region) -> None:
        """Fill the slots of a whole table; see `SlotCache`."""
        for low in range(0, region.num_rows, PIECE_ROWS):
            rows = np.arange(low, min(low + PIECE_ROWS, region.num_rows)) + region.first_row
            self.moves.start(self.slots.admit(rows, 1, 0))
        self.moves.finish()

    def mark_updated(self, slots: Tensor, leases: Sequence[RowLease], regions: Sequence[Region]) -> None:
        """Note that rows are changed; see `SlotCache`."""
        if not self._is_staged:
            self.slots.mark_dirty(slots.numpy())
            return
        # The host does not read which rows a device changes: all of the batch in these tables may be.
        for lease in leases:
            assert lease.host_slots is not None
            if len(regions) == len(self.slots.regions):
                self.slots.mark_dirty(lease.host_slots)
                continue
            for one in regions:
                inside = (lease.host_slots >= one.first_slot) & (lease.host_slots < one.first_slot + one.num_slots)
                self.slots.mark_dirty(lease.host_slots[inside])

    def set_dirty(self, slots: NDArray[np.int64], dirty: bool) -> None:
        """Note whether slots differ from their tier."""
        self.slots.dirty[slots] = dirty

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of rows, or -1."""
        return np.maximum(self.slots.slot_of[rows].astype(np.int64) - 1, -1)

    def clear(self, region: Region) -> None:
        """Let all rows of a table go."""
        self.slots.clear(region)

    def finish(self) -> None:
        """Wait until no row is on its way."""
        self.moves.finish()

    def hits_and_misses(self) -> tuple[int, int]:
        """Return how many entries had slots, and how many rows had none."""
        return self.slots.hits, self.slots.misses

    def moved(self) -> TierStats:
        """Return nothing: the tiers count."""
        return TierStats()


def _settled() -> None:
    pass

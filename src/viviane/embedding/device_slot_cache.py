"""Slots planned by a GPU, whose kernels read and write the rows of tables in host memory.

A batch's plan is work of one stream and its moves are work of another, both beside the steps of earlier batches and
beside each other: the plan begins after the step that the caller queued last, and rows that it takes slots from are of
no batch whose rows move. The lookup of the batch waits for its moves on the device. The host waits for nothing but the
answer whether all rows got slots, when the batch is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.embedding.row_lease import Admitted, RowLease
from viviane.embedding.row_moves import PIECE_ROWS, RowSets, SlotGroup
from viviane.embedding.slot_cache import PassMove
from viviane.ops.slot_table import ALWAYS_USED, HostRows, RowColumn, SlotPlan, SlotRange, SlotTable
from viviane.store import ArrayTier, TierStats
from viviane.store.slots import CacheFullError, Region
from viviane.store.streams import Moment, TransferStreams

_LOADED_ROWS: Final = 1 << 20
"""Rows of a pass that are planned at a time: a plan takes 48 bytes a row of the GPU's memory."""


class DeviceSlotCache:
    """Slots planned by the device, over tables in host memory that its kernels reach.

    Args:
        regions: the tables.
        groups: the same, by layout.
        tiers: of each table that is not whole in its slots, all of its rows.
        pinned: rows behind all tables that are always there.
        streams: of the device.
    """

    plans_on_host = False

    def __init__(
        self,
        regions: Sequence[Region],
        groups: tuple[SlotGroup, ...],
        tiers: dict[str, ArrayTier],
        pinned: int,
        streams: TransferStreams,
    ) -> None:
        self._ranges = {
            one.name: SlotRange(one.first_row, one.num_rows, one.first_slot, one.num_slots) for one in regions
        }
        self.table = SlotTable(list(self._ranges.values()), pinned=pinned, device=streams.device)
        self.row_ids = self.table.owner
        self._regions, self._groups, self._tiers, self._streams = list(regions), groups, tiers, streams
        self._hosts = [_host_rows(self._regions, group, tiers) for group in groups]
        for name, tier in tiers.items():
            tier.place_by(partial(self._place, self._ranges[name]))
        columns = [part for group in groups for part in group.columns.values()]
        self._moves: list[Moment] = []
        """When the rows of the last two plans have moved."""
        for one in (*self.table.tensors(), *(part for host in self._hosts for part in host.tensors()), *columns):
            streams.share(one)

    def _place(self, own: SlotRange, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where rows of a table lie in its tier's memory; nothing moves."""
        rows = torch.from_numpy(keys).to(self._streams.device) + own.first_row
        found: NDArray[np.int64] = (self.table.places_of(rows) - own.first_row).cpu().numpy()
        return found

    def admit(self, rows: Tensor, stamp: int, guard: int) -> Admitted:
        """Give the rows of a batch slots; see `SlotCache`."""
        there = rows.to(self._streams.device).contiguous()
        slots = torch.empty_like(there)
        streams, regions = self._streams, self._regions
        report = streams.host_memory(8 * self.table.report_size).view(torch.int64)
        planned, moved = self._issue(there, slots, stamp, guard, report)

        def settle() -> None:
            planned.wait()
            if not report[0]:
                raise _full(regions, report.tolist())

        return Admitted(slots, lambda: streams.compute_after(moved), settle)

    def _issue(self, rows: Tensor, slots: Tensor, stamp: int, guard: int, report: Tensor) -> tuple[Moment, Moment]:
        """Queue a batch's plan, then its moves; return when the report is there, and when the rows are."""
        table, hosts, streams = self.table, self._hosts, self._streams
        plans: list[SlotPlan] = []

        def plan() -> None:
            plans.append(table.admit(rows, slots, stamp=stamp, guard=guard))
            report.copy_(plans[0].report, non_blocking=True)

        def move() -> None:
            streams.share(plans[0].new_rows)
            for host in hosts:
                table.swap(plans[0], host)

        for one in (rows, slots):
            streams.share(one)
        # A plan's memory is that of the last but one, whose rows have moved before it begins.
        planned = streams.issue("in", [streams.now(), *self._moves[:1]], plan)
        moved = streams.issue("out", [planned], move)
        self._moves = [*self._moves[-1:], moved]
        return planned, moved

    def load(self, rows: NDArray[np.int64], stamp: int, guard: int, later: RowSets = ()) -> PassMove:
        """Give rows slots and wait for them; see `SlotCache`."""
        before = self._counted()
        for low in range(0, len(rows), _LOADED_ROWS):
            part = torch.from_numpy(np.ascontiguousarray(rows[low : low + _LOADED_ROWS]))
            self.admit(part, stamp, min(guard, stamp)).settle()
        after = self._counted()
        return PassMove(len(rows), after[0] - before[0], after[1] - before[1])

    def _counted(self) -> tuple[int, int]:
        self.finish()
        both = torch.stack([host.moved for host in self._hosts]).sum(0).tolist()
        return both[0], both[1]

    def fill_whole(self, region: Region) -> None:
        """Fill the slots of a whole table; see `SlotCache`."""
        group = next(one for one in self._groups if any(table.region == region for table in one.tables))
        table = next(one for one in group.tables if one.region == region)
        device, first = self._streams.device, region.first_slot
        rows = torch.arange(region.num_rows, device=device)
        self.table.slot_of[region.first_row : region.first_row + region.num_rows] = (rows + first + 1).to(torch.int32)
        self.table.owner[first : first + region.num_slots] = rows + region.first_row
        self.table.used[first : first + region.num_slots] = ALWAYS_USED
        for low in range(0, region.num_rows, PIECE_ROWS):
            keys = np.arange(low, min(low + PIECE_ROWS, region.num_rows))
            packed = group.layout.zeros(len(keys))
            table.fetch(keys, packed)
            places = torch.from_numpy(keys + (first - group.first_slot)).to(device)
            group.unpack(places, torch.from_numpy(packed).to(device))

    def fill_tier(self, region: Region, beginning: Callable[[torch.device, int, int], Tensor]) -> None:
        """Write the rows of a table to host memory as they begin: kernels read what is there.

        Args:
            region: the table.
            beginning: returns rows first <= row < stop on a device, (n, row_bytes).
        """
        tier = self._tiers[region.name]
        self.table.put_in_order(self._ranges[region.name])
        memory = torch.from_numpy(tier.memory)
        for low in range(0, region.num_rows, PIECE_ROWS):
            high = min(low + PIECE_ROWS, region.num_rows)
            memory[low:high].copy_(beginning(self._streams.device, low, high))
        tier.note_written(0, region.num_rows)

    def mark_updated(self, slots: Tensor, leases: Sequence[RowLease], regions: Sequence[Region]) -> None:
        """Note that rows are changed; see `SlotCache`."""
        names = {one.name for one in regions}
        for one in self._regions:
            if (
                one.name not in names
            ):  # rows of a table that is frozen: a slot behind all others is marked in their place
                inside = (slots >= one.first_slot) & (slots < one.first_slot + one.num_slots)
                slots = slots.masked_fill(inside, self.table.num_slots)
        self.table.mark_dirty(slots)

    def set_dirty(self, slots: NDArray[np.int64], dirty: bool) -> None:
        """Note whether slots differ from their tier."""
        self.table.dirty[torch.from_numpy(slots).to(self._streams.device)] = int(dirty)

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of rows, or -1."""
        found: NDArray[np.int64] = self.table.slots_of(torch.from_numpy(rows).to(self._streams.device)).cpu().numpy()
        return found

    def clear(self, region: Region) -> None:
        """Let all rows of a table go."""
        self.table.clear(self._ranges[region.name])

    def finish(self) -> None:
        """Wait until no row is on its way."""
        self._streams.synchronize()

    def hits_and_misses(self) -> tuple[int, int]:
        """Return how many entries had slots, and how many rows had to be fetched."""
        read, _ = self._counted()
        entries, absent = self.table.counts.tolist()
        return entries - absent, read

    def moved(self) -> TierStats:
        """Return the rows and bytes that kernels read from host memory and wrote there."""
        self.finish()
        found = TierStats()
        for host in self._hosts:
            read, written = host.moved.tolist()
            size = 4 * host.row_words
            own = TierStats(hits=read, rows_read=read, rows_written=written)
            own.bytes_read, own.bytes_written = read * size, written * size
            found = found.plus(own)
        return found


def _host_rows(regions: Sequence[Region], group: SlotGroup, tiers: dict[str, ArrayTier]) -> HostRows:
    names = [one.name for one in regions]
    memory = [
        torch.from_numpy(tiers[table.region.name].memory).view(torch.int32) if table.region.name in tiers else None
        for table in group.tables
    ]
    # Of an even number of columns of 16 bits two make a word.
    words = {name: part if part.itemsize == 4 else part.view(torch.int32) for name, part in group.columns.items()}
    columns = [RowColumn(part, group.layout.offsets[name] // 4) for name, part in words.items()]
    return HostRows(names.index(group.tables[0].region.name), memory, columns, group.first_slot)


def _full(regions: Sequence[Region], report: Sequence[int]) -> CacheFullError:
    needs, in_use = report[2 : 2 + len(regions)], report[2 + len(regions) :]
    region, need, used = next(
        one for one in zip(regions, needs, in_use, strict=True) if one[1] > one[0].num_slots - one[2]
    )
    return CacheFullError(
        "the rows of a batch do not fit into the cache of their table", where=f"table {region.name!r}",
        value=f"{need + used:,} distinct rows in use at once", allowed=f"{region.num_slots:,} rows",
        fix="give the table more memory, or use a smaller batch",
    )  # fmt: skip

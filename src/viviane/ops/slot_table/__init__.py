"""Which rows of tables have slots on a device, planned by the device; rows move straight to and from host memory.

Shapes: T tables, R rows of all of them, S slots, N entries of a batch, M rows of a batch that have no slot.

contract    `admit` gives every row of a batch a slot: rows that have none take free slots, then those of rows that no
            batch in use needs, the longest unused first. `swap` reads the rows that got slots out of host memory, in
            the order of addresses, and writes each changed row that lost its slot to the address that was just read.
            The host reads no count before it launches.
places      A table has as many places in host memory as rows. A row without a slot is at its place. A row in a slot
            keeps a place, too: there is its copy while it is not changed. A changed row that leaves its slot takes the
            place of the row that comes, which keeps the other's, so that both moves need one translation of an
            address; where rows lie far apart, translations are what they cost.
reference   `reference.py`, plain torch
gpu         `gpu.py`, Triton
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from viviane.ops.dispatch import kernels_serve, load

__all__ = [
    "ALWAYS_USED",
    "FREE",
    "HALF_LIFE",
    "HEAT",
    "MAX_ROWS",
    "NUM_AGES",
    "OLDEST",
    "SWAP_PROGRAMS",
    "HostRows",
    "RowColumn",
    "SlotPlan",
    "SlotRange",
    "SlotTable",
]

NUM_AGES: Final = 256
"""Classes of slots: 0 in use; 1 to 254, the less and the longer ago a row was used; 255 free."""
FREE: Final = NUM_AGES - 1
OLDEST: Final = NUM_AGES - 2
HEAT: Final = 512
"""What a batch that uses a row adds to the heat of its slot, which a half-life without use halves."""
HALF_LIFE: Final = 512
"""In batches. A row that every batch uses comes to 740 times `HEAT`, which 32 bits hold."""
ALWAYS_USED: Final = 2**31 - 1
"""In place of the stamp of a slot's last use, where its row stays."""
MAX_ROWS: Final = 2**31 - 2
"""Of all tables together: -1 - a place is a number of 32 bits."""
SWAP_PROGRAMS: Final = 16
"""At most, of `SlotTable.swap` on a GPU. Each holds a multiprocessor for as long as rows move."""
_ROWS_OF_BLOCK: Final = 32_768
_SLOTS_OF_BLOCK: Final = 4096
_PART_WORDS: Final = 512


@dataclass(frozen=True)
class SlotRange:
    """A table: its rows and the slots that they share.

    Args:
        first_row, num_rows: rows of tables follow one another from 0.
        first_slot, num_slots: slots of tables, too.
    """

    first_row: int
    num_rows: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True)
class SlotPlan:
    """What a batch changes; valid until the next but one `admit` of the same table.

    Args:
        new_rows, new_places, new_slots: (C,), of which the first M are set: rows that got slots, where they were,
            rising, and the slots.
        old_rows: (C,), rows that had these slots, or -1 for slots that were free.
        is_dirty: (C,), uint8: whether the old row was changed, and goes to the place of the new one.
        addresses: (C,), int64: room for those of the places.
        starts: (T + 1,), int64: where each table's rows begin among the first M.
        report: (2 + 2 T,), int64: 1 if all rows got slots, else 0 and nothing has changed; M; of each table how many
            of its rows had no slot, then how many of its slots are in use.
    """

    new_rows: Tensor
    new_places: Tensor
    new_slots: Tensor
    old_rows: Tensor
    is_dirty: Tensor
    addresses: Tensor
    starts: Tensor
    report: Tensor


@dataclass(frozen=True)
class RowColumn:
    """Part of a row that lies in slots of its own.

    Args:
        slots: (S', width), of 32-bit numbers, contiguous; or (S',).
        offset: of the part in a row of host memory, in 32-bit words.
    """

    slots: Tensor
    offset: int

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.slots.shape[1] if self.slots.dim() == 2 else 1


class HostRows:
    """Rows of neighbouring tables in host memory, which have one layout.

    Args:
        first_table: the first of the tables.
        memory: of each table its rows, (num_rows, words), int32, which the device's kernels can read and write; None: a
            table whose rows all have slots.
        columns: of a row.
        first_slot: the slot of the columns' first row.
    """

    def __init__(
        self, first_table: int, memory: Sequence[Tensor | None], columns: Sequence[RowColumn], first_slot: int
    ) -> None:
        self.first_table, self.last_table = first_table, first_table + len(memory)
        self.memory, self.columns, self.first_slot = list(memory), list(columns), first_slot
        self.row_words = max((one.shape[1] for one in memory if one is not None), default=0)
        device = columns[0].slots.device
        self.addresses = torch.tensor([0 if one is None else one.data_ptr() for one in memory]).to(device)
        parts = [
            (one.slots.data_ptr() + 4 * low, one.width, one.offset + low, min(_PART_WORDS, one.width - low))
            for one in columns
            for low in range(0, one.width, _PART_WORDS)
        ]
        self.parts = torch.tensor(parts, dtype=torch.int64).to(device)
        """(C, 4): the columns in parts: address, distance of rows, offset in a row of host memory, width, in words."""
        self.widest = max(width for _, _, _, width in parts)
        places = [*(address for address, _, _, _ in parts), *(4 * n for part in parts for n in part[1:3])]
        found = [one.data_ptr() for one in memory if one is not None]
        self.aligned = math.gcd(16, 4 * self.row_words, *places, *found)
        """A power of two, at most 16, that divides the addresses of all parts of rows."""
        self.moved = torch.zeros(2, dtype=torch.int64, device=device)
        """Rows read from host memory, and rows written to it."""

    def tensors(self) -> list[Tensor]:
        """Return what lies on the device."""
        return [self.addresses, self.parts, self.moved]


@dataclass
class _PlanBuffers:
    """Memory of a plan: rows and addresses of the batch, where tables begin, the report."""

    room: Tensor
    starts: Tensor
    report: Tensor


class SlotTable:
    """The slots of several tables and what they hold; all of it lies on one device, and calls follow one another there.

    Memory: 8.13 bytes for each row of the tables, 22 bytes for each slot, and 96 bytes for each entry of a batch.

    Args:
        ranges: the tables.
        pinned: rows behind those of all tables that always have a slot, behind all slots.
        device: of the slots.

    Attributes:
        slot_of: (R + pinned,), int32: of each row its slot + 1, or -1 - its place. Places count as rows do.
        row_at: (R,), int32: of each place its row.
        kept: (S + pinned,), int32: of each slot in use the place that its row keeps.
        owner: (S + pinned,), int64: of each slot its row, or -1.
        used: (S + pinned,), int32: the stamp of the last batch that used a slot, or `ALWAYS_USED`.
        heat: (S + pinned,), int32: how often, and how lately, batches used it.
        dirty: (S + pinned,), uint8: whether a row differs from what is at its place.
        counts: (2,), int64: entries that were looked up, and those whose row had no slot.

    Example:
        >>> table = SlotTable([SlotRange(0, 100, 0, 2)], pinned=1, device=torch.device("cpu"))
        >>> slots = torch.empty(3, dtype=torch.int64)
        >>> table.admit(torch.tensor([7, 9, 7]), slots, stamp=1, guard=1).report.tolist(), slots.tolist()
        ([1, 2, 2, 0], [0, 1, 0])
        >>> table.mark_dirty(torch.tensor([0]))
        >>> plan = table.admit(torch.tensor([8, 9, 9]), slots, stamp=2, guard=2)
        >>> slots.tolist(), plan.old_rows[:1].tolist(), plan.is_dirty[:1].tolist()
        ([0, 1, 1], [7], [1])
    """

    def __init__(self, ranges: Sequence[SlotRange], *, pinned: int, device: torch.device) -> None:
        self.ranges, self.device = list(ranges), device
        self.num_rows = sum(one.num_rows for one in ranges)
        self.num_slots = sum(one.num_slots for one in ranges)
        every = self.num_slots + pinned
        self.row_at = torch.arange(self.num_rows, dtype=torch.int32, device=device)
        self.slot_of = torch.empty(self.num_rows + pinned, dtype=torch.int32, device=device)
        self.slot_of[: self.num_rows] = -1 - self.row_at
        self.slot_of[self.num_rows :] = torch.arange(self.num_slots + 1, every + 1, dtype=torch.int32)
        self.owner = torch.full((every,), -1, dtype=torch.int64, device=device)
        self.owner[self.num_slots :] = torch.arange(self.num_rows, self.num_rows + pinned)
        self.kept = torch.zeros(every, dtype=torch.int32, device=device)
        self.used = torch.zeros(every, dtype=torch.int32, device=device)
        self.used[self.num_slots :] = ALWAYS_USED
        self.heat = torch.zeros_like(self.used)
        self.dirty = torch.zeros(every, dtype=torch.uint8, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.report_size = 2 + 2 * len(self.ranges)
        self.row_blocks, self.first_row_blocks = _blocks([(r.first_row, r.num_rows) for r in ranges], _ROWS_OF_BLOCK)
        self.slot_blocks, self.first_slot_blocks = _blocks(
            [(r.first_slot, r.num_slots) for r in ranges], _SLOTS_OF_BLOCK
        )
        self.scratch: Any = None
        """What kernels keep between calls."""
        tables = len(self.ranges)
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._buffers = [
            _PlanBuffers(none, torch.zeros(tables + 1, dtype=torch.int64, device=device),
                         torch.zeros(self.report_size, dtype=torch.int64, device=device)) for _ in range(2)
        ]  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return what lies on the device."""
        own = [part for one in self._buffers for part in (one.starts, one.report)]
        return [self.slot_of, self.row_at, self.owner, self.kept, self.used, self.heat, self.dirty, self.counts, *own]

    def admit(self, rows: Tensor, slots: Tensor, *, stamp: int, guard: int) -> SlotPlan:
        """Give the rows of a batch slots.

        Args:
            rows: (N,), int32 or int64, contiguous, repeated as they are.
            slots: (N,), of the same type: the result; without meaning where the report says that rows got none.
            stamp: of the batch; rises from call to call, from 1.
            guard: slots used with this stamp or a later one are in use.
        """
        capacity = min(len(rows), self.num_slots)
        self._buffers.reverse()  # the plan before this one may still move rows
        own = self._buffers[0]
        if len(own.room) < 6 * capacity:
            own.room = torch.empty(6 * capacity, dtype=torch.int64, device=self.device)
        new_rows, new_places, new_slots, old_rows, addresses, last = own.room[: 6 * capacity].view(6, capacity)
        is_dirty = last.view(torch.uint8)[:capacity]
        plan = SlotPlan(new_rows, new_places, new_slots, old_rows, is_dirty, addresses, own.starts, own.report)
        self._kernels().admit(self, rows, slots, stamp, guard, plan)
        return plan

    def swap(self, plan: SlotPlan, host: HostRows) -> None:
        """Read the rows that got slots out of host memory, and write changed rows that lost them to the same places.

        Args:
            plan: of the last `admit`, or of the one before.
            host: some of the tables.
        """
        if host.row_words:
            self._kernels().swap(self, plan, host)

    def slots_of(self, rows: Tensor) -> Tensor:
        """Return the slots of rows, (n,), int64, or -1."""
        return self.slot_of[rows].to(torch.int64).clamp(min=0) - 1

    def places_of(self, rows: Tensor) -> Tensor:
        """Return where rows, (n,), are in host memory, int64; of a row in a slot the place that it keeps."""
        found = self.slot_of[rows].to(torch.int64)
        return torch.where(found > 0, self.kept[found.clamp(min=1) - 1].to(torch.int64), -1 - found)

    def clear(self, own: SlotRange) -> None:
        """Let all rows of a table go to the places that they keep; nothing is written."""
        inside = slice(own.first_slot, own.first_slot + own.num_slots)
        held = self.owner[inside] >= 0
        self.slot_of[self.owner[inside][held]] = -1 - self.kept[inside][held]
        self.owner[inside], self.used[inside], self.dirty[inside] = -1, 0, 0

    def put_in_order(self, own: SlotRange) -> None:
        """Give each row of a table, none of which has a slot, the place of its own number."""
        inside = slice(own.first_row, own.first_row + own.num_rows)
        self.row_at[inside] = torch.arange(inside.start, inside.stop, dtype=torch.int32, device=self.device)
        self.slot_of[inside] = -1 - self.row_at[inside]

    def mark_dirty(self, slots: Tensor) -> None:
        """Note that rows in slots, (n,), were changed."""
        if len(slots):
            self._kernels().mark_dirty(self.dirty, slots)

    def _kernels(self) -> ModuleType:
        return load("slot_table", "gpu" if kernels_serve(self.device) else "reference")


def _blocks(ranges: Sequence[tuple[int, int]], size: int) -> tuple[Tensor, Tensor]:
    """Cut ranges into blocks: (B, 3), the range, the first number and how many; and each range's first block."""
    blocks: list[tuple[int, int, int]] = []
    firsts = []
    for i, (first, count) in enumerate(ranges):
        firsts.append(len(blocks))
        blocks += [(i, first + low, min(size, count - low)) for low in range(0, count, size)]
    return torch.tensor(blocks, dtype=torch.int64).view(-1, 3), torch.tensor([*firsts, len(blocks)])

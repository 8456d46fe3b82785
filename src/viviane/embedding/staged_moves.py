"""Rows between slots on a device and tiers in host memory, through page-locked memory, in both directions at once.

For each piece of a batch's missing rows:

    out stream    changed rows of the slots to take: gather on the device, copy to the host
    out thread    wait for that copy, write the rows to their tier
    in thread     gather the new rows out of their tier, by CPU threads
    in stream     copy them to the device, and to their slots, once the old rows were gathered

All of it runs beside the steps of earlier batches: the out stream begins after the step that used the slots last, and
the step of the batch waits on the device for the in stream. A row that is asked for while its last value is still on
its way to the tier is fetched after it got there; no other row waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.embedding.row_moves import Arrival, RowSets, SlotGroup, TableRows, rows_between
from viviane.store.row_mover import RowMover
from viviane.store.slots import Admission
from viviane.store.streams import Moment, TransferStreams

PIECE_BYTES: Final = 8 << 20
"""Rows that are copied at a time: the link reaches its rate from about 1 MiB on, and pieces overlap with each other."""
_STAGES: Final = 3
"""Pieces in flight in each direction."""


class _Stage:
    """Memory for one piece: page-locked in the host, and the same on the device."""

    def __init__(self, streams: TransferStreams, num_rows: int, row_bytes: int) -> None:
        self._shape = num_rows, row_bytes
        self.host = streams.host_memory(num_rows * row_bytes)
        self.device = torch.empty(num_rows * row_bytes, dtype=torch.uint8, device=streams.device)
        self.host_numbers = streams.host_memory(num_rows * 16).view(torch.int64)
        self.numbers = torch.empty(2 * num_rows, dtype=torch.int64, device=streams.device)
        self.moment: Moment | None = None
        """The end of the last copy from or to the host's memory."""
        self.ticket = 0
        """Of the job of the out thread that reads the host's memory."""
        streams.share(self.device)
        streams.share(self.numbers)

    def rows(self, count: int, row_bytes: int) -> tuple[Tensor, Tensor]:
        """Return room for rows in the host and on the device, (count, row_bytes)."""
        size = count * row_bytes
        return self.host[:size].view(count, row_bytes), self.device[:size].view(count, row_bytes)

    def give_numbers(self, *parts: NDArray[np.int64]) -> Callable[[], list[Tensor]]:
        """Put vectors into the host's memory; call what is returned on a stream to have them on the device."""
        stops = np.cumsum([len(part) for part in parts]).tolist()
        for part, stop in zip(parts, stops, strict=True):
            self.host_numbers[stop - len(part) : stop].copy_(torch.from_numpy(part))

        def copied() -> list[Tensor]:
            self.numbers[: stops[-1]].copy_(self.host_numbers[: stops[-1]], non_blocking=True)
            return [self.numbers[stop - len(part) : stop] for part, stop in zip(parts, stops, strict=True)]

        return copied


class StagedMoves:
    """Moves rows between slots on a device and the tiers of their tables; see the module.

    Args:
        groups: the tables; their columns lie on the device of `streams`.
        owner: (slots,), of each slot its row, at the beginning.
        streams: of the device.
    """

    def __init__(
        self,
        groups: tuple[SlotGroup, ...],
        owner: NDArray[np.int64],
        streams: TransferStreams,
    ) -> None:
        self.row_ids = torch.from_numpy(owner.copy()).to(streams.device)
        for one in (self.row_ids, *(part for group in groups for part in group.columns.values())):
            streams.share(one)
        self._pieces = _Pieces(groups, streams, self.row_ids)
        self._in = RowMover("rows in")
        self._last: Callable[[], Moment | None] = lambda: None

    def start(self, admission: Admission, *, later: RowSets | None = None) -> None:
        """Queue the moves of a batch or a pass, piece by piece."""
        pieces, now = self._pieces, self._pieces.streams.now()
        moved: list[Moment] = []
        ticket = self._in.start(lambda: moved.append(pieces.move(admission, now)))
        thread = self._in

        def last() -> Moment:
            thread.wait(ticket)
            return moved[0]

        self._last = last

    def arrival(self) -> Arrival:
        """Return what lets later work of the caller's stream wait for all moves queued so far."""
        last, streams = self._last, self._pieces.streams

        def arrive() -> None:
            moment = last()
            if moment is not None:
                streams.compute_after(moment)

        return arrive

    def finish(self) -> None:
        """Wait until rows are where they go, on the device and in tiers."""
        self._in.wait()
        self._pieces.finish()


class _Pieces:
    """What the in thread does."""

    def __init__(self, groups: tuple[SlotGroup, ...], streams: TransferStreams, row_ids: Tensor) -> None:
        self.streams = streams
        self._groups, self._row_ids = groups, row_ids
        widest = max(group.layout.row_bytes for group in groups)
        self._piece_rows = max(1, PIECE_BYTES // widest)
        num_slots = sum(table.region.num_slots for group in groups for table in group.tables)
        room = min(self._piece_rows, num_slots)
        self._stages: dict[str, list[_Stage]] = {
            name: [_Stage(streams, room, widest) for _ in range(_STAGES)] for name in ("in", "out")
        }
        self._out = RowMover("rows out")
        self._leaving: dict[int, int] = {}
        """Of admissions whose evicted rows may be on their way: the out thread's ticket of the last of these rows."""

    def move(self, admission: Admission, now: Moment) -> Moment:
        """Move the rows of a batch; return when the device will have them."""
        moment = now
        for group in self._groups:
            own = rows_between(admission.new_rows, *group.rows)
            for low in range(own.start, own.stop, self._piece_rows):
                part = slice(low, min(low + self._piece_rows, own.stop))
                moment = self._move_piece(group, admission, part, now)
        return moment

    def _move_piece(self, group: SlotGroup, admission: Admission, part: slice, now: Moment) -> Moment:
        dirty = admission.old_dirty[part]
        rows, slots = admission.new_rows[part], admission.new_slots[part] - group.first_slot
        gathered = now
        if dirty.any():
            gathered = self._write_back(group, slots[dirty], admission.old_rows[part][dirty], admission.ticket, now)
        stage = self._next_stage("in")
        if stage.moment is not None:
            stage.moment.wait()
        host, device = stage.rows(len(rows), group.layout.row_bytes)
        self._fetch(group, rows, admission.left[part], host.numpy())
        numbers = stage.give_numbers(slots, rows)
        first, row_ids = group.first_slot, self._row_ids

        def work() -> None:
            device.copy_(host, non_blocking=True)
            places, owners = numbers()
            group.unpack(places, device)
            row_ids.index_copy_(0, places + first, owners)

        stage.moment = self.streams.issue("in", [gathered], work)
        return stage.moment

    def _write_back(
        self, group: SlotGroup, slots: NDArray[np.int64], rows: NDArray[np.int64], ticket: int, now: Moment
    ) -> Moment:
        """Send changed rows to their tiers; return when the device has read them."""
        stage = self._next_stage("out")
        self._out.wait(stage.ticket)
        host, device = stage.rows(len(rows), group.layout.row_bytes)
        numbers = stage.give_numbers(slots)

        def work() -> None:
            if group.has_gaps:
                device.zero_()
            group.pack(numbers()[0], device)
            host.copy_(device, non_blocking=True)

        copied = self.streams.issue("out", [now], work)

        def put() -> None:
            copied.wait()
            for table, own in _by_table(group, rows):
                table.put(rows[own] - table.region.first_row, host.numpy()[own])

        stage.ticket = self._leaving[ticket] = self._out.start(put)
        return copied

    def _fetch(
        self, group: SlotGroup, rows: NDArray[np.int64], left: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> None:
        """Gather new rows out of their tiers, those last whose value is on its way there."""
        self._leaving = {one: job for one, job in self._leaving.items() if not self._out.is_done(job)}
        late = np.isin(left, list(self._leaving)) if self._leaving else np.zeros(len(rows), np.bool_)
        if not late.any():
            self._fetch_some(group, rows, out)
            return
        for places in (np.flatnonzero(~late), np.flatnonzero(late)):
            some = group.layout.zeros(len(places))
            self._fetch_some(group, rows[places], some)
            out[places] = some
            if not late[places].any():
                self._out.wait(max(self._leaving[one] for one in np.unique(left[late]).tolist()))

    def _fetch_some(self, group: SlotGroup, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        for table, own in _by_table(group, rows):
            table.fetch(rows[own] - table.region.first_row, out[own])

    def _next_stage(self, direction: str) -> _Stage:
        stages = self._stages[direction]
        stages.append(stages.pop(0))
        return stages[-1]

    def finish(self) -> None:
        """Wait until all rows are where they go."""
        self._out.wait()
        self.streams.synchronize()


def _by_table(group: SlotGroup, rows: NDArray[np.int64]) -> list[tuple[TableRows, slice]]:
    """Return the tables that rising rows are of, and which these are."""
    found = []
    for table in group.tables:
        own = rows_between(rows, table.region.first_row, table.region.first_row + table.region.num_rows)
        if own.start < own.stop:
            found.append((table, own))
    return found

"""The index of keys on a GPU: lines of five slots, found in one read of 64 bytes, won by swaps of the keys themselves.

Rows are assigned in the order of the keys' first entries, so results do not depend on the race for slots: they equal
those of `viviane.ops.hash_table.reference`. `find_or_insert` does not wait for the device while the bounds of the host
are below the capacity. Slots are at most 3/5 full; their number doubles in one pass over the rows in use, during which
both tables of slots are in memory, 21 to 43 bytes a key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.hash_table.gpu_bounds import CounterBounds
from viviane.ops.hash_table.gpu_evict import Victims
from viviane.ops.hash_table.gpu_insert import put_kernel, settle_kernel, take_kernel
from viviane.ops.hash_table.gpu_kernels import (
    FAILED,
    FIRST_SET,
    LINE_SLOTS,
    LINE_WORDS,
    MISSING,
    NEVER,
    NEW,
    NUM_COUNTERS,
    NUM_FREE,
    NUM_KEYS,
    NUM_ROWS,
    SET_SIZE,
    WANTED,
    copy_kernel,
    erase_kernel,
    find_kernel,
)
from viviane.ops.hash_table.gpu_values import Marks, assign_marked, start_rows
from viviane.ops.hash_table.index import Added, Inserted, KeyIndex, Order, check_content, check_keys
from viviane.ops.hash_table.reserve import Reserved
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two


class Shape(NamedTuple):
    """Keys of a program, and its warps."""

    block: int
    warps: int


_SEARCH = Shape(64, 2)
_TAKE = Shape(64, 2)
_COPY_ROWS = 16
_SCAN = 1024
_FULL, _CROWDED = 3, 4  # keys a line in the mean: what slots are made for, and what they may hold during a call
_COPIED = 2048  # numbers a program copies

__all__ = ["Index", "Marks", "distinct", "initial_rows", "start_rows"]


class Index(KeyIndex):
    """Slots, rows and counters on the GPU; the host knows bounds of the counters, see `CounterBounds`."""

    fused = True

    def __init__(
        self,
        max_rows: int,
        order: Order,
        with_uses: bool,
        initial_rows: int,
        segment_lines: int,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self.order = order
        self.device = device
        self._initial_rows = initial_rows
        self._evicted = 0
        # Notes of a row: its stamp, and the last entry of the last call that asked for it. One read brings both.
        widths = (1, 2, 1, 1)[: 3 + with_uses]
        self._memory = [(Reserved(width * max_rows, torch.int64, device), width) for width in widths]
        self.keys, self._notes, self._free = (part.tensor for part, _ in self._memory[:3])
        self.stamps = self._notes.view(max_rows, 2)[:, 0]
        self.uses = self._memory[3][0].tensor if with_uses else None
        self._scores = Marks()
        self._mark = 0
        self._work: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self._programs = 4 * processors
        """Of `settle`: all of them run at once, since their registers are few enough."""
        self._once = {"launch_cooperative_grid": True} if device.type == "cuda" else {}
        self.clear()

    def clear(self) -> None:
        """Take all keys out."""
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=self.device)
        self._counters[FIRST_SET + FAILED :: SET_SIZE] = NEVER
        self._bounds = CounterBounds(self._counters)
        self._turn = 0
        starts = (FIRST_SET, FIRST_SET + SET_SIZE)
        self._calls = [self._counters[start : start + SET_SIZE] for start in starts]
        self._news = [self._counters[start + NEW : start + NEW + 1] for start in starts]
        self._victims = Victims(self)
        self._allocate(self._initial_rows)
        self._committed = 0
        self._commit(self._initial_rows)

    def _allocate(self, count: int) -> None:
        """Make empty slots for a number of keys."""
        self._lines = max(power_of_two(ceil_div(count, _FULL)), 16)
        self._slots = torch.zeros(self._lines + 1, LINE_WORDS, dtype=torch.int64, device=self.device)
        self._halves = self._slots.view(torch.int32)

    def _commit(self, num_rows: int) -> None:
        num_rows = min(num_rows, self.max_rows)
        if num_rows > self._committed:
            self._committed = min(max(num_rows, 2 * self._committed), self.max_rows)
            for part, width in self._memory:
                part.commit(0, width * self._committed)

    def __len__(self) -> int:
        return self._bounds.read()[NUM_KEYS]

    @property
    def num_rows(self) -> int:
        """Rows allocated so far; waits for the device."""
        return self._bounds.read()[NUM_ROWS]

    @property
    def most_rows(self) -> int:
        """An upper bound of the rows allocated so far."""
        return min(self._bounds.most_rows, self.max_rows)

    @property
    def num_slots(self) -> int:
        """Places for keys."""
        return self._lines * LINE_SLOTS

    @property
    def num_evicted(self) -> int:
        """Keys that were evicted for others so far."""
        return self._evicted

    # Search -------------------------------------------------------------------------------------------------

    def find(self, keys: Tensor, otherwise: int = -1) -> Tensor:
        """Return the rows of keys, or another number."""
        return self._search(keys, None, otherwise)

    def touch(self, keys: Tensor, stamp: int, scores: Tensor | None = None) -> Tensor:
        """Find keys and note their use."""
        rows = self._search(keys, stamp, uses=self.uses if scores is None else None)
        if scores is not None:
            self._score(rows, scores)
        return rows

    def _search(self, keys: Tensor, stamp: int | None, otherwise: int = -1, uses: Tensor | None = None) -> Tensor:
        check_keys(keys, self.device)
        rows = torch.empty(len(keys), dtype=torch.int64, device=self.device)
        if len(keys):
            with on_device(keys):
                find_kernel[(ceil_div(len(keys), _SEARCH.block),)](
                    keys.contiguous(), self._slots, rows, None if stamp is None else self._notes, uses, len(keys),
                    self._lines, stamp or 0, otherwise, block=_SEARCH.block, num_warps=_SEARCH.warps,
                )  # fmt: skip
        return rows

    def _score(self, rows: Tensor, scores: Tensor) -> None:
        if self.uses is None:
            raise VivianeError("this index keeps no scores", fix="make it with with_uses=True")
        self._scores.assign(
            self.uses[: self.most_rows].view(-1, 1), rows, scores.to(torch.int64).contiguous().view(-1, 1)
        )

    def gather(self, keys: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys' rows of a table, (N, D), zeros where absent, and return which keys are present, (N,)."""
        check_keys(keys, self.device)
        count, dim = len(keys), weight.shape[1]
        out = torch.empty(count, dim, dtype=weight.dtype, device=self.device)
        there = torch.empty(count, dtype=torch.bool, device=self.device)
        if count:
            width = power_of_two(dim)
            block = max(1, min(_COPY_ROWS, _COPIED // width))
            with on_device(keys):
                copy_kernel[(ceil_div(count, block),)](
                    keys.contiguous(), self._slots, weight, out, there, count, self._lines, dim=dim, width=width,
                    block=block, num_warps=1 if width <= _COPIED else 4,
                )  # fmt: skip
        return out, there

    # Insertion ----------------------------------------------------------------------------------------------

    def _make_slots(self, count: int, per_line: int) -> None:
        """Grow where `count` more keys would crowd the slots."""
        if not self._bounds.takes(count, per_line * self._lines):
            rows = self.rows_in_use()
            self._allocate(max(self._bounds.most_keys + count, 2 * self._bounds.most_keys))
            self._put(self.keys[rows], rows)

    def find_or_insert(
        self,
        keys: Tensor,
        stamp: int,
        *,
        guard: int | None = None,
        allowed: Tensor | None = None,
        partial: bool = True,
        narrow: bool = False,
        last: bool = False,
    ) -> tuple[Tensor, Added]:
        """Find keys, or give them rows; waits for the device only if the table may be full."""
        check_keys(keys, self.device)
        return self._insert(keys, stamp, guard, allowed, partial=partial, counts=True, narrow=narrow, last=last)

    def write_last(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """Give the rows of the last `find_or_insert` the values of their last entries."""
        assign_marked(table, rows, values, self._notes[1:], 2, self._mark)

    def _insert(
        self, keys: Tensor, stamp: int, guard: int | None, allowed: Tensor | None, *, partial: bool, counts: bool,
        narrow: bool = False, last: bool = False,
    ) -> tuple[Tensor, Added]:  # fmt: skip
        keys, count = keys.contiguous(), len(keys)
        certain = self._bounds.takes(count, self.max_rows)
        self._make_slots(count, _FULL if certain else _CROWDED)
        self._bounds.fit_rows(count, self._committed if self._committed < self.max_rows else NEVER)
        self._commit(self._bounds.most_rows + count)
        rows = torch.empty(count, dtype=torch.int32 if narrow else torch.int64, device=self.device)
        places, new_rows, new_entries, sums = self._workspace(count)
        if not count:
            return rows, Added(new_rows, new_entries, torch.zeros(1, dtype=torch.int64, device=self.device), 0, 0)
        self._turn, self._mark = 1 - self._turn, self._mark + 1
        call, news, uses = self._calls[self._turn], self._news[self._turn], self.uses if counts else None

        def settle(start: int, end: int, limit: int, victims: Tensor | None) -> None:
            settle_kernel[(min(self._programs, ceil_div(count, _SCAN)),)](
                keys, self._slots, self._halves, rows, places, sums, self.keys, self._notes, self.uses, self._free,
                victims, new_rows, new_entries, self._counters, call, count, self._lines, stamp, self._mark,
                self.max_rows, limit, counts=counts, marks=last, start=start, end=end, block=_SCAN, num_warps=4,
                maxnreg=128, **self._once,
            )  # fmt: skip

        with on_device(keys):
            take_kernel[(ceil_div(count, _TAKE.block),)](
                keys, allowed, self._slots, self._halves, rows, places, self._notes, uses, call,
                self._calls[1 - self._turn], count, self._lines, stamp, self._mark, marks=last, block=_TAKE.block,
                num_warps=_TAKE.warps,
            )  # fmt: skip
            if certain:
                if self._once:
                    settle(1, 3, count, None)
                else:  # the interpreter runs one program after another: none may wait
                    for phase in (1, 2, 3):
                        settle(phase, phase, count, None)
                self._bounds.add(count)
                return rows, Added(new_rows, new_entries, news, None, None)
            settle(1, 1, 0, None)
            victims, given, wanted = self._evict_for(stamp if guard is None else guard, partial)
            if wanted:
                for phase in (2, 3):
                    settle(phase, phase, given, victims)
        self._bounds.most_keys += given - (0 if victims is None else len(victims))
        self._bounds.most_rows = min(self._bounds.most_rows + given, self.max_rows)
        return rows, Added(new_rows, new_entries, news, given, wanted)

    def _workspace(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return places, new rows, new entries, sums by block: memory of the index, for one call after another."""
        even = count + count % 2
        if self._work is None or len(self._work[0]) != even:
            memory = torch.empty(4 * even + 16, dtype=torch.int64, device=self.device)
            places, rows, entries = memory[: 3 * even].view(3, even).unbind()
            self._work = (places, rows, entries, memory[3 * even :].view(torch.int32))
        return self._work

    def _evict_for(self, guard: int, partial: bool) -> tuple[Tensor | None, int, int]:
        """Wait for the numbers; evict keys where rows are short. Return their rows, keys that get one, that ask."""
        before = self._bounds.read()
        turn = before[FIRST_SET + self._turn * SET_SIZE :]
        wanted = turn[WANTED] if turn[MISSING] else 0
        room, victims = self.max_rows - before[NUM_KEYS], None
        if wanted > room and partial and self.order != "none":
            victims = self._victims.take(wanted - room, guard, before[NUM_ROWS])
            self._remove(self.keys[victims])
            self._evicted += len(victims)
        given = min(wanted, room + (0 if victims is None else len(victims)))
        return victims, given if partial or given == wanted else 0, wanted

    def insert(
        self,
        keys: Tensor,
        rows: Tensor,
        entries: Tensor,
        stamp: int,
        *,
        guard: int | None = None,
        scores: Tensor | None = None,
    ) -> Inserted:
        """Give the keys of some entries rows; waits for the device."""
        found, added = self._insert(keys[entries], stamp, guard, None, partial=True, counts=scores is None)
        given = int(added.count) if added.given is None else added.given
        rows[entries] = found
        if scores is not None:
            self._score(found, scores[entries])
        complete = added.wanted is None or given == added.wanted
        return Inserted(added.rows[:given].clone(), entries[added.entries[:given]], complete)

    def _put(self, keys: Tensor, rows: Tensor) -> None:
        """Put distinct absent keys into slots, with their rows."""
        if len(keys):
            with on_device(keys):
                put_kernel[(ceil_div(len(keys), _TAKE.block),)](
                    keys, rows, self._slots, self._halves, len(keys), self._lines, block=_TAKE.block,
                    num_warps=_TAKE.warps,
                )  # fmt: skip

    # Removal ------------------------------------------------------------------------------------------------

    def _remove(self, keys: Tensor) -> None:
        """Take distinct keys out of their slots."""
        if len(keys):
            with on_device(keys):
                erase_kernel[(ceil_div(len(keys), _SEARCH.block),)](
                    keys,
                    self._slots,
                    self._halves,
                    len(keys),
                    self._lines,
                    block=_SEARCH.block,
                    num_warps=_SEARCH.warps,
                )
        self._counters[NUM_KEYS] -= len(keys)

    def erase(self, keys: Tensor) -> int:
        """Take keys out and free their rows."""
        unique = distinct(keys)[0]
        rows = self.find(unique)
        there = (rows >= 0).nonzero().squeeze(1)
        own, num_free = rows[there], self._bounds.free_rows()
        self._remove(unique[there])
        self._set_stamps(own, -1)
        self._free[num_free : num_free + len(own)] = own
        self._counters[NUM_FREE] += len(own)
        return len(own)

    def _set_stamps(self, rows: Tensor, stamps: Tensor | int) -> None:
        # Not by the view `stamps`: under deterministic algorithms torch copies the whole of a view whose elements lie
        # apart, and most of the reserved addresses have no memory.
        self._notes[2 * rows] = stamps

    def free_rows(self) -> Tensor:
        """Return the freed rows."""
        return self._free[: self._bounds.free_rows()].clone()

    def restore(self, keys: Tensor, rows: Tensor, stamps: Tensor, uses: Tensor | None, free: Tensor) -> None:
        """Replace everything."""
        check_content(keys, rows, stamps, uses, free, self.max_rows)
        keys, rows, free = (part.to(self.device, torch.int64, copy=True) for part in (keys, rows, free))
        stamps = stamps.to(self.device, copy=True)
        self.clear()
        self._commit(len(rows) + len(free))
        self._allocate(max(len(keys), self._initial_rows))
        self.keys[rows] = keys
        self._set_stamps(rows, stamps)
        self._set_stamps(free, -1)
        self._notes[2 * rows + 1] = 0
        if self.uses is not None and uses is not None:
            self.uses[rows] = uses.to(self.device)
        self._free[: len(free)] = free
        self._counters[:3] = torch.tensor([len(rows) + len(free), len(free), len(keys)])
        self._bounds.read()
        self._put(keys, rows)


def distinct(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct keys in order of their first place, each key's place among them, and counts."""
    unique, places, counts = torch.unique(keys.to(torch.int64), return_inverse=True, return_counts=True)
    entries = torch.arange(len(places), device=places.device)
    first = torch.full((len(unique),), len(places), device=places.device).scatter_reduce_(0, places, entries, "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=keys.device)
    return unique[order], rank[places], counts[order]


def initial_rows(weight: Tensor, rows: Tensor, keys: Tensor, kind: str, a: float, b: float, seed: int) -> None:
    """Give rows values that depend on seed, key and column alone."""
    start_rows(weight, {}, {}, rows.contiguous(), keys.contiguous(), (kind, a, b), seed, None, None)

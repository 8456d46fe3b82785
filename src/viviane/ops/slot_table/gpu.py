"""The slots of tables on a GPU: some twenty launches a batch, none of which waits for the host.

Most of them read nothing that differs from batch to batch but memory of the table and of the plan. They are recorded in
a CUDA graph once the same memory comes again, since the host takes longer to launch them than the GPU to run them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import triton
from torch import Tensor

from viviane.ops.capture import is_capturing, no_garbage_collection
from viviane.ops.slot_table import HALF_LIFE, HEAT, NUM_AGES, SWAP_PROGRAMS, HostRows, SlotPlan, SlotTable
from viviane.ops.slot_table import gpu_kernels as kernels
from viviane.ops.triton_parts.launch import ceil_div, on_device

_ENTRIES: Final = 1024
_WORDS: Final = 1024
"""Words of a block of rows: 32 rows each."""
_SLOTS: Final = 4096
_FEW_PROGRAMS: Final = 4
_FEW_BYTES: Final = 32_000_000
"""Up to so many bytes move by few programs: each holds a multiprocessor that the matrix products of a step wait for."""
_WARPS: Final = 16
_EAGER_PLANS: Final = 2
_MOST_GRAPHS: Final = 16
_MOST_COUNTED: Final = 256
_WORDS_AT_ONCE: Final = 8192
"""That a program has on their way to the device, and as many on their way back."""


class _Scratch:
    """What launches of a table hand on to each other."""

    def __init__(self, table: SlotTable) -> None:
        device = table.device
        num_tables, row_blocks, slot_blocks = len(table.ranges), len(table.row_blocks), len(table.slot_blocks)
        self.row_blocks, self.slot_blocks = table.row_blocks.to(device), table.slot_blocks.to(device)
        self.first_row_blocks = table.first_row_blocks.to(device)
        self.first_slot_blocks = table.first_slot_blocks.to(device)
        self.first_rows = torch.tensor([one.first_row for one in table.ranges]).to(device)
        self.first_bits = (table.first_row_blocks[:-1] * 32 * _WORDS).to(device)
        self.wanted = torch.zeros(row_blocks * _WORDS, dtype=torch.int32, device=device)
        self.row_counts = torch.zeros(row_blocks, dtype=torch.int32, device=device)
        self.row_stops = torch.zeros_like(self.row_counts)
        self.slot_counts = torch.zeros(3, slot_blocks, dtype=torch.int32, device=device)
        self.slot_stops = torch.zeros_like(self.slot_counts)
        self.classes = torch.zeros(table.num_slots, dtype=torch.uint8, device=device)
        self.ages = torch.zeros(num_tables, NUM_AGES, dtype=torch.int32, device=device)
        self.limits = torch.zeros(num_tables, 4, dtype=torch.int32, device=device)
        self.needs = torch.zeros(num_tables, 2, dtype=torch.int32, device=device)
        self.clock = torch.zeros(2, dtype=torch.int32, device=device)
        """Stamp and guard of the batch."""
        self.graphs = PlanGraphs()


class PlanGraphs:
    """CUDA graphs of plans, by the memory that they write.

    A plan without rows is not recorded. Graphs of memory that a larger plan has replaced are dropped with it.
    """

    def __init__(self) -> None:
        self._uses: Counter[tuple[int, ...]] = Counter()
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, SlotPlan]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, plan: SlotPlan, launches: Callable[[], None]) -> None:
        """Run launches that depend on nothing but the table and the plan's memory, or replay their graph."""
        if not len(plan.new_rows):
            launches()
            return
        key = plan.report.data_ptr(), plan.new_rows.data_ptr(), len(plan.new_rows)
        made = self._graphs.get(key)
        if made is not None:
            made[0].replay()
            return
        self._uses[key] += 1
        if self._uses[key] <= _EAGER_PLANS or len(self._graphs) >= _MOST_GRAPHS or not _can_record(plan.new_rows):
            launches()
            if len(self._uses) > _MOST_COUNTED:
                self._uses.clear()
            return
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launches()
            finally:
                graph.capture_end()
        report, memory = key[:2]
        self._graphs = {one: made for one, made in self._graphs.items() if one[0] != report or one[1] == memory}
        self._graphs[key] = graph, plan  # the plan keeps its memory
        graph.replay()


def _can_record(tensor: Tensor) -> bool:
    """Whether the current stream can record a graph: it is not the default one, and records none."""
    if not tensor.is_cuda or is_capturing(tensor.device):
        return False
    return bool(torch.cuda.current_stream(tensor.device) != torch.cuda.default_stream(tensor.device))


def _scratch_of(table: SlotTable) -> _Scratch:
    if table.scratch is None:
        table.scratch = _Scratch(table)
    scratch: _Scratch = table.scratch
    return scratch


def admit(table: SlotTable, rows: Tensor, slots: Tensor, stamp: int, guard: int, plan: SlotPlan) -> None:
    """Give the rows of a batch slots; see `SlotTable.admit`."""
    own = _scratch_of(table)
    count, num_tables = len(rows), len(table.ranges)
    with on_device(rows):
        kernels.find_kernel[(max(1, ceil_div(count, _ENTRIES)),)](
            rows, slots, table.slot_of, table.used, table.heat, own.wanted, table.counts, own.first_rows,
            own.first_bits, own.clock, stamp, guard, count, num_tables, one=HEAT, half_life=HALF_LIFE, block=_ENTRIES,
            num_warps=4,
        )  # fmt: skip
        own.graphs.run(plan, partial(_plan, table, own, plan))
        kernels.resolve_kernel[(max(1, ceil_div(count, _ENTRIES)),)](
            rows, slots, table.slot_of, count, block=_ENTRIES, num_warps=4
        )


def _plan(table: SlotTable, own: _Scratch, plan: SlotPlan) -> None:
    """List the wanted rows and give them slots."""
    kernels.count_bits_kernel[(len(own.row_blocks),)](own.wanted, own.row_counts, block=_WORDS, num_warps=4)
    torch.cumsum(own.row_counts, 0, dtype=torch.int32, out=own.row_stops)
    _choose(table, own, plan)
    kernels.list_places_kernel[(len(own.row_blocks),)](
        own.wanted, own.row_blocks, own.row_stops, plan.report, table.row_at, plan.new_places, plan.new_rows,
        block=_WORDS, num_warps=4,
    )  # fmt: skip
    kernels.give_slots_kernel[(max(1, ceil_div(len(plan.new_rows), _ENTRIES)),)](
        plan.new_rows, plan.new_places, plan.new_slots, plan.old_rows, plan.is_dirty, plan.report, table.slot_of,
        table.row_at, table.owner, table.kept, table.used, table.heat, table.dirty, own.clock, one=HEAT,
        block=_ENTRIES, num_warps=4,
    )  # fmt: skip


def _choose(table: SlotTable, own: _Scratch, plan: SlotPlan) -> None:
    """Choose the slots to take and list them with the rows that lose them."""
    num_tables, num_blocks = len(table.ranges), len(own.slot_blocks)
    own.ages.zero_()
    shape = {"ages": NUM_AGES, "block": _SLOTS, "num_warps": 8}
    kernels.count_ages_kernel[(num_blocks,)](
        own.slot_blocks, table.owner, table.used, table.heat, own.ages, own.classes, own.clock,
        half_life=HALF_LIFE, **shape,
    )  # fmt: skip
    kernels.choose_ages_kernel[(num_tables,)](
        own.ages, own.row_stops, own.first_row_blocks, own.limits, own.needs, ages=NUM_AGES, num_warps=4
    )
    kernels.report_kernel[(1,)](
        own.limits, own.needs, plan.starts, plan.report, num_tables,
        block=triton.next_power_of_2(num_tables), num_warps=4,
    )  # fmt: skip
    kernels.count_slots_kernel[(num_blocks,)](
        own.slot_blocks, own.classes, own.limits, own.slot_counts, num_blocks, **shape
    )
    # Three scans take 15 us, one over all rows 165.
    for counts, stops in zip(own.slot_counts, own.slot_stops, strict=True):
        torch.cumsum(counts, 0, dtype=torch.int32, out=stops)
    kernels.take_slots_kernel[(num_blocks,)](
        own.slot_blocks, own.first_slot_blocks, table.owner, own.classes, own.limits, own.needs, own.slot_stops,
        plan.starts, plan.report, plan.new_slots, plan.old_rows, num_blocks, **shape,
    )  # fmt: skip


def swap(table: SlotTable, plan: SlotPlan, host: HostRows) -> None:
    """Move rows between slots and host memory; see `SlotTable.swap`."""
    own = _scratch_of(table)
    with on_device(plan.new_rows):
        kernels.address_kernel[(max(1, ceil_div(len(plan.new_rows), _ENTRIES)),)](
            plan.new_places, plan.is_dirty, plan.starts, plan.report, host.addresses, own.first_rows, plan.addresses,
            host.moved, host.first_table, host.last_table, 4 * host.row_words, block=_ENTRIES, num_warps=4,
        )  # fmt: skip
        width = triton.next_power_of_2(host.widest)
        few_rows = (_FEW_BYTES if plan.new_rows.is_cuda else 4_000) // (4 * host.row_words)
        many, few = (SWAP_PROGRAMS, _FEW_PROGRAMS) if plan.new_rows.is_cuda else (3, 2)
        kernels.swap_kernel[(many,)](
            plan.new_slots, plan.addresses, plan.is_dirty, plan.starts, plan.report, host.parts, host.first_table,
            host.last_table, host.first_slot, len(host.parts), few_rows, few=few, aligned=host.aligned, width=width,
            block=max(1, _WORDS_AT_ONCE // width), num_warps=_WARPS,
        )  # fmt: skip


def mark_dirty(dirty: Tensor, slots: Tensor) -> None:
    """Note changes; see `SlotTable.mark_dirty`."""
    with on_device(slots):
        kernels.mark_kernel[(ceil_div(len(slots), _ENTRIES),)](dirty, slots, len(slots), block=_ENTRIES, num_warps=4)

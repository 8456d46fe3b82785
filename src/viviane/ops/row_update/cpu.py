"""Row updates on the CPU: give equal rows of a batch one slot, sum gradients by slot, move the rows.

Slots are found without sorting. Each thread walks all entries in order and serves those whose rows it owns; `head[row]`
is the slot of a row that was met before, or -1, and all of `head` is -1 again at the end. Owners follow a hash of the
row, so that tables that are used more than others are shared by all threads. Entries of a row keep their order: sums
are the same for any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from numba import int32, int64, uint64
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import VivianeError
from viviane.ops.native.kernels import OPERANDS, Kernel, PreparedKernel, kernel, num_threads, sources
from viviane.ops.native.memory import int32_at, int64_at, prefetch, read_whole, stack_integers, take_ticket
from viviane.ops.native.numbers import KINDS
from viviane.ops.native.pages import empty
from viviane.ops.row_update.cpu_fused import fused_kernel
from viviane.ops.row_update.cpu_kernels import move_kernel, sum_kernel
from viviane.ops.rules import rule_of

if TYPE_CHECKING:
    from viviane.ops.row_update import Entries, Scratch
    from viviane.ops.rules.rule import Rule


_SLICES_PER_THREAD = 8
_FUSED_DIM = 64  # sums of narrower rows stay in the caches: ordering the moves would cost more
_LOW = 0xFFFFFFFF
_SEED: Final = 9  # of the operands of a move


def sum_rows(
    entries: Entries, dim: int, *, first_row: int = 0, num_rows: int, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Sum gradients by row: distinct rows, rising, (U,), int64, and their sums, (U, dim), float32."""
    count, rows, sums = _summed(entries, dim, first_row, num_rows, scratch)
    rows, sums = rows[:count], sums[: count * dim].view(count, dim)
    order = torch.from_numpy(np.argsort(rows.numpy()))
    return rows[order], sums.index_select(0, order)


def update_rows(
    weight: Tensor,
    state: Mapping[str, Tensor],
    entries: Entries,
    rule: AnyOptimizer,
    *,
    lr: float,
    step: int,
    scale: float | Tensor = 1.0,
    first_row: int = 0,
    seed: int = 0,
    scratch: Scratch,
    names: Tensor | None = None,
    first_name: int = 0,
) -> None:
    """Sum the gradients of equal rows, and move rows and state in place."""
    num_rows, dim = weight.shape
    if not num_rows or not dim:
        return
    arithmetic = rule_of(rule)
    values = arithmetic.cpu_step_numbers(lr, step, float(scale))
    numbers = (ctypes.c_double * len(values))(*values)
    table = (*_places_of(weight, state, arithmetic), ctypes.addressof(numbers), _noise_of(seed, step),
             0 if names is None else names.data_ptr(), first_name)  # fmt: skip
    rule_and_table = arithmetic.name, dim, KINDS[weight.dtype]
    whole = getattr(rule, "update", "local") == "global"
    if whole or dim < _FUSED_DIM:
        if whole:
            rows, sums = sum_rows(entries, dim, first_row=first_row, num_rows=num_rows, scratch=scratch)
            count, moved = rows.numel(), num_rows
        else:
            count, rows, sums = _summed(entries, dim, first_row, num_rows, scratch)
            moved = count
        if not moved:
            return
        threads = num_threads(moved * dim)
        move_kernel(*rule_and_table, sources())(
            (rows.data_ptr(), sums.data_ptr(), count, num_rows if whole else 0, *table),
            tickets=threads * _SLICES_PER_THREAD, threads=threads,
        )  # fmt: skip
        return
    slots, gradients = _slots(entries, dim, first_row, num_rows, scratch)
    if not slots.num_rows:
        return
    lasts, places, moves = (
        scratch_view(scratch, name, slots.owners * slots.stride, torch.int64) for name in ("lasts", "places", "moves")
    )
    sums = scratch_view(scratch, "sums", slots.num_rows * dim, torch.float32)
    fused_kernel(*rule_and_table, KINDS[entries.gradients.dtype], sources())(
        (*gradients, lasts.data_ptr(), places.data_ptr(), moves.data_ptr(), sums.data_ptr(), *table),
        tickets=slots.owners, threads=slots.owners,
    )  # fmt: skip


def _places_of(weight: Tensor, state: Mapping[str, Tensor], arithmetic: Rule) -> tuple[int, ...]:
    """Return where the rows lie, two wide states and one of a number a row; 0 for those that are not there."""
    wide = [state[name].data_ptr() for name in arithmetic.states if name not in arithmetic.per_row]
    own = [state[name].data_ptr() for name in arithmetic.per_row]
    return (weight.data_ptr(), *wide, *[0] * (2 - len(wide)), *(own or [0]))


def _noise_of(seed: int, step: int) -> int:
    """Return what seeds stochastic rounding in a step."""
    return (seed + step * 0x9E3779B1) & _LOW


class SmallUpdate:
    """`update_rows` of batches of one shape, one after the other, in one thread: what stays is prepared.

    Args:
        weight, state, rule, first_row: as of `update_rows`; of a rule that `serves`.
        entries: of such a batch: its rows and sources are where those of each batch will be.
        scratch: of the table.
    """

    def __init__(
        self,
        weight: Tensor,
        state: Mapping[str, Tensor],
        entries: Entries,
        rule: AnyOptimizer,
        first_row: int,
        scratch: Scratch,
    ) -> None:
        (num_rows, dim), count = weight.shape, entries.rows.numel()
        self._rule, self._num_rows, self._scratch = rule_of(rule), num_rows, scratch
        numbers = self._rule.cpu_step_numbers(1.0, 1, 1.0)
        self._numbers = (ctypes.c_double * len(numbers))()
        self._counts = (ctypes.c_int64 * 2)()
        met, touched, rows = (torch.empty(count, dtype=torch.int64) for _ in range(3))
        sums = torch.empty(count, dim)
        self._kept = weight, dict(state), entries, met, touched, rows, sums
        assert entries.sources is not None
        self._find = PreparedKernel(slot_kernel(entries.rows.element_size(), sources()), (
            entries.rows.data_ptr(), count, first_row, num_rows, 0, met.data_ptr(), touched.data_ptr(),
            ctypes.addressof(self._counts),
        ))  # fmt: skip
        self._sum = PreparedKernel(sum_kernel(dim, KINDS[torch.float32], sources()), (
            0, entries.sources.data_ptr(), entries.sources.element_size(), 0, met.data_ptr(), touched.data_ptr(),
            ctypes.addressof(self._counts), count, rows.data_ptr(), sums.data_ptr(),
        ))  # fmt: skip
        self._move = PreparedKernel(move_kernel(self._rule.name, dim, KINDS[weight.dtype], sources()), (
            rows.data_ptr(), sums.data_ptr(), 0, 0, *_places_of(weight, state, self._rule),
            ctypes.addressof(self._numbers), 0, 0, 0,
        ))  # fmt: skip

    @staticmethod
    def serves(rule: AnyOptimizer, dim: int) -> bool:
        """Whether updates of a rule are of this kind: of touched rows, which are summed first."""
        return getattr(rule, "update", "local") != "global" and 0 < dim < _FUSED_DIM

    def update(self, gradient: Tensor, *, lr: float, step: int, scale: float, seed: int) -> None:
        """Move the rows of a batch.

        Args:
            gradient: of its output, float32, contiguous.
            lr, step, scale, seed: as of `update_rows`.
        """
        self._find.set(4, row_slots(self._num_rows, self._scratch, 1).data_ptr())
        self._find.run()
        moved = self._counts[1]
        if not moved:
            return
        self._sum.set(0, gradient.data_ptr())
        self._sum.run()
        for i, number in enumerate(self._rule.cpu_step_numbers(lr, step, scale)):
            self._numbers[i] = number
        self._move.set(2, moved)
        self._move.set(_SEED, _noise_of(seed, step))
        self._move.run()


def _slots(
    entries: Entries, dim: int, first_row: int, num_rows: int, scratch: Scratch
) -> tuple[Slots, tuple[int, ...]]:
    """Return the entries' slots, and the operands that kernels which sum by slot begin with."""
    gradients, weights = entries.gradients, entries.weights
    for name, part in (("rows", entries.rows), ("sources", entries.sources)):
        if part is not None and (part.dtype not in (torch.int32, torch.int64) or not part.is_contiguous()):
            raise VivianeError(f"{name} must be contiguous, of int32 or int64", value=str(part.dtype))
    if gradients.dtype not in KINDS or not gradients.is_contiguous():
        raise VivianeError("gradients must be contiguous, of a type that kernels know", value=str(gradients.dtype))
    slots = find_slots(entries.rows, first_row, num_rows, scratch, num_threads(entries.rows.numel() * dim))
    source_place, source_size = (
        (0, 0) if entries.sources is None else (entries.sources.data_ptr(), entries.sources.element_size())
    )
    return slots, (
        gradients.data_ptr(), source_place, source_size, 0 if weights is None else weights.data_ptr(),
        slots.met.data_ptr(), slots.touched.data_ptr(), ctypes.addressof(slots.counts), slots.stride,
    )  # fmt: skip


def _summed(entries: Entries, dim: int, first_row: int, num_rows: int, scratch: Scratch) -> tuple[int, Tensor, Tensor]:
    """Return U, and vectors of the scratch that begin with the distinct rows, int64, and with their sums, U * dim."""
    slots, gradients = _slots(entries, dim, first_row, num_rows, scratch)
    count = slots.num_rows
    rows = scratch_view(scratch, "rows", count, torch.int64)
    sums = scratch_view(scratch, "sums", count * dim, torch.float32)
    sum_kernel(dim, KINDS[entries.gradients.dtype], sources())(
        (*gradients, rows.data_ptr(), sums.data_ptr()), tickets=slots.owners, threads=slots.owners
    )
    return count, rows, sums


_BLOCK: Final = 256
_AHEAD: Final = 16
_LINE: Final = 16  # int32 of a cache line


class Slots(NamedTuple):
    """The entries of a batch and their slots, by owner. T owners share N entries of U distinct rows.

    Args:
        met: (T * N,), int64: from t * N on, the entries of owner t in order, each entry * 2^32 + slot.
        touched: (T * N,), int64: from t * N on, the row of each slot of owner t.
        counts: 2 T int64: entries, then slots, of each owner.
        stride: N.
        owners: T.
    """

    met: Tensor
    touched: Tensor
    counts: ctypes.Array[ctypes.c_int64]
    stride: int
    owners: int

    @property
    def num_rows(self) -> int:
        """U."""
        return sum(self.counts[self.owners :])


def find_slots(rows: Tensor, first_row: int, num_rows: int, scratch: Scratch, threads: int) -> Slots:
    """Give each distinct row with first_row <= row < first_row + num_rows a slot of its owner."""
    count = rows.numel()
    if count >= 2**31:
        raise VivianeError("too many entries for one update", value=count, allowed="less than 2^31")
    head = row_slots(num_rows, scratch, threads)
    met = scratch_view(scratch, "met", threads * count, torch.int64)
    touched = scratch_view(scratch, "touched", threads * count, torch.int64)
    counts = (ctypes.c_int64 * (2 * threads))()
    slot_kernel(rows.element_size(), sources())(
        (rows.data_ptr(), count, first_row, num_rows, head.data_ptr(), met.data_ptr(),
         touched.data_ptr(), ctypes.addressof(counts)),
        tickets=threads, threads=threads,
    )  # fmt: skip
    return Slots(met, touched, counts, count, threads)


def row_slots(num_rows: int, scratch: Scratch, threads: int) -> Tensor:
    """Return where kernels note the slot of each row, all -1, with room behind them for each thread."""
    head = scratch.tensors.get("head")
    if head is None or head.numel() < num_rows + _LINE * (threads + 1):
        head = scratch.tensors["head"] = empty(num_rows + _LINE * (threads + 1), torch.int32).fill_(-1)
    return head


def scratch_view(scratch: Scratch, name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a vector of at least `count` numbers, with any content, that the scratch keeps."""
    vector = scratch.tensors.get(name)
    if vector is None or vector.numel() < count:
        vector = scratch.tensors[name] = empty(count, dtype)
    return vector


@cache
def slot_kernel(row_size: int, key: str) -> Kernel:
    """Build the kernel that finds slots; a ticket is an owner."""

    @kernel
    def number_rows(call):  # type: ignore[no-untyped-def]
        _ = key
        rows, count, first_row, num_rows = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2], call[OPERANDS + 3]
        head_address, head = call[OPERANDS + 4], int32_at(call[OPERANDS + 4])
        met, touched, counts = int64_at(call[OPERANDS + 5]), int64_at(call[OPERANDS + 6]), int64_at(call[OPERANDS + 7])
        owners = call[1]
        own_rows, own_entries, mine = stack_integers(_BLOCK), stack_integers(_BLOCK), stack_integers(_BLOCK)
        owner = take_ticket(call)
        while owner < owners:
            begin = owner * count
            place, found = begin, 0
            spare = num_rows + _LINE * (owner + 1)
            for block in range(0, count, _BLOCK):
                # No branches, which would be mispredicted half of the time: look at all entries in wide pieces, then
                # write each one, and keep the own ones.
                kept, size = 0, min(_BLOCK, count - block)
                for i in range(size):
                    row = read_whole(rows, block + i, row_size) - first_row
                    hashed = ((row * 0x9E3779B1) & 0xFFFFFFFF) >> 8
                    inside = uint64(row) < uint64(num_rows)
                    mine[i] = int64((((hashed * owners) >> 24) == owner) & inside)
                for i in range(size):
                    own_entries[kept] = block + i
                    kept += mine[i]
                for k in range(kept):
                    own_rows[k] = read_whole(rows, own_entries[k], row_size) - first_row
                for k in range(kept):
                    prefetch(head_address + 4 * own_rows[k])
                for k in range(kept):
                    row = own_rows[k]
                    slot = int64(head[row])
                    new = slot < 0
                    slot = found if new else slot
                    # Only what is new is written into a row's place, which shares its cache line with other owners'
                    # rows: a line that all of them wrote to would wander between their caches.
                    head[row if new else spare] = int32(slot)
                    touched[begin + found] = row
                    met[place] = (own_entries[k] << 32) + slot
                    found += int64(new)
                    place += 1
            for i in range(begin, begin + found):
                prefetch(head_address + 4 * touched[min(i + _AHEAD, begin + found - 1)])
                head[touched[i]] = -1
            head[spare] = -1
            counts[owner] = place - begin
            counts[owners + owner] = found
            owner = take_ticket(call)

    return number_rows

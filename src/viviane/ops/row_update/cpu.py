"""Row updates on the CPU: give equal rows of a batch one slot, sum gradients by slot, move the rows."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import VivianeError
from viviane.ops.native.kernels import num_threads, sources
from viviane.ops.native.numbers import KINDS
from viviane.ops.row_update.cpu_fused import fused_kernel
from viviane.ops.row_update.cpu_kernels import move_kernel, sum_kernel
from viviane.ops.row_update.cpu_slots import Slots, find_slots, scratch_view
from viviane.ops.rules import rule_of
from viviane.ops.rules.numba_rules import step_numbers

if TYPE_CHECKING:
    from viviane.ops.row_update import Entries, Scratch

_SLICES_PER_THREAD = 8
_FUSED_DIM = 64  # sums of narrower rows stay in the caches: ordering the moves would cost more
_LOW = 0xFFFFFFFF


def sum_rows(
    entries: Entries, dim: int, *, first_row: int = 0, num_rows: int, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Sum gradients by row: distinct rows, rising, (U,), int64, and their sums, (U, dim), float32."""
    rows, sums = _summed(entries, dim, first_row, num_rows, scratch)
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
    values = step_numbers(arithmetic, lr, step, float(scale))
    numbers = (ctypes.c_double * len(values))(*values)
    wide = [state[name].data_ptr() for name in arithmetic.states if name not in arithmetic.per_row]
    own = [state[name].data_ptr() for name in arithmetic.per_row]
    table = (weight.data_ptr(), *wide, *[0] * (2 - len(wide)), *(own or [0]), ctypes.addressof(numbers),
             (seed + step * 0x9E3779B1) & _LOW, 0 if names is None else names.data_ptr(), first_name)  # fmt: skip
    rule_and_table = arithmetic.name, dim, KINDS[weight.dtype]
    whole = getattr(rule, "update", "local") == "global"
    if whole or dim < _FUSED_DIM:
        summed = sum_rows if whole else _summed
        rows, sums = summed(entries, dim, first_row=first_row, num_rows=num_rows, scratch=scratch)
        moved = num_rows if whole else rows.numel()
        if not moved:
            return
        threads = num_threads(moved * dim)
        move_kernel(*rule_and_table, sources())(
            (rows.data_ptr(), sums.data_ptr(), rows.numel(), num_rows if whole else 0, *table),
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


def _summed(entries: Entries, dim: int, first_row: int, num_rows: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Return distinct rows, (U,), int64, and their sums, (U, dim), in memory of the scratch."""
    slots, gradients = _slots(entries, dim, first_row, num_rows, scratch)
    count = slots.num_rows
    rows = scratch_view(scratch, "rows", count, torch.int64)[:count]
    sums = scratch_view(scratch, "sums", count * dim, torch.float32)[: count * dim].view(count, dim)
    sum_kernel(dim, KINDS[entries.gradients.dtype], sources())(
        (*gradients, rows.data_ptr(), sums.data_ptr()), tickets=slots.owners, threads=slots.owners
    )
    return rows, sums

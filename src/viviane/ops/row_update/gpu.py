"""Row updates on a GPU: sort the entries by row, then sum and move in one pass; nothing waits for the device.

Sorting needs the rows alone, not their gradients: `sort_entries` runs it ahead, on a stream of its own if one likes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import VivianeError
from viviane.ops.capture import URGENT, is_capturing
from viviane.ops.row_update.gpu_kernels import join_spans_kernel, rest_kernel, span_kernel
from viviane.ops.row_update.gpu_numbers import SUMS, StepRule, signed, step_rule, step_rule_on_device
from viviane.ops.row_update.gpu_sort import sort_rows
from viviane.ops.rules import rule_of
from viviane.ops.triton_parts.launch import WARP, ceil_div, devices_agree, on_device, power_of_two, warps_for

if TYPE_CHECKING:
    from viviane.ops.row_update import Entries, Scratch

_SPAN = 64
_SLOT_SPAN = 32
_WIDEST_TILE = 64
_MOST_JOINED = (1024, 2048)  # spans of entries, and of slots, that one program may have to sum for a row
_SORTED = ("sorted_of", "sorted_rows", "sorted_order")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SpanShape(NamedTuple):
    """What one program of an update does: entries in flight at once, entries in all, its warps."""

    tile: int
    span: int
    warps: int


def span_shape(dim: int, num_states: int = 0) -> SpanShape:
    """Choose the update's shape: 16 numbers of each operand a thread, 8 where two states of the table's size take part.

    Example:
        >>> span_shape(128), span_shape(128, num_states=2)
        (SpanShape(tile=4, span=64, warps=1), SpanShape(tile=2, span=64, warps=1))
    """
    warps = warps_for(dim)
    few = num_states < (2 if _fills_a_warp(dim) else 1)
    wanted = (512 if few else 256) * warps // power_of_two(dim)
    return SpanShape(max(2, min(_WIDEST_TILE, wanted)), _SPAN, warps)


def register_limit(dim: int, num_states: int, sums_rows: bool) -> int | None:
    """Return how many registers a thread may have, so that more warps run at a time; none of these limits spills.

    Example:
        >>> register_limit(128, 1, False), register_limit(128, 0, True), register_limit(16, 1, False)
        (80, 96, None)
    """
    if not _fills_a_warp(dim):
        return None
    return 96 if sums_rows else 80 if num_states == 1 else None


def one_by_one(dim: int, sums_rows: bool) -> bool:
    """Whether entries are taken one after another: where a row fills a warp, and nothing is summed along it.

    Such a sum has its threads wait for each other, and those of the rows of a tile wait together.

    Example:
        >>> one_by_one(128, False), one_by_one(128, True), one_by_one(16, False)
        (True, False, False)
    """
    return _fills_a_warp(dim) and not sums_rows


def _fills_a_warp(dim: int) -> bool:
    return power_of_two(dim) >= 4 * WARP


def slot_shape(dim: int) -> SpanShape:
    """Choose the shape for the partial sums of the spans: few of them, so short spans, which are many programs.

    Example:
        >>> slot_shape(128)
        SpanShape(tile=4, span=32, warps=1)
    """
    shape = span_shape(dim)
    return SpanShape(min(shape.tile, _SLOT_SPAN), _SLOT_SPAN, shape.warps)


class CacheHints(NamedTuple):
    """Cache hints for gradients and for rows with their state."""

    gradients: str
    rows: str


def cache_hints(reads: float) -> CacheHints:
    """Keep gradients that bags share, each read by several entries; all else passes through.

    Example:
        >>> cache_hints(1.0), cache_hints(8.2)
        (CacheHints(gradients='evict_first', rows=''), CacheHints(gradients='evict_last', rows='evict_first'))
    """
    return CacheHints("evict_last", "evict_first") if reads > 2 else CacheHints("evict_first", "")


def join_shape(dim: int) -> tuple[int, int]:
    """Choose how many partial sums of one row are added at once, and by how many warps.

    Example:
        >>> join_shape(128)
        (32, 4)
    """
    warps = max(4, warps_for(dim))
    return max(1, min(32, 32 * WARP * warps // power_of_two(dim))), warps


def prepare_rows(rows: Tensor, scratch: Scratch, bound: int | None = None, skipped: int = 0) -> None:
    """Sort rows on a stream of its own, after all that the current stream was given so far."""
    with aside(rows.device, scratch, [rows]):
        sort_entries(rows, scratch, bound, skipped=skipped, beside=True)


@contextmanager
def aside(device: torch.device, scratch: Scratch, reads: Sequence[Tensor]) -> Iterator[None]:
    """Run a block on that stream."""
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
        scratch.ready = stream.record_event()
    for one in reads:
        one.record_stream(stream)  # a forward pass without a step releases them at once


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # What it launches is small or takes a part of each multiprocessor, and would wait for all of a large lookup.
    return torch.cuda.Stream(device, priority=URGENT)  # type: ignore[no-untyped-call]


def join_rows(device: torch.device, scratch: Scratch) -> None:
    """Let the current stream wait for what `prepare_rows` began; every recorded fork of a CUDA graph must be joined."""
    if scratch.ready is not None:
        torch.cuda.current_stream(device).wait_event(scratch.ready)
        scratch.ready = None


def _sorted(entries: Entries, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Take rows that rise already, or what `prepare_rows` made, or sort now.

    What it made lies in the side stream's memory. That is used again only after `wait_stream` of a later call, which
    comes after every use here.
    """
    join_rows(entries.rows.device, scratch)
    if entries.order is not None:
        return entries.rows, entries.order
    return sort_entries(entries.rows, scratch, entries.bound, skipped=entries.skipped)


def sort_entries(
    rows: Tensor,
    scratch: Scratch,
    bound: int | None = None,
    *,
    skipped: int = 0,
    beside: bool = False,
    spare: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sort rows, those of equal rows in the order of the entries; kept in the scratch until other rows come.

    A later `update_rows` or `sum_rows` with this scratch and the same tensor takes what is kept. Where it runs on a
    stream of its own, the stream of the update has to wait for it.

    Args:
        rows: (N,), int32 or int64.
        scratch: of the table.
        bound, skipped: as in `Entries`.
        beside: whether other kernels are to run at the same time.
        spare: multiprocessors to leave to a kernel that holds them for long.

    Returns:
        rows in rising order, and the entry that each came from, int32 or int64; (N,) each.

    Example:
        >>> from viviane.ops.row_update import Scratch
        >>> [part.tolist() for part in sort_entries(torch.tensor([7, 2, 7]), Scratch())]
        [[2, 7, 7], [1, 0, 2]]
    """
    kept, recorded = scratch.tensors.get(_SORTED[0]), is_capturing(rows.device)
    # What a graph sorts holds once it is replayed, and what was sorted before it is not sorted by its replays.
    if kept is None or recorded != scratch.recorded or not _same(kept, rows):
        found, order = sort_rows(rows, bound, skipped=skipped, beside=beside, spare=spare)
        scratch.tensors.update(zip(_SORTED, (rows, found, order), strict=True))
        scratch.recorded = recorded
    return scratch.tensors[_SORTED[1]], scratch.tensors[_SORTED[2]]


def _same(kept: Tensor, rows: Tensor) -> bool:
    """Whether two tensors are views of the same unchanged numbers; the kept one holds its memory, so no other has."""
    if kept.is_inference() or rows.is_inference():
        return False
    places = [(one.data_ptr(), one.dtype, one.shape, one.device, one._version) for one in (kept, rows)]
    return places[0] == places[1]


def sum_rows(
    entries: Entries, dim: int, *, first_row: int = 0, num_rows: int, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Sum gradients by row: distinct rows, rising, (U,), int64, and their sums, (U, dim), float32.

    Waits for the device once, to learn U.
    """
    _check(entries)
    device = entries.rows.device
    if not len(entries.rows):
        return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dim, device=device)
    rows, order = _sorted(entries, scratch)
    inside, starts = _run_starts(rows, first_row, num_rows)
    distinct = rows[starts].to(torch.int64) - first_row
    sums = torch.empty(len(distinct), dim, dtype=torch.float32, device=device)
    _sum_into(sums, _ranks(rows, inside, starts, first_row + num_rows, len(distinct)), order, entries)
    return distinct, sums


def all_sums(entries: Entries, dim: int, *, first_row: int, num_rows: int, scratch: Scratch) -> Tensor:
    """Return the sums of `sum_rows`, and zeros after them: (min(N, num_rows), dim), float32. Nothing waits."""
    _check(entries)
    most = min(len(entries.rows), num_rows)
    sums = torch.zeros(most, dim, dtype=torch.float32, device=entries.rows.device)
    if most:
        rows, order = _sorted(entries, scratch)
        inside, starts = _run_starts(rows, first_row, num_rows)
        _sum_into(sums, _ranks(rows, inside, starts, first_row + num_rows, most), order, entries)
    return sums


def _run_starts(rows: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return which sorted rows are the table's, and which of these are the first of their kind."""
    inside = (rows >= first_row) & (rows < first_row + num_rows)
    starts = inside.clone()
    starts[1:] &= rows[1:] != rows[:-1]
    return inside, starts


def _ranks(rows: Tensor, inside: Tensor, starts: Tensor, stop: int, past: int) -> Tensor:
    """Return each row's number among the distinct ones; others go before the first, or past the last to `past`."""
    rank = torch.where(inside, starts.cumsum(0, dtype=torch.int32) - 1, -1)
    return torch.where(rows >= stop, past, rank)


def _sum_into(sums: Tensor, rank: Tensor, order: Tensor, entries: Entries) -> None:
    if sums.numel():
        _take_spans(_Target(sums, SUMS, 0, len(sums)), rank, order, entries)


def update_rows(
    weight: Tensor,
    state: Mapping[str, Tensor],
    entries: Entries,
    rule: AnyOptimizer,
    *,
    lr: float | Tensor,
    step: int | Tensor,
    scale: float | Tensor = 1.0,
    first_row: int = 0,
    seed: int | Tensor = 0,
    scratch: Scratch,
    gate: Tensor | None = None,
    names: Tensor | None = None,
    first_name: int = 0,
) -> None:
    """Sum the gradients of equal rows, and move rows and state in place."""
    held = [part for part in (lr, step, seed, scale, gate, names) if isinstance(part, Tensor)]
    _check(entries, weight, *held, *state.values())
    if not weight.numel():
        return
    whole = getattr(rule, "update", "local") == "global"
    touched = torch.zeros(len(weight), dtype=torch.int8, device=weight.device) if whole else None
    arithmetic = rule_of(rule)
    parts = [state[name] for name in arithmetic.states]
    own = [part for part in parts if part.dim() == 1]
    wide = [part for part in parts if part.dim() == 2]
    if isinstance(lr, Tensor) or isinstance(step, Tensor) or isinstance(seed, Tensor):
        own_rule, dither = step_rule_on_device(rule, lr, step, seed, weight.device), 0
    else:
        own_rule, dither = step_rule(rule, float(lr), step), signed(seed + step * 0x9E3779B1)
    target = _Target(
        weight, own_rule, first_row, len(weight),
        first=wide[0] if wide else None,
        second=wide[1] if len(wide) > 1 else None,
        own=own[0] if own else None,
        touched=touched,
        names=None if names is None else (names, first_name),
        scale=None if isinstance(scale, Tensor) or scale == 1 else float(scale),
        scale_at=scale if isinstance(scale, Tensor) else None,
        clip=rule.clip_row_norm,
        decay=arithmetic.decay or None,
        dither=dither,
        gate=gate,
    )  # fmt: skip
    if len(entries.rows):
        _take_spans(target, *_sorted(entries, scratch), entries)
    if whole:
        _move_rest(target)


@dataclass(frozen=True)
class _Target:
    """The table that moves, or the sums, and all that does not change from one launch to the next."""

    table: Tensor
    rule: StepRule
    first_row: int
    num_rows: int
    first: Tensor | None = None
    second: Tensor | None = None
    own: Tensor | None = None
    touched: Tensor | None = None
    names: tuple[Tensor, int] | None = None
    scale: float | None = None
    scale_at: Tensor | None = None
    clip: float | None = None
    decay: float | None = None
    dither: int = 0
    gate: Tensor | None = None


def _take_spans(target: _Target, rows: Tensor, order: Tensor, entries: Entries) -> None:
    """Launch over the entries, over their slots while they are many, and last over the runs that crossed an edge."""
    dim = target.table.shape[1]
    num_states = sum(part is not None for part in (target.first, target.second))
    shape, registers = span_shape(dim, num_states), register_limit(dim, num_states, target.rule.sums_rows)
    count, aligned = len(rows), min(entries.aligned, _vector(dim))
    parts: tuple[Tensor | None, ...] = (order, entries.sources, entries.weights, entries.gradients)
    hints, most = cache_hints(count * dim / len(entries.gradients)), _MOST_JOINED[0]
    with on_device(rows):
        while True:
            spans = ceil_div(count, shape.span)
            slot_rows = slot_sums = None
            if spans > 1:
                slot_rows = rows.new_empty(2 * spans)
                slot_sums = torch.empty(2 * spans, dim, dtype=torch.float32, device=rows.device)
            span_kernel[(spans,)](
                rows, *parts, slot_rows, slot_sums, target.table, target.first, target.second, target.own,
                target.touched, target.names, target.scale, target.scale_at, target.clip, target.decay,
                target.rule.numbers, count, target.first_row, target.num_rows, target.dither, target.gate,
                **_fixed(target), aligned=aligned, hint_gradients=hints.gradients, hint_rows=hints.rows,
                tile=shape.tile, span=shape.span, one_by_one=one_by_one(dim, target.rule.sums_rows),
                num_warps=shape.warps, maxnreg=registers, enable_fp_fusion=False,
            )  # fmt: skip
            if slot_rows is None or slot_sums is None:
                return
            if spans <= most:
                break
            most = _MOST_JOINED[1]
            rows, parts, count = slot_rows, (None, None, None, slot_sums), 2 * spans
            shape, aligned, hints = slot_shape(dim), _vector(dim), cache_hints(1.0)
        tile, warps = join_shape(dim)
        join_spans_kernel[(spans,)](
            slot_rows, slot_sums, target.table, target.first, target.second, target.own, target.touched, target.names,
            target.scale, target.scale_at, target.clip, target.decay, target.rule.numbers, spans, target.first_row,
            target.dither, **_fixed(target), tile=tile, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def _move_rest(target: _Target) -> None:
    """Update the rows without an entry."""
    shape = span_shape(target.table.shape[1])
    with on_device(target.table):
        rest_kernel[(ceil_div(target.num_rows, shape.tile),)](
            target.table, target.first, target.second, target.own, target.touched, target.decay, target.rule.numbers,
            target.num_rows, target.dither, target.gate, **_fixed(target), tile=shape.tile, num_warps=shape.warps,
            enable_fp_fusion=False,
        )  # fmt: skip


def _fixed(target: _Target) -> dict[str, Any]:
    dim = target.table.shape[1]
    return {
        "move": target.rule.move, "inside": target.rule.inside, "held": isinstance(target.rule.numbers, Tensor),
        "dim": dim, "block": power_of_two(dim),
        "vector": _vector(dim),
    }  # fmt: skip


def _vector(dim: int) -> int:
    """Return how many numbers of a row a thread loads at once; narrow rows share a warp."""
    block = power_of_two(dim)
    wanted = 4 if block < WARP else min(4, block // WARP)
    return math.gcd(wanted, dim)


def _check(entries: Entries, *others: Tensor | None) -> None:
    for name, part in (("rows", entries.rows), ("sources", entries.sources)):
        if part is not None and (part.dtype not in (torch.int32, torch.int64) or not part.is_contiguous()):
            raise VivianeError(f"{name} must be contiguous, of int32 or int64", value=str(part.dtype))
    if entries.gradients.dtype not in _FLOATS or not entries.gradients.is_contiguous():
        raise VivianeError("gradients must be contiguous, of a type that kernels know", value=entries.gradients.dtype)
    if not devices_agree([entries.rows, entries.gradients, entries.sources, entries.weights, *others]):
        raise VivianeError("a table, its state, its entries and the numbers of the step must be on one device")

"""The Triton kernels of row updates.

Entries come sorted by row. A program takes a span of neighbouring entries in tiles of T, sums runs of equal rows by a
segmented scan, and moves a row once its run ends. A run that crosses the edge of a span leaves partial sums: slot 2p
holds what span p has of a run that began before it, slot 2p + 1 what it has of a run that continues after it. Slots in
their order are again entries sorted by row, empty ones with row -1; where they are many they go through the same
kernel, and the runs that are left are summed each by a program of its own. So the work of a program hardly depends on
how often a row occurs in the batch, and the order of every sum is fixed by the sorted list alone.

A row of D numbers lies across a warp, `vector` numbers a thread, so that the scan along entries stays within threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.row_update.gpu_numbers import held_numbers
from viviane.ops.row_update.gpu_one_by_one import take_one_by_one
from viviane.ops.row_update.gpu_rows import find_gradients, load_rows, load_vectors, moved, scaled, store_rows


@triton.jit
def _segmented(starts, sums, next_starts, next_sums):
    return starts | next_starts, tl.where(next_starts != 0, next_sums, sums + next_sums)


@triton.jit
def _summed(starts, sums, carry):
    """Return for each entry the sum of its run so far; the first entry's run may bring a sum along."""
    lane = tl.arange(0, starts.shape[0])
    sums = tl.where(((lane == 0) & (starts == 0))[:, None], sums + carry[None, :], sums)
    wide = tl.broadcast_to(starts[:, None], sums.shape)
    _, sums = tl.associative_scan((wide, sums), 0, _segmented)
    return sums


@triton.jit
def _find_entries(rows, order, sources, n, stop, dim: tl.constexpr, aligned: tl.constexpr):
    """Return the rows of the sorted entries n, which entries they are, and where their gradients begin."""
    row = tl.load(rows + n, mask=n < stop, other=-1)
    entry, source = find_gradients(order, sources, n, stop, dim, aligned)
    return row, entry, source


@triton.jit
def _store_came_in(slot_sums, g, came_in, p, cols, dim: tl.constexpr):
    """Store what a span has of the run that began before it, once that ends."""
    if tl.max(came_in.to(tl.int32)) > 0:
        total = tl.sum(tl.where(came_in[:, None], g, 0.0), 0)
        tl.store(slot_sums + (2 * p).to(tl.int64) * dim + cols, total, mask=cols < dim)


@triton.jit
def _store_slots(
    slot_rows, slot_sums, carry, p, head, last, before, behind, first_row, num_rows, cols, dim: tl.constexpr
):
    """Store the rows of a span's two slots, and the sum of the run that continues after it."""
    goes_on = (last == behind) & (last >= first_row) & (last < first_row + num_rows)
    came_in = (head == before) & (head >= first_row) & (head < first_row + num_rows)
    tl.store(slot_rows + 2 * p, tl.where(came_in, head, -1))
    tl.store(slot_rows + 2 * p + 1, tl.where(goes_on, last, -1))
    if goes_on:
        at = slot_sums + (2 * p).to(tl.int64) * dim + cols
        through = last == before  # the span lies within one run: the first slot takes all
        tl.store(at + dim, tl.where(through, 0.0, carry), mask=cols < dim)
        tl.store(at, carry, mask=cols < tl.where(through, dim, 0))


@triton.jit(do_not_specialize=["count", "first_row", "num_rows", "dither"])
def span_kernel(
    rows, order, sources, weights, gradients, slot_rows, slot_sums, table, first, second, own, touched, names, scale,
    scale_at, clip, decay, numbers, count, first_row, num_rows, dither, gate, move: tl.constexpr, inside: tl.constexpr,
    held: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, vector: tl.constexpr, aligned: tl.constexpr,
    hint_gradients: tl.constexpr, hint_rows: tl.constexpr, tile: tl.constexpr, span: tl.constexpr,
    one_by_one: tl.constexpr,
):  # fmt: skip
    """Sum the runs of a span of entries, and move the rows whose runs it holds whole; without order, of slots."""
    if gate is not None:
        num_rows *= tl.load(gate)  # a closed gate leaves every row out
    if held:
        numbers, dither = held_numbers(numbers)
    p, start = tl.program_id(0), tl.program_id(0) * span
    end, stop = tl.minimum(start + span, count), tl.minimum(start + span, count)
    lane, cols, carry = tl.arange(0, tile), tl.arange(0, block), tl.zeros([block], dtype=tl.float32)
    before = tl.load(rows + start - 1, mask=start > 0, other=-1)
    head, last = tl.load(rows + start), tl.load(rows + end - 1)
    behind = tl.load(rows + end, mask=end < count, other=-1)
    if order is not None:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
        if (last < first_row) | (head >= first_row + num_rows):  # the span has no row of this table
            stop = start
    if one_by_one:
        carry = take_one_by_one(
            rows, order, sources, weights, gradients, slot_sums, table, first, second, own, touched, names, scale,
            scale_at, clip, decay, numbers, count, first_row, num_rows, dither, p, start, stop, before, move, inside,
            dim, block, vector, aligned, hint_gradients, hint_rows, tile,
        )  # fmt: skip
        stop = start
    row, entry, source = _find_entries(rows, order, sources, start + lane, stop, dim, aligned)
    for at in range(start, stop, tile):
        n = at + lane
        here = (n < stop) & (row >= first_row) & (row < first_row + num_rows)
        g = load_vectors(gradients, source, cols, here, dim, block, hint_gradients)
        if weights is not None:
            g *= tl.load(weights + entry, mask=here, other=0.0)[:, None]
        next_row = tl.load(rows + n + 1, mask=n + 1 < count, other=-1)
        starts = (row != tl.load(rows + n - 1, mask=(n > 0) & (n < stop), other=-1)).to(tl.int32)
        done = here & (row != next_row) & (row != before)
        came_in = here & (row != next_row) & (row == before)
        goes_on = (lane == tile - 1) & here & (row == next_row)
        place = (row - first_row).to(tl.int64)
        w, one, two, per_row = load_rows(
            table, first, second, own, place, cols, done, move, dim, block, vector, hint_rows
        )
        # The next tile's places are on their way while this tile's vectors are.
        row, entry, source = _find_entries(rows, order, sources, n + tile, stop, dim, aligned)
        g = _summed(starts, g, carry)
        carry = tl.sum(tl.where(goes_on[:, None], g, 0.0), 0)
        if tl.max(done.to(tl.int32)) > 0:
            parts = w, one, two, per_row
            w, one, two, per_row = moved(move, inside, dim, g, parts, numbers, scale, scale_at, clip, decay)
            store_rows(
                table, first, second, own, touched, names, w, one, two, per_row, place, cols, done, dim, vector,
                dither, hint_rows,
            )  # fmt: skip
        if slot_sums is not None:
            _store_came_in(slot_sums, g, came_in, p, cols, dim)
    if slot_sums is not None:
        _store_slots(slot_rows, slot_sums, carry, p, head, last, before, behind, first_row, num_rows, cols, dim)


@triton.jit(do_not_specialize=["spans", "first_row", "dither"])
def join_spans_kernel(
    slot_rows,
    slot_sums,
    table,
    first,
    second,
    own,
    touched,
    names,
    scale,
    scale_at,
    clip,
    decay,
    numbers,
    spans,
    first_row,
    dither,
    move: tl.constexpr,
    inside: tl.constexpr,
    held: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    vector: tl.constexpr,
    tile: tl.constexpr,
):
    """Sum the run that begins in a span and continues after it, over the spans that it crosses, and move its row."""
    p = tl.program_id(0)
    run = tl.load(slot_rows + 2 * p + 1)
    if held:
        numbers, dither = held_numbers(numbers)
    if (run != -1) & (tl.load(slot_rows + 2 * p) != run):
        cols = tl.arange(0, block)
        lane = tl.arange(0, tile)
        sums = slot_sums + (2 * p).to(tl.int64) * dim + cols
        g = tl.load(sums + dim, mask=cols < dim, other=0.0)
        done = tl.full([], 1, tl.int32)
        goes_on = run != -1
        while goes_on:
            here = tl.load(slot_rows + 2 * (p + done + lane), mask=p + done + lane < spans, other=-1) == run
            place = 2 * (done + lane).to(tl.int64) * dim
            parts = tl.load(sums[None, :] + place[:, None], mask=here[:, None] & (cols < dim)[None, :], other=0.0)
            g += tl.sum(parts, 0)
            goes_on = tl.min(here.to(tl.int32), 0) == 1
            done += tile
        here = tl.full([1], 1, tl.int1)
        place = tl.full([1], 0, tl.int64) + (run - first_row)
        w, one, two, per_row = load_rows(table, first, second, own, place, cols, here, move, dim, block, vector, "")
        parts = w, one, two, per_row
        w, one, two, per_row = moved(move, inside, dim, g[None, :], parts, numbers, scale, scale_at, clip, decay)
        store_rows(
            table, first, second, own, touched, names, w, one, two, per_row, place, cols, here, dim, vector, dither, ""
        )


@triton.jit(do_not_specialize=["num_rows", "dither"])
def rest_kernel(
    table,
    first,
    second,
    own,
    touched,
    decay,
    numbers,
    num_rows,
    dither,
    gate,
    move: tl.constexpr,
    inside: tl.constexpr,
    held: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    vector: tl.constexpr,
    tile: tl.constexpr,
):
    """Move the rows that no entry touched, whose gradient is zero, for the "global" rules."""
    if gate is not None:
        num_rows *= tl.load(gate)
    if held:
        numbers, dither = held_numbers(numbers)
    row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)
    cols = tl.arange(0, block)
    here = (row < num_rows) & (tl.load(touched + row, mask=row < num_rows, other=1) == 0)
    w, one, two, per_row = load_rows(table, first, second, own, row, cols, here, move, dim, block, vector, "")
    g = scaled(tl.zeros_like(w), w, None, None, None, decay)
    w, one, two, per_row = move(w, g, one, two, per_row, numbers, inside, dim)
    store_rows(table, first, second, own, None, None, w, one, two, per_row, row, cols, here, dim, vector, dither, "")

"""A span's entries one after another, where a row fills a warp: half the instructions of a scan over tiles."""

# Kernels are Python by syntax alone, and their tuples know no unpacking.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.row_update.gpu_rows import find_gradients, load_rows, load_vectors, moved, store_rows


@triton.jit
def _look_ahead(rows, order, sources, at, count, stop, dim: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr):
    """Return the rows behind `tile` entries from `at` on, which entries they are, and where their gradients begin."""
    behind, entries, places = (), (), ()
    for t in tl.static_range(tile):
        n = at + t
        behind = behind + (tl.load(rows + n + 1, mask=n + 1 < count, other=-1),)
        entry, place = find_gradients(order, sources, n, stop, dim, aligned)
        entries, places = entries + (entry,), places + (place,)
    return behind, entries, places


@triton.jit
def take_one_by_one(
    rows, order, sources, weights, gradients, slot_sums, table, first, second, own, touched, names, scale, scale_at,
    clip, decay, numbers, count, first_row, num_rows, dither, p, start, stop, before, move: tl.constexpr,
    inside: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, vector: tl.constexpr, aligned: tl.constexpr,
    hint_gradients: tl.constexpr, hint_rows: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Take the entries of a span as `span_kernel` does; returns the sum of the last run.

    What is known of an entry is one number for all threads here, and a row that continues is not moved: sums are
    those of a scan over tiles, in the same order. The loads of `tile` entries are in flight together anyway.
    """
    cols, total = tl.arange(0, block), tl.zeros([1, block], dtype=tl.float32)
    zero, one = tl.zeros([1], dtype=tl.int64), tl.full([1], 1, tl.int1)
    row, previous = tl.load(rows + start), before
    behind, entries, starts = _look_ahead(rows, order, sources, start, count, stop, dim, aligned, tile)
    for at in range(start, stop, tile):
        gradients_of, rows_of, places = (), (), ()
        this = row
        for t in tl.static_range(tile):
            here = (at + t < stop) & (this >= first_row) & (this < first_row + num_rows)
            done = here & (this != behind[t]) & (this != before)
            g = load_vectors(gradients, zero + starts[t], cols, one & here, dim, block, hint_gradients)
            if weights is not None:
                g *= tl.load(weights + entries[t], mask=here, other=0.0)
            place = zero + (this - first_row).to(tl.int64)
            held = load_rows(table, first, second, own, place, cols, one & done, move, dim, block, vector, hint_rows)
            gradients_of, rows_of, places = gradients_of + (g,), rows_of + (held,), places + (place,)
            this = behind[t]
        following = behind
        # The next places are on their way while these vectors are.
        behind, entries, starts = _look_ahead(rows, order, sources, at + tile, count, stop, dim, aligned, tile)
        for t in tl.static_range(tile):
            here = (at + t < stop) & (row >= first_row) & (row < first_row + num_rows)
            ends = here & (row != following[t])
            total = tl.where(row != previous, gradients_of[t], total + gradients_of[t])
            if ends & (row != before):
                w, state, two, per_row = moved(
                    move, inside, dim, total, rows_of[t], numbers, scale, scale_at, clip, decay
                )
                store_rows(
                    table, first, second, own, touched, names, w, state, two, per_row, places[t], cols, one, dim,
                    vector, dither, hint_rows,
                )  # fmt: skip
            if slot_sums is not None:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
                if ends & (row == before):  # of the run that began before the span
                    at_slot = slot_sums + (2 * p).to(tl.int64) * dim + cols
                    tl.store(at_slot[None, :], total, mask=(cols < dim)[None, :])
            previous, row = row, following[t]
    return tl.sum(total, 0)

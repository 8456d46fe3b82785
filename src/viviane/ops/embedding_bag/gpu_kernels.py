"""The Triton kernels of lookup and pooling.

D numbers of a row lie in a block of the next power of two; a table may hold more than 2^31 numbers, so that every
offset into one is of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(b, f, columns, width, first_column, step, aligned: tl.constexpr):
    """Return where the output of row b of the batch and feature f begins."""
    if columns is None:
        place = b.to(tl.int64) * width + (first_column + f * step)
    else:
        place = b.to(tl.int64) * width + tl.load(columns + f)
    return tl.multiple_of(place, [aligned])


@triton.jit
def _gather_tile(
    n, storage, rows, weights, columns, out, count, features, width, first_column, step,
    dim: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, block)[None, :]
    inside = n < count
    row = tl.load(rows + n, mask=inside, other=0).to(tl.int64)
    here = inside[:, None] & (cols < dim)
    vectors = tl.load(storage + (row * dim)[:, None] + cols, mask=here, other=0.0, eviction_policy=keep)
    if weights is not None:
        factor = tl.load(weights + n, mask=inside, other=0.0)
        vectors = vectors.to(tl.float32) * factor[:, None]
    b = n // features
    place = place_of(b, n - b * features, columns, width, first_column, step, aligned)
    # The output is read by another kernel at the earliest: it shall not push rows out of the cache.
    target = out + place[:, None] + cols
    tl.store(target, vectors.to(out.dtype.element_ty), mask=here, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["count", "features"])
def gather_kernel(
    storage, rows, weights, columns, out, count, features, width, first_column, step,
    dim: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr, num_rows: tl.constexpr, keep: tl.constexpr,
    aside: tl.constexpr,
):  # fmt: skip
    """Copy `num_rows` rows to their places; aside: this many at a time, until all are copied."""
    first = tl.program_id(0) * num_rows
    n = tl.arange(0, num_rows)
    if aside:
        for start in range(first, count, tl.num_programs(0) * num_rows):
            _gather_tile(
                start + n, storage, rows, weights, columns, out, count, features, width, first_column, step,
                dim, block, aligned, keep,
            )  # fmt: skip
    else:
        _gather_tile(
            first + n, storage, rows, weights, columns, out, count, features, width, first_column, step,
            dim, block, aligned, keep,
        )  # fmt: skip


@triton.jit
def bounds_of(offsets, k, inside, entries):
    """Return where bags begin and how long they are, inside the entries: wrong offsets are reported, not obeyed."""
    start = tl.minimum(tl.maximum(tl.load(offsets + k, mask=inside, other=0).to(tl.int64), 0), entries)
    stop = tl.minimum(tl.load(offsets + k + 1, mask=inside, other=0).to(tl.int64), entries)
    return start, (stop - start).to(tl.int32)


@triton.jit(do_not_specialize=["count", "size", "entries"])
def pool_kernel(
    storage,
    rows,
    offsets,
    weights,
    columns,
    out,
    count,
    entries,
    size,
    width,
    first_column,
    step,
    dim: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
    num_bags: tl.constexpr,
    ahead: tl.constexpr,
    keep: tl.constexpr,
):
    """Sum `num_bags` bags, `ahead` entries of each at a time."""
    k = tl.program_id(0) * num_bags + tl.arange(0, num_bags)
    cols = tl.arange(0, block)
    inside = k < count
    start, length = bounds_of(offsets, k, inside, entries)
    longest = tl.max(length, 0)
    total = tl.zeros([num_bags, block], dtype=tl.float32)
    j = tl.arange(0, ahead)
    entry = start[:, None] + j[None, :]
    here = j[None, :] < length[:, None]
    row = tl.load(rows + entry, mask=here, other=0).to(tl.int64)
    for done in range(0, longest, ahead):
        place = (row * dim)[:, :, None] + cols[None, None, :]
        known = here[:, :, None] & (cols < dim)[None, None, :]
        vectors = tl.load(storage + place, mask=known, other=0.0, eviction_policy=keep)
        vectors = vectors.to(tl.float32)
        if weights is not None:
            vectors *= tl.load(weights + entry, mask=here, other=0.0)[:, :, None]
        # The next rows' numbers are on their way while this tile's vectors are.
        entry += ahead
        here = (j + (done + ahead))[None, :] < length[:, None]
        row = tl.load(rows + entry, mask=here, other=0).to(tl.int64)
        total += tl.sum(vectors, 1)
    f = k // size
    place = place_of(k - f * size, f, columns, width, first_column, step, aligned)
    target = out + place[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < dim)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["count", "features", "apart", "first_column", "step"])
def entry_sources_kernel(columns, out, count, features, apart, first_column, step, block: tl.constexpr):
    """Write where the vectors of `block` entries begin, each of a row of the batch and a feature."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    b = n // features
    place = place_of(b, n - b * features, columns, apart, first_column, step, 1)
    tl.store(out + n, place.to(out.dtype.element_ty), mask=n < count)


# Where entries of several lookups are joined, theirs begin anywhere: that shall not be compiled for.
@triton.jit(
    do_not_specialize=["count", "entries", "size", "apart", "first_column", "step"],
    do_not_specialize_on_alignment=["out"],
)
def bag_sources_kernel(
    offsets, columns, out, count, entries, size, apart, first_column, step, num_bags: tl.constexpr, ahead: tl.constexpr
):  # fmt: skip
    """Write for each entry of `num_bags` bags where its bag's vector begins, `ahead` entries of each at a time."""
    k = tl.program_id(0) * num_bags + tl.arange(0, num_bags)
    inside = k < count
    start, length = bounds_of(offsets, k, inside, entries)
    f = k // size
    place = place_of(k - f * size, tl.where(inside, f, 0), columns, apart, first_column, step, 1)
    places = tl.broadcast_to(place.to(out.dtype.element_ty)[:, None], [num_bags, ahead])
    j = tl.arange(0, ahead)
    for done in range(0, tl.max(length, 0), ahead):
        tl.store(out + start[:, None] + (done + j)[None, :], places, mask=(done + j)[None, :] < length[:, None])

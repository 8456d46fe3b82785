"""The Triton kernels between lookups and the wire."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size", "count", "row_width"])
def pack_kernel(
    rows, table, out, size, count, row_width, tall: tl.constexpr, wide: tl.constexpr, divides: tl.constexpr
):
    """Map `tall` rows of `wide` columns to rows of parts, and put them into their blocks.

    One row after another, a thread for each column: of a tile whose addresses are read from memory the compiler does
    not know which way neighbours lie, and may give a warp 32 rows in place of 32 columns.
    """
    across = tl.cdiv(count, wide)
    tile = tl.program_id(0) // across
    k = (tl.program_id(0) - tile * across) * wide + tl.arange(0, wide)
    known = k < count
    line = table + k * 9
    source = tl.load(line, mask=known, other=0)
    start = tl.load(line + 1, mask=known, other=0)
    width = tl.load(line + 2, mask=known, other=0)
    low = tl.load(line + 3, mask=known, other=0).to(rows.dtype.element_ty)
    high = tl.load(line + 4, mask=known, other=0).to(rows.dtype.element_ty)
    base = tl.load(line + 7, mask=known, other=0)
    null = tl.load(line + 8, mask=known, other=0)
    if divides:
        stride = tl.load(line + 5, mask=known, other=1).to(rows.dtype.element_ty)
        offset = tl.load(line + 6, mask=known, other=0).to(rows.dtype.element_ty)
    first = (tile * tall + tl.zeros([wide], dtype=tl.int32)).to(tl.int64)
    for i in tl.static_range(tall):
        b = first + i
        here = known & (b < size)
        row = tl.load(rows + b * row_width + source, mask=here, other=0)
        inside = (row >= low) & (row < high)
        part = tl.maximum(row, low) - low
        if divides:
            own = part
            part = own // stride
            inside &= own - part * stride == offset
        found = tl.where(inside, part.to(tl.int64) + base, null)
        tl.store(out + start + b * width, found.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["count"])
def difference_kernel(found, truth, place, count, block: tl.constexpr):
    """Lower `place` to the first place at which two lists differ."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    here = i < count
    differs = tl.load(found + i, mask=here, other=0) != tl.load(truth + i, mask=here, other=0)
    if tl.max(differs.to(tl.int32)) > 0:
        tl.atomic_min(place, tl.min(tl.where(differs, i, count)).to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def difference_record_kernel(found, place, record, count):
    """Write [any, place, number] of the first difference."""
    first = tl.load(place)
    differs = first < count
    first = tl.where(differs, first, 0)
    tl.store(record, differs.to(tl.int64))
    tl.store(record + 1, first)
    tl.store(record + 2, tl.load(found + first).to(tl.int64))


@triton.jit(do_not_specialize=["size", "num_segments", "num_sources", "width"])
def join_kernel(
    taken,
    lines,
    sources,
    factors,
    out,
    size,
    num_segments,
    num_sources,
    width,
    block: tl.constexpr,
    num_rows: tl.constexpr,
    aligned: tl.constexpr,
):
    """Sum the sources of one segment for `num_rows` rows."""
    tile = tl.program_id(0) // num_segments  # neighbours in memory run side by side
    s = tl.program_id(0) - tile * num_segments
    column = tl.load(lines + s * 5)
    dim = tl.load(lines + s * 5 + 1)
    first = tl.load(lines + s * 5 + 2)
    count = tl.load(lines + s * 5 + 3)
    adds = tl.load(lines + s * 5 + 4)
    b = (tile * num_rows + tl.arange(0, num_rows)).to(tl.int64)
    cols = tl.arange(0, block)
    # Whole groups of numbers are in or out, so that a thread moves a group at once.
    here = (b < size)[:, None] & (cols // aligned < dim // aligned)[None, :]
    total = tl.zeros([num_rows, block], dtype=tl.float32)
    for i in range(first, first + count):
        start = tl.load(sources + i * 3)
        step = tl.load(sources + i * 3 + 1)
        place = tl.multiple_of(start + b * step, [aligned])
        total += tl.load(
            taken + place[:, None] + cols[None, :], mask=here, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
    if factors is not None:
        total *= tl.load(factors + b * num_segments + s, mask=b < size, other=0.0)[:, None]
    target = out + tl.multiple_of(b * width + column, [aligned])[:, None] + cols[None, :]
    if adds != 0:
        total += tl.load(target, mask=here, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def _cut_tile(
    tile, i, gradient, lines, sources, factors, out, size, num_segments, width,
    block: tl.constexpr, num_rows: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    start = tl.load(sources + i * 3)
    step = tl.load(sources + i * 3 + 1)
    s = tl.load(sources + i * 3 + 2)
    column = tl.load(lines + s * 5)
    dim = tl.load(lines + s * 5 + 1)
    b = (tile * num_rows + tl.arange(0, num_rows)).to(tl.int64)
    cols = tl.arange(0, block)
    # Whole groups of numbers are in or out, so that a thread moves a group at once.
    here = (b < size)[:, None] & (cols // aligned < dim // aligned)[None, :]
    place = tl.multiple_of(b * width + column, [aligned])
    part = tl.load(gradient + place[:, None] + cols[None, :], mask=here, other=0.0).to(tl.float32)
    if factors is not None:
        part *= tl.load(factors + b * num_segments + s, mask=b < size, other=0.0)[:, None]
    target = tl.multiple_of(start + b * step, [aligned])
    tl.store(out + target[:, None] + cols[None, :], part.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["size", "num_segments", "num_sources", "width"])
def cut_kernel(
    gradient, lines, sources, factors, out, size, num_segments, num_sources, width,
    block: tl.constexpr, num_rows: tl.constexpr, aligned: tl.constexpr, aside: tl.constexpr,
):  # fmt: skip
    """Copy one segment's gradient to one of its sources for `num_rows` rows; aside: one after another, until all are.

    Neighbours in memory run side by side.
    """
    if aside:
        for k in range(tl.program_id(0), tl.cdiv(size, num_rows) * num_sources, tl.num_programs(0)):
            tile = k // num_sources
            _cut_tile(
                tile, k - tile * num_sources, gradient, lines, sources, factors, out, size, num_segments, width,
                block, num_rows, aligned,
            )  # fmt: skip
    else:
        tile = tl.program_id(0) // num_sources
        _cut_tile(
            tile, tl.program_id(0) - tile * num_sources, gradient, lines, sources, factors, out, size, num_segments,
            width, block, num_rows, aligned,
        )  # fmt: skip


@triton.jit(do_not_specialize=["size", "num_pieces", "row_width", "width", "num_rows"])
def pool_kernel(
    storage,
    rows,
    weights,
    pieces,
    out,
    size,
    num_pieces,
    row_width,
    width,
    num_rows,
    dim: tl.constexpr,
    block: tl.constexpr,
    bags: tl.constexpr,
    ahead: tl.constexpr,
    aligned: tl.constexpr,
):
    """Sum one piece's bags of `bags` samples, `ahead` entries of each at a time."""
    tile = tl.program_id(0) // num_pieces
    p = tl.program_id(0) - tile * num_pieces
    first = tl.load(pieces + p * 3)
    count = tl.load(pieces + p * 3 + 1)
    target = tl.load(pieces + p * 3 + 2)
    b = (tile * bags + tl.arange(0, bags)).to(tl.int64)
    cols = tl.arange(0, block)
    inside = b < size
    j = tl.arange(0, ahead)
    entry = (b * row_width + first)[:, None] + j[None, :]
    here = inside[:, None] & (j < count)[None, :]
    row = tl.load(rows + entry, mask=here, other=0).to(tl.int64)
    total = tl.zeros([bags, block], dtype=tl.float32)
    for done in range(0, count, ahead):
        known = (here & (row < num_rows))[:, :, None] & (cols < dim)[None, None, :]
        vectors = tl.load(storage + (row * dim)[:, :, None] + cols[None, None, :], mask=known, other=0.0)
        vectors = vectors.to(tl.float32)
        if weights is not None:
            vectors *= tl.load(weights + entry, mask=here, other=0.0)[:, :, None]
        # The next rows' numbers are on their way while this tile's vectors are.
        entry += ahead
        here = inside[:, None] & (j + (done + ahead) < count)[None, :]
        row = tl.load(rows + entry, mask=here, other=0).to(tl.int64)
        total += tl.sum(vectors, 1)
    place = out + tl.multiple_of(b * width + target, [aligned])[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < dim)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _piece(starts, p: tl.constexpr, first, together: tl.constexpr):
    return tl.multiple_of(tl.load(starts + p) + first, [together])


@triton.jit(do_not_specialize=["first", "stop"])
def sum_kernel(base, starts, first, stop, pieces: tl.constexpr, block: tl.constexpr, together: tl.constexpr):
    """Sum a range of the pieces, `block` numbers at a time, and store the sums to all of them."""
    count = (stop - first) // together
    for k in range(tl.program_id(0), tl.cdiv(count * together, block), tl.num_programs(0)):
        i = k * block + tl.arange(0, block)
        here = i // together < count
        total = tl.load(base + _piece(starts, 0, first, together) + i, mask=here, other=0.0).to(tl.float32)
        for p in tl.static_range(1, pieces):
            total += tl.load(base + _piece(starts, p, first, together) + i, mask=here, other=0.0).to(tl.float32)
        for p in tl.static_range(pieces):
            place = base + _piece(starts, p, first, together) + i
            tl.store(place, total.to(base.dtype.element_ty), mask=here)

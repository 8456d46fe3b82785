"""The Triton kernels of lookup and pooling of 8-bit rows.

`tails` is the same memory as `storage`, as float32: a row's last two are its scale and its offset.
"""

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.embedding_bag.gpu_kernels import bounds_of, place_of


@triton.jit(do_not_specialize=["count", "features"])
def gather_kernel(
    storage, tails, rows, weights, columns, out, count, features, width, first_column, step,
    dim: tl.constexpr, row_bytes: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    """Write `num_rows` rows to their places."""
    n = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    cols = tl.arange(0, block)[None, :]
    inside = n < count
    row = tl.load(rows + n, mask=inside, other=0).to(tl.int64)
    here = inside[:, None] & (cols < dim)
    numbers = tl.load(storage + (row * row_bytes)[:, None] + cols, mask=here, other=0, eviction_policy="evict_last")
    tail = tails + row * (row_bytes // 4) + (row_bytes // 4 - 2)
    scale = tl.load(tail, mask=inside, other=0.0)
    offset = tl.load(tail + 1, mask=inside, other=0.0)
    vectors = numbers.to(tl.float32) * scale[:, None] + offset[:, None]
    if weights is not None:
        vectors *= tl.load(weights + n, mask=inside, other=0.0)[:, None]
    b = n // features
    place = place_of(b, n - b * features, columns, width, first_column, step, aligned)
    target = out + place[:, None] + cols
    tl.store(target, vectors.to(out.dtype.element_ty), mask=here, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["count", "size", "entries"])
def pool_kernel(
    storage, tails, rows, offsets, weights, columns, out, count, entries, size, width, first_column, step,
    dim: tl.constexpr, row_bytes: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr, num_bags: tl.constexpr,
    ahead: tl.constexpr,
):  # fmt: skip
    """Sum `num_bags` bags, `ahead` entries of each at a time."""
    k = tl.program_id(0) * num_bags + tl.arange(0, num_bags)
    cols = tl.arange(0, block)
    inside = k < count
    start, length = bounds_of(offsets, k, inside, entries)
    total = tl.zeros([num_bags, block], dtype=tl.float32)
    j = tl.arange(0, ahead)
    for done in range(0, tl.max(length, 0), ahead):
        entry = start[:, None] + (j + done)[None, :]
        here = (j + done)[None, :] < length[:, None]
        row = tl.load(rows + entry, mask=here, other=0).to(tl.int64)
        known = here[:, :, None] & (cols < dim)[None, None, :]
        numbers = tl.load(storage + (row * row_bytes)[:, :, None] + cols[None, None, :], mask=known, other=0)
        tail = tails + row * (row_bytes // 4) + (row_bytes // 4 - 2)
        scale = tl.load(tail, mask=here, other=0.0)
        offset = tl.load(tail + 1, mask=here, other=0.0)
        if weights is not None:
            factor = tl.load(weights + entry, mask=here, other=0.0)
            scale *= factor
            offset *= factor
        vectors = numbers.to(tl.float32) * scale[:, :, None] + offset[:, :, None]
        total += tl.sum(vectors, 1)
    f = k // size
    place = place_of(k - f * size, f, columns, width, first_column, step, aligned)
    target = out + place[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < dim)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")

"""Triton kernels of values beside the index: beginnings of new rows, and the last of several values of a row."""

# mypy: ignore-errors
# Types here are Triton's, which a checker of Python cannot see.

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.hash_table.gpu_kernels import mix64

_golden = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _draw(keys, column, seed, numbers, kind: tl.constexpr):
    """Draw numbers, see `viviane.ops.hash_table.initial_rows`."""
    a, b = tl.load(numbers), tl.load(numbers + 1)
    start = mix64(keys.to(tl.uint64) + tl.load(seed).to(tl.uint64) * _golden)
    x = mix64(start + (column + 1).to(tl.uint64) * _golden)
    if kind == 2:
        drawn = tl.zeros(x.shape, tl.float64) + a
    elif kind == 0:
        drawn = a + b * ((x >> 40).to(tl.int64).to(tl.float64) * (1.0 / 16777216.0))
    else:
        first = ((x >> 32).to(tl.int64).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        second = (x & 0xFFFFFFFF).to(tl.int64).to(tl.float64) * (1.0 / 4294967296.0)
        drawn = a + b * (tl.sqrt(-2.0 * tl.log(first)) * tl.cos(6.283185307179586 * second))
    return drawn.to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def draw_kernel(
    weight,
    first,
    second,
    own,
    first_value,
    second_value,
    own_value,
    rows,
    entries,
    keys,
    seed,
    numbers,
    count,
    count_at,
    dim: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    """Begin rows: values by their law, state by its beginning; row i has the key of entry i."""
    total = count * dim
    if count_at is not None:
        total = tl.load(count_at) * dim
    for done in range(tl.program_id(0) * block, total, tl.num_programs(0) * block):
        n = done + tl.arange(0, block).to(tl.int64)
        inside = n < total
        i = n // dim
        column = n - i * dim
        row = tl.load(rows + i, mask=inside, other=0)
        place = row * dim + column
        if weight is not None:
            entry = i
            if entries is not None:
                entry = tl.load(entries + i, mask=inside, other=0)
            key = tl.load(keys + entry, mask=inside, other=0).to(tl.int64)
            drawn = _draw(key, column, seed, numbers, kind)
            tl.store(weight + place, drawn.to(weight.dtype.element_ty), mask=inside)
        if first is not None:
            tl.store(first + place, tl.zeros((block,), tl.float32) + first_value, mask=inside)
        if second is not None:
            tl.store(second + place, tl.zeros((block,), tl.float32) + second_value, mask=inside)
        if own is not None:
            tl.store(own + row, tl.zeros((block,), tl.float32) + own_value, mask=inside & (column == 0))


@triton.jit(do_not_specialize=["count", "call"])
def latest_kernel(rows, latest, call, count, block: tl.constexpr):
    """Raise each row's mark to call * 2^32 + its last entry."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = tl.load(rows + n, mask=n < count, other=-1)
    tl.atomic_max(latest + row, (tl.zeros_like(n) + call << 32) + n, mask=row >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["count", "call"])
def assign_kernel(
    table,
    rows,
    values,
    latest,
    call,
    count,
    stride: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Copy the vector of the last entry of each row."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = tl.load(rows + n, mask=n < count, other=-1).to(tl.int64)
    cols = tl.arange(0, width)[None, :]
    known = (row >= 0)[:, None] & (cols < dim)
    # The vector is on its way while the mark is read.
    vectors = tl.load(values + (n * dim)[:, None] + cols, mask=known, other=0, eviction_policy="evict_first")
    mark = tl.load(latest + row * stride, mask=row >= 0, other=-1)
    last = (row >= 0) & (mark == (tl.zeros_like(n) + call << 32) + n)
    tl.store(table + (row * dim)[:, None] + cols, vectors.to(table.dtype.element_ty), mask=last[:, None] & (cols < dim))

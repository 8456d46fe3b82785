"""The Triton kernels of pointwise attention; i are places of queries, j of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(pointer, row, head, places, length, heads, dim, dim_block: tl.constexpr):
    """Load the vectors of a head at some places, (places, dim_block), with zeros beyond."""
    c = tl.arange(0, dim_block)
    at = ((row * length + places) * heads + head) * dim
    return tl.load(pointer + at[:, None] + c[None, :], mask=(places < length)[:, None] & (c < dim)[None, :], other=0.0)


@triton.jit
def _store_rows(pointer, values, row, head, places, length, heads, dim, dim_block: tl.constexpr):
    c = tl.arange(0, dim_block)
    at = ((row * length + places) * heads + head) * dim
    here = (places < length)[:, None] & (c < dim)[None, :]
    tl.store(pointer + at[:, None] + c[None, :], values.to(pointer.dtype.element_ty), mask=here)


@triton.jit
def _bucket(times, row, i, j, length, unit, num_buckets: tl.constexpr):
    """Return the buckets of a tile of pairs, -1 where a time is not known."""
    unknown = -9223372036854775808
    a = tl.load(times + row * length + i, mask=i < length, other=unknown)[:, None]
    b = tl.load(times + row * length + j, mask=j < length, other=unknown)[None, :]
    known = (a != unknown) & (b != unknown)
    age = tl.where(known & (a > b), a - b, 0) // unit + 1
    bucket = tl.zeros(age.shape, tl.int32)
    edge = age - age + 2  # as wide as the ages
    for _ in range(1, num_buckets):
        bucket += (age >= edge).to(tl.int32)
        edge = edge * 2
    return tl.where(known, bucket, -1)


@triton.jit
def _scores(
    queries,
    keys,
    held,
    position,
    times,
    time_bias,
    row,
    i,
    j,
    length,
    unit,
    num_buckets: tl.constexpr,
    precision: tl.constexpr,
):
    """Return the scores of a tile of pairs, and which pairs count."""
    z = tl.dot(queries, tl.trans(keys), input_precision=precision)
    holds = tl.load(held + row * length + j, mask=j < length, other=0) != 0
    allowed = (j[None, :] <= i[:, None]) & holds[None, :] & (i < length)[:, None]
    if position is not None:
        z += tl.load(position + (i[:, None] - j[None, :]), mask=allowed, other=0.0).to(tl.float32)
    if time_bias is not None:
        bucket = _bucket(times, row, i, j, length, unit, num_buckets)
        z += tl.load(time_bias + bucket, mask=allowed & (bucket >= 0), other=0.0).to(tl.float32)
    return z, allowed


@triton.jit
def _sigmoid(z):
    small = tl.exp(-tl.abs(z))  # cannot overflow
    return tl.where(z >= 0, 1.0, small) / (1 + small)


@triton.jit
def _slopes(z, allowed, grads, values, length, precision: tl.constexpr):
    """Return the gradient of a tile of scores."""
    of_weights = tl.dot(grads, tl.trans(values), input_precision=precision)
    share = _sigmoid(z)
    return tl.where(allowed, of_weights * share * (1 + z * (1 - share)) / length, 0.0)


@triton.jit
def _weights(z, allowed, length):
    """Return silu(z) / L where a pair counts."""
    return tl.where(allowed, z * _sigmoid(z) / length, 0.0)


@triton.jit(do_not_specialize=["unit"])
def forward_kernel(
    q, k, v, held, position, times, time_bias, out, length, heads, unit,
    dim: tl.constexpr, value_dim: tl.constexpr, dim_block: tl.constexpr, value_block: tl.constexpr,
    num_buckets: tl.constexpr, buckets_block: tl.constexpr, block: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write y of a block of places of one head."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i = tl.program_id(1) * block + tl.arange(0, block)
    queries = _rows(q, row, head, i, length, heads, dim, dim_block)
    total = tl.zeros([block, value_block], tl.float32)
    for first in range(0, tl.minimum((tl.program_id(1) + 1) * block, length), block):
        j = first + tl.arange(0, block)
        keys = _rows(k, row, head, j, length, heads, dim, dim_block)
        values = _rows(v, row, head, j, length, heads, value_dim, value_block)
        z, allowed = _scores(
            queries, keys, held, position, times, time_bias, row, i, j, length, unit, num_buckets, precision
        )
        total += tl.dot(_weights(z, allowed, length).to(values.dtype), values, input_precision=precision)
    _store_rows(out, total, row, head, i, length, heads, value_dim, value_block)


@triton.jit(do_not_specialize=["unit"])
def query_kernel(
    q, k, v, held, position, times, time_bias, grad, dq, length, heads, unit,
    dim: tl.constexpr, value_dim: tl.constexpr, dim_block: tl.constexpr, value_block: tl.constexpr,
    num_buckets: tl.constexpr, buckets_block: tl.constexpr, block: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of queries."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i = tl.program_id(1) * block + tl.arange(0, block)
    queries = _rows(q, row, head, i, length, heads, dim, dim_block)
    grads = _rows(grad, row, head, i, length, heads, value_dim, value_block)
    total = tl.zeros([block, dim_block], tl.float32)
    for first in range(0, tl.minimum((tl.program_id(1) + 1) * block, length), block):
        j = first + tl.arange(0, block)
        keys = _rows(k, row, head, j, length, heads, dim, dim_block)
        values = _rows(v, row, head, j, length, heads, value_dim, value_block)
        z, allowed = _scores(
            queries, keys, held, position, times, time_bias, row, i, j, length, unit, num_buckets, precision
        )
        slopes = _slopes(z, allowed, grads, values, length, precision)
        total += tl.dot(slopes.to(keys.dtype), keys, input_precision=precision)
    _store_rows(dq, total, row, head, i, length, heads, dim, dim_block)


@triton.jit(do_not_specialize=["unit"])
def key_value_kernel(
    q, k, v, held, position, times, time_bias, grad, dk, dv, length, heads, unit,
    dim: tl.constexpr, value_dim: tl.constexpr, dim_block: tl.constexpr, value_block: tl.constexpr,
    num_buckets: tl.constexpr, buckets_block: tl.constexpr, block: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    j = tl.program_id(1) * block + tl.arange(0, block)
    keys = _rows(k, row, head, j, length, heads, dim, dim_block)
    values = _rows(v, row, head, j, length, heads, value_dim, value_block)
    of_keys = tl.zeros([block, dim_block], tl.float32)
    of_values = tl.zeros([block, value_block], tl.float32)
    for first in range(tl.program_id(1) * block, length, block):
        i = first + tl.arange(0, block)
        queries = _rows(q, row, head, i, length, heads, dim, dim_block)
        grads = _rows(grad, row, head, i, length, heads, value_dim, value_block)
        z, allowed = _scores(
            queries, keys, held, position, times, time_bias, row, i, j, length, unit, num_buckets, precision
        )
        slopes = _slopes(z, allowed, grads, values, length, precision)
        of_keys += tl.dot(tl.trans(slopes).to(queries.dtype), queries, input_precision=precision)
        weights = tl.trans(_weights(z, allowed, length))
        of_values += tl.dot(weights.to(grads.dtype), grads, input_precision=precision)
    _store_rows(dk, of_keys, row, head, j, length, heads, dim, dim_block)
    _store_rows(dv, of_values, row, head, j, length, heads, value_dim, value_block)


@triton.jit(do_not_specialize=["unit"])
def bias_kernel(
    q, k, v, held, position, times, time_bias, grad, tiles, by_time, length, heads, unit, num_heads_in_all,
    dim: tl.constexpr, value_dim: tl.constexpr, dim_block: tl.constexpr, value_block: tl.constexpr,
    num_buckets: tl.constexpr, buckets_block: tl.constexpr, block: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of pairs, summed over a share of the rows and heads: by pair, and by bucket."""
    share, num_shares = tl.program_id(0), tl.num_programs(0)
    i = tl.program_id(1) * block + tl.arange(0, block)
    j = tl.program_id(2) * block + tl.arange(0, block)
    if tl.program_id(2) > tl.program_id(1):
        return
    b = tl.arange(0, buckets_block)
    total = tl.zeros([block, block], tl.float32)
    of_buckets = tl.zeros([buckets_block], tl.float32)
    for one in range(share, num_heads_in_all, num_shares):
        row, head = (one // heads).to(tl.int64), one % heads
        queries = _rows(q, row, head, i, length, heads, dim, dim_block)
        grads = _rows(grad, row, head, i, length, heads, value_dim, value_block)
        keys = _rows(k, row, head, j, length, heads, dim, dim_block)
        values = _rows(v, row, head, j, length, heads, value_dim, value_block)
        z, allowed = _scores(
            queries, keys, held, position, times, time_bias, row, i, j, length, unit, num_buckets, precision
        )
        slopes = _slopes(z, allowed, grads, values, length, precision)
        total += slopes
        if time_bias is not None:
            bucket = _bucket(times, row, i, j, length, unit, num_buckets)
            for number in range(num_buckets):
                sum_of_one = tl.sum(tl.sum(tl.where(bucket == number, slopes, 0.0), 1), 0)
                of_buckets += tl.where(b == number, sum_of_one, 0.0)
    if tiles is not None:
        at = (share * length + i[:, None]) * length + j[None, :]
        tl.store(tiles + at, total, mask=(i < length)[:, None] & (j < length)[None, :])
    if by_time is not None:
        tile = (share * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        tl.store(by_time + tile * buckets_block + b, of_buckets)

"""The Triton kernels of a softmax over candidates; r are rows, j candidates."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _vectors(pointer, at, here, dim: tl.constexpr, dim_block: tl.constexpr):
    """Load vectors, (block, dim_block), with zeros where there are none."""
    d = tl.arange(0, dim_block)
    places = at.to(tl.int64)[:, None] * dim + d[None, :]
    return tl.load(pointer + places, mask=here[:, None] & (d < dim)[None, :], other=0.0)


@triton.jit
def _store(pointer, values, at, here, dim: tl.constexpr, dim_block: tl.constexpr):
    d = tl.arange(0, dim_block)
    places = at.to(tl.int64)[:, None] * dim + d[None, :]
    tl.store(pointer + places, values, mask=here[:, None] & (d < dim)[None, :])


@triton.jit
def _scores(left, right, correction, of, own_ids, j, num_candidates, precision: tl.constexpr):
    """Return z of a tile, minus infinity beyond the candidates and where a candidate is the row's own item."""
    there = j < num_candidates
    z = tl.dot(left, tl.trans(right), input_precision=precision)
    z = z - tl.load(correction + j, mask=there, other=0.0)[None, :]
    same = own_ids[:, None] == tl.load(of + j, mask=there, other=0)[None, :]
    return tl.where(same | (~there)[None, :], float("-inf"), z)


@triton.jit(do_not_specialize=["num_candidates"])
def sum_kernel(
    u, v, correction, sums, ids, of, order, count, num_candidates,
    dim: tl.constexpr, dim_block: tl.constexpr, rows: tl.constexpr, candidates: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Write L of a block of rows over their own score."""
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    last = tl.load(count)
    if tl.program_id(0) * rows >= last:
        return
    here = place < last
    r = tl.load(order + place, mask=here, other=0)
    left = _vectors(u, r, here, dim, dim_block)
    own_ids = tl.load(ids + r, mask=here, other=0)
    top = tl.load(sums + r, mask=here, other=0.0)
    total = tl.full([rows], 1.0, tl.float32)  # exp(own - top)
    for first in range(0, num_candidates, candidates):
        j = first + tl.arange(0, candidates)
        right = _vectors(v, j, j < num_candidates, dim, dim_block)
        z = _scores(left, right, correction, of, own_ids, j, num_candidates, precision)
        higher = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    tl.store(sums + r, top + tl.log(total), mask=here)


@triton.jit(do_not_specialize=["num_candidates"])
def row_kernel(
    u, v, correction, sums, ids, of, order, count, grad, du, num_candidates,
    dim: tl.constexpr, dim_block: tl.constexpr, rows: tl.constexpr, candidates: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows."""
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    last = tl.load(count)
    if tl.program_id(0) * rows >= last:
        return
    here = place < last
    r = tl.load(order + place, mask=here, other=0)
    left = _vectors(u, r, here, dim, dim_block)
    own_ids = tl.load(ids + r, mask=here, other=0)
    own_sums = tl.load(sums + r, mask=here, other=0.0)
    own_grads = tl.load(grad + r, mask=here, other=0.0)
    total = tl.zeros([rows, dim_block], tl.float32)
    for first in range(0, num_candidates, candidates):
        j = first + tl.arange(0, candidates)
        right = _vectors(v, j, j < num_candidates, dim, dim_block)
        z = _scores(left, right, correction, of, own_ids, j, num_candidates, precision)
        shares = tl.exp(z - own_sums[:, None]) * own_grads[:, None]
        total += tl.dot(shares, right, input_precision=precision)
    _store(du, total, r, here, dim, dim_block)


@triton.jit(do_not_specialize=["num_candidates"])
def candidate_kernel(
    u, v, correction, sums, ids, of, order, count, grad, dv, num_candidates,
    dim: tl.constexpr, dim_block: tl.constexpr, rows: tl.constexpr, candidates: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of candidates."""
    j = tl.program_id(0) * candidates + tl.arange(0, candidates)
    last = tl.load(count)
    right = _vectors(v, j, j < num_candidates, dim, dim_block)
    total = tl.zeros([candidates, dim_block], tl.float32)
    for first in range(0, last, rows):
        place = first + tl.arange(0, rows)
        here = place < last
        r = tl.load(order + place, mask=here, other=0)
        left = _vectors(u, r, here, dim, dim_block)
        own_ids = tl.load(ids + r, mask=here, other=0)
        own_sums = tl.load(sums + r, mask=here, other=0.0)
        own_grads = tl.load(grad + r, mask=here, other=0.0)
        z = _scores(left, right, correction, of, own_ids, j, num_candidates, precision)
        # Rows beyond the last have no vector and no gradient: nothing of theirs is added.
        shares = tl.where(here[:, None], tl.exp(z - own_sums[:, None]) * own_grads[:, None], 0.0)
        total += tl.dot(tl.trans(shares), left, input_precision=precision)
    _store(dv, total, j, j < num_candidates, dim, dim_block)

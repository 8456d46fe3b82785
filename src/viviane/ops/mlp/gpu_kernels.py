"""The Triton kernels of fully connected layers: the masked backward product, and an output of width 1."""

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.triton_parts.product import tile_product


@triton.jit(do_not_specialize=["size"])
def input_gradient_kernel(
    grad,
    weight,
    below,
    out,
    partial,
    size,
    width,
    depth,
    relu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """out = (grad W) where below > 0, and the sums of its columns over this tile's rows.

    grad (M, K), W (K, N), below and out (M, N) by tensor copies; partial (M / rows, N), float32.
    """
    across = tl.cdiv(width, columns)
    m, n = tl.program_id(0) // across, tl.program_id(0) % across
    dx = tile_product(grad, weight, m * rows, n * columns, depth, rows, columns, step, False)
    if relu:
        # Rows past the last are read as zeros, so that they are masked too.
        dx = tl.where(below.load([m * rows, n * columns]) > 0, dx, 0.0)
    out.store([m * rows, n * columns], dx.to(out.dtype))
    cols = n * columns + tl.arange(0, columns)
    tl.store(partial + m.to(tl.int64) * width + cols, tl.sum(dx, 0), mask=cols < width)


@triton.jit(do_not_specialize=["size"])
def narrow_forward_kernel(
    x,
    weight,
    bias,
    out,
    size,
    dim: tl.constexpr,
    relu: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """out[b] = x[b] . w + bias for `rows` rows."""
    r = tl.program_id(0) * rows + tl.arange(0, rows)
    cols = tl.arange(0, block)
    here = (r < size)[:, None] & (cols < dim)[None, :]
    vectors = tl.load(x + (r.to(tl.int64) * dim)[:, None] + cols[None, :], mask=here, other=0.0).to(tl.float32)
    w = tl.load(weight + cols, mask=cols < dim, other=0.0).to(tl.float32)
    y = tl.sum(vectors * w[None, :], 1) + tl.load(bias).to(tl.float32)
    if relu:
        y = tl.maximum(y, 0.0)
    tl.store(out + r, y.to(out.dtype.element_ty), mask=r < size)


@triton.jit(do_not_specialize=["size"])
def narrow_backward_kernel(
    grad,
    x,
    weight,
    out,
    partial,
    size,
    dim: tl.constexpr,
    relu: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    turns: tl.constexpr,
):
    """out[b] = grad[b] w, where x[b] > 0 if `relu`; sums for the biases below, the weights, and this bias.

    Each program takes `turns` times `rows` rows. partial (programs, 2 dim + 1) holds its three sums side by side;
    without `out` the first is left alone.
    """
    cols = tl.arange(0, block)
    w = tl.load(weight + cols, mask=cols < dim, other=0.0).to(tl.float32)
    below = tl.zeros([rows, block], dtype=tl.float32)
    weights = tl.zeros([rows, block], dtype=tl.float32)
    own = tl.zeros([rows], dtype=tl.float32)
    for turn in range(turns):
        r = (tl.program_id(0) * turns + turn) * rows + tl.arange(0, rows)
        here = (r < size)[:, None] & (cols < dim)[None, :]
        place = (r.to(tl.int64) * dim)[:, None] + cols[None, :]
        vectors = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + r, mask=r < size, other=0.0).to(tl.float32)
        weights += g[:, None] * vectors
        own += g
        if out is not None:
            dx = g[:, None] * w[None, :]
            if relu:
                dx = tl.where(vectors > 0, dx, 0.0)
            below += dx
            tl.store(out + place, dx.to(out.dtype.element_ty), mask=here)
    base = partial + tl.program_id(0).to(tl.int64) * (2 * dim + 1)
    if out is not None:
        tl.store(base + cols, tl.sum(below, 0), mask=cols < dim)
    tl.store(base + dim + cols, tl.sum(weights, 0), mask=cols < dim)
    tl.store(base + 2 * dim, tl.sum(own, 0))


@triton.jit(do_not_specialize=["size"])
def widen_kernel(x, out, size, width, new_width, rows: tl.constexpr, block: tl.constexpr):
    """Copy (M, N) into (M, N') of another dtype, N' > N, with zeros behind."""
    r = tl.program_id(0) * rows + tl.arange(0, rows)
    cols = tl.arange(0, block)
    here = (r < size)[:, None] & (cols < width)[None, :]
    values = tl.load(x + (r.to(tl.int64) * width)[:, None] + cols[None, :], mask=here, other=0.0)
    target = out + (r.to(tl.int64) * new_width)[:, None] + cols[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=(r < size)[:, None] & (cols < new_width)[None, :])

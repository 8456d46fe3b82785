"""The Triton kernels of cross layers: products that do the element-wise work on their tiles before storing them."""

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.triton_parts.arithmetic import report_largest
from viviane.ops.triton_parts.product import tile_product


@triton.jit(do_not_specialize=["size"])
def cross_forward_kernel(
    u,
    weight,
    bias,
    first,
    x,
    y_out,
    out,
    size,
    width,
    depth,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """y = u W^T + b and out = first * y + x, all (M, N) by tensor copies; u (M, K), W (N, K); `y_out` may be None."""
    across = tl.cdiv(width, columns)
    m, n = tl.program_id(0) // across, tl.program_id(0) % across
    y = tile_product(u, weight, m * rows, n * columns, depth, rows, columns, step, True)
    cols = n * columns + tl.arange(0, columns)
    y += tl.load(bias + cols, mask=cols < width, other=0.0).to(tl.float32)[None, :]
    if y_out is not None:
        y_out.store([m * rows, n * columns], y.to(y_out.dtype))
    result = first.load([m * rows, n * columns]).to(tl.float32) * y
    result += x.load([m * rows, n * columns]).to(tl.float32)
    out.store([m * rows, n * columns], result.to(out.dtype))


@triton.jit(do_not_specialize=["size"])
def cross_backward_kernel(
    du,
    weight,
    grad,
    first,
    out,
    scaled,
    partial,
    size,
    width,
    depth,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """out = du V + grad, scaled = out * first and its column sums; du (M, K), V (K, N), the others (M, N)."""
    across = tl.cdiv(width, columns)
    m, n = tl.program_id(0) // across, tl.program_id(0) % across
    g = tile_product(du, weight, m * rows, n * columns, depth, rows, columns, step, False)
    g += grad.load([m * rows, n * columns]).to(tl.float32)
    out.store([m * rows, n * columns], g.to(out.dtype))
    g *= first.load([m * rows, n * columns]).to(tl.float32)
    scaled.store([m * rows, n * columns], g.to(scaled.dtype))
    cols = n * columns + tl.arange(0, columns)
    tl.store(partial + m.to(tl.int64) * width + cols, tl.sum(g, 0), mask=cols < width)


@triton.jit(do_not_specialize=["size"])
def cross_last_kernel(
    du,
    weight,
    top,
    grads,
    ys,
    out,
    status,
    size,
    width,
    depth,
    layers: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """out = du V + g_1 + sum over l of g_{l+1} * y_l: the gradient of x, which is x_0 and every layer's factor.

    `grads` holds g_1 ... g_{L-1} below one another, ((L - 1) M, N), `ys` y_0 ... y_{L-1}, (L M, N); `top` is g_L. NaN
    and infinity set `status`.
    """
    across = tl.cdiv(width, columns)
    m, n = tl.program_id(0) // across, tl.program_id(0) % across
    dx = tile_product(du, weight, m * rows, n * columns, depth, rows, columns, step, False)
    for layer in tl.static_range(layers):
        # Rows past the last are the next layer's: read, multiplied, and never stored.
        y = ys.load([layer * size + m * rows, n * columns]).to(tl.float32)
        if layer == layers - 1:
            g = top.load([m * rows, n * columns]).to(tl.float32)
        else:
            g = grads.load([layer * size + m * rows, n * columns]).to(tl.float32)
        dx += g * y
        if layer == 0:
            dx += g
    value = dx.to(out.dtype)
    out.store([m * rows, n * columns], value)
    if status is not None:
        here = (m * rows + tl.arange(0, rows) < size)[:, None] & (n * columns + tl.arange(0, columns) < width)[None, :]
        report_largest(tl.where(here, value, 0.0), status)

"""The Triton kernels of cross layers: products that do the element-wise work on their tiles before storing them.

Operands of products come by tensor copies; the other matrices are read where they are used or, with `early`, asked for
before the product, so that memory works while tensor cores do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.triton_parts.product import tile_places, tile_product


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
    early: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """y = u W^T + b and out = first * y + x, all (M, N); u (M, K), W (N, K)."""
    across = tl.cdiv(width, columns)
    m, n = tl.program_id(0) // across, tl.program_id(0) % across
    place, here = tile_places(m * rows, n * columns, size, width, rows, columns)
    if early:
        factor, below = tl.load(first + place, mask=here, other=0.0), tl.load(x + place, mask=here, other=0.0)
    y = tile_product(u, weight, m * rows, n * columns, depth, rows, columns, step, True)
    if not early:
        factor, below = tl.load(first + place, mask=here, other=0.0), tl.load(x + place, mask=here, other=0.0)
    cols = n * columns + tl.arange(0, columns)
    y += tl.load(bias + cols, mask=cols < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y_out + place, y.to(y_out.dtype.element_ty), mask=here)
    result = factor.to(tl.float32) * y + below.to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=here)


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
    early: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """out = du V + grad, scaled = out * first and its column sums; du (M, K), V (K, N), the others (M, N)."""
    across = tl.cdiv(width, columns)
    m, n = tl.program_id(0) // across, tl.program_id(0) % across
    place, here = tile_places(m * rows, n * columns, size, width, rows, columns)
    if early:
        above, factor = tl.load(grad + place, mask=here, other=0.0), tl.load(first + place, mask=here, other=0.0)
    g = tile_product(du, weight, m * rows, n * columns, depth, rows, columns, step, False)
    if not early:
        above, factor = tl.load(grad + place, mask=here, other=0.0), tl.load(first + place, mask=here, other=0.0)
    g += above.to(tl.float32)
    tl.store(out + place, g.to(out.dtype.element_ty), mask=here)
    g *= factor.to(tl.float32)
    tl.store(scaled + place, g.to(scaled.dtype.element_ty), mask=here)
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
    size,
    width,
    depth,
    layers: tl.constexpr,
    early: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """out = du V + g_1 + sum over l of g_{l+1} * y_l: the gradient of x, which is x_0 and every layer's factor.

    `grads` holds g_1 ... g_{L-1}, (L - 1, M, N), `ys` y_0 ... y_{L-1}, (L, M, N); `top` is g_L.
    """
    across = tl.cdiv(width, columns)
    m, n = tl.program_id(0) // across, tl.program_id(0) % across
    place, here = tile_places(m * rows, n * columns, size, width, rows, columns)
    layer_size = size.to(tl.int64) * width
    if early:
        last, factor = (
            tl.load(top + place, mask=here, other=0.0),
            tl.load(ys + (layers - 1) * layer_size + place, mask=here, other=0.0),
        )
    dx = tile_product(du, weight, m * rows, n * columns, depth, rows, columns, step, False)
    for layer in tl.static_range(layers - 1):
        g = tl.load(grads + layer * layer_size + place, mask=here, other=0.0).to(tl.float32)
        dx += g * tl.load(ys + layer * layer_size + place, mask=here, other=0.0).to(tl.float32)
        if layer == 0:
            dx += g
    if not early:
        last, factor = (
            tl.load(top + place, mask=here, other=0.0),
            tl.load(ys + (layers - 1) * layer_size + place, mask=here, other=0.0),
        )
    dx += last.to(tl.float32) * factor.to(tl.float32)
    if layers == 1:
        dx += last.to(tl.float32)
    tl.store(out + place, dx.to(out.dtype.element_ty), mask=here)

"""Cross layers on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.cross_layers.gpu_kernels import cross_backward_kernel, cross_forward_kernel, cross_last_kernel
from viviane.ops.cuda_parts import product
from viviane.ops.finished_gradients import tell_of_gradient
from viviane.ops.packing import packing
from viviane.ops.triton_parts.gate import gated_gradient
from viviane.ops.triton_parts.launch import ceil_div, on_device
from viviane.ops.triton_parts.product import TileShape, fits_tensor_copies, tiles_of
from viviane.ops.triton_parts.sums import ColumnSums
from viviane.ops.triton_parts.weights import pack_weights, weight_gradient
from viviane.ops.watch import watched

# What an H200 was quickest with, at (8192, 3456) and rank 512.
FORWARD = TileShape(128, 128, 64, 4, 3)
BACKWARD = TileShape(128, 128, 64, 4, 3)
LAST = TileShape(64, 128, 64, 4, 4)


def forward(
    x: Tensor,
    projections: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    dtype: torch.dtype,
    packed: Tensor | None = None,
) -> list[Tensor]:
    """Return x_1 ... x_L, the u_l where there are projections, the y_l in one tensor (L, B, n), and packed weights.

    Packed ones that were given are not returned: an empty tensor replaces them.
    """
    first = x.to(dtype).contiguous()
    whole, ws, vs, bs = _packed(projections, weights, biases, dtype, packed)
    layers = len(weights)
    ys = first.new_empty(layers, *first.shape)
    xs, us = [first], []
    for index in range(layers):
        u = xs[-1] @ vs[index].t() if vs else xs[-1]
        xs.append(cross_forward(u, ws[index], bs[index], first, xs[-1], ys[index]))
        us += [u] if vs else []
    return [*xs[1:], *us, ys, whole if packed is None else x.new_empty(0, dtype=dtype)]


def predict(
    x: Tensor,
    projections: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    dtype: torch.dtype,
    packed: Tensor | None = None,
) -> Tensor:
    """Return x_L with the bits of `forward`; what its gradient would need is not stored."""
    first = last = x.to(dtype).contiguous()
    _, ws, vs, bs = _packed(projections, weights, biases, dtype, packed)
    for index, (weight, bias) in enumerate(zip(ws, bs, strict=True)):
        last = cross_forward(last @ vs[index].t() if vs else last, weight, bias, first, last, None)
    return last


def _packed(
    projections: list[Tensor], weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype, packed: Tensor | None
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Return all packed weights, and the W_l, V_l and b_l among them."""
    every = [*weights, *projections, *biases]
    whole = pack_weights(every, dtype) if packed is None else packed
    parts = packing([one.shape for one in every], dtype).parts(whole)
    return whole, *_matrices(parts, weights, projections), parts[-len(biases) :]


def _matrices(
    parts: list[Tensor], weights: list[Tensor], projections: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return W_l and V_l, without the zeros behind padded rows."""
    every = [part[:, : one.shape[1]] for part, one in zip(parts, [*weights, *projections], strict=False)]
    return every[: len(weights)], every[len(weights) :]


def cross_forward(u: Tensor, weight: Tensor, bias: Tensor, first: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
    """Fill y = u W^T + b, unless it is None, and return first * y + x."""
    if not fits_tensor_copies(u, weight, first, x):
        y = torch.addmm(bias, u, weight.t()) if y is None else torch.addmm(bias, u, weight.t(), out=y)
        return torch.addcmul(x, first, y)
    if product.serves(u, weight, bias.view(1, -1)):
        out = torch.empty_like(first)
        product.multiply(product.FORWARD, u, weight, [first, x, y, out], bias=bias)
        return out
    return fused_cross_forward(u, weight, bias, first, x, y, FORWARD)


def fused_cross_forward(
    u: Tensor, weight: Tensor, bias: Tensor, first: Tensor, x: Tensor, y: Tensor | None, shape: TileShape
) -> Tensor:
    """Do the same in one kernel."""
    (size, width), depth = first.shape, u.shape[1]
    out = torch.empty_like(first)
    with on_device(u):
        cross_forward_kernel[(ceil_div(size, shape.rows) * ceil_div(width, shape.columns),)](
            tiles_of(u, shape.rows, shape.depth), tiles_of(weight, shape.columns, shape.depth), bias,
            *(None if one is None else tiles_of(one, shape.rows, shape.columns) for one in (first, x, y, out)), size,
            width, depth, **shape.options(),
        )  # fmt: skip
    return out


def backward(
    grad: Tensor, x: Tensor, kept: list[Tensor], projections: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of x, the projections, the weights and the biases."""
    dtype, layers = grad.dtype, len(weights)
    first, top = x.to(dtype).contiguous(), grad.contiguous()
    xs, us, ys = [first, *kept[: layers - 1]], kept[layers:-2], kept[-2]
    biases = [one.shape[:1] for one in weights]
    layout = packing([*(one.shape for one in (*weights, *projections)), *biases], dtype)
    ws, vs = _matrices(layout.parts(kept[-1]), weights, projections)
    grads = top.new_empty(max(1, layers - 1), *top.shape)  # g_1 ... g_{L-1}
    found = [[torch.empty(0)] * layers for _ in range(3)]
    g, sums = top, ColumnSums()
    dy, partial = gated_gradient(g, first, relu=False)
    for index in range(layers - 1, -1, -1):
        found[2][index] = sums.of(partial, weights[index].dtype)
        found[1][index] = weight_gradient(dy, us[index] if us else xs[index], weights[index].dtype)
        tell_of_gradient(weights[index], found[1][index])
        du, back = dy, ws[index]
        if us:
            du, back = dy @ ws[index], vs[index]
            found[0][index] = weight_gradient(du, xs[index], projections[index].dtype)
            tell_of_gradient(projections[index], found[0][index])
        if index:
            g, dy, partial = cross_backward(du, back, g, first, grads[index - 1])
    sums.compute()
    dx = cross_last(du, back, top, grads, ys)
    return [dx.to(x.dtype), *(found[0] if us else []), *found[1], *found[2]]


def cross_backward(
    du: Tensor, weight: Tensor, grad: Tensor, first: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill out = du V + grad; return it, out * first, and partial sums of that product's columns."""
    if not fits_tensor_copies(du, weight, grad, first, out):
        torch.addmm(grad, du, weight, out=out)
        return out, *gated_gradient(out, first, relu=False)
    if product.serves(du):
        scaled = torch.empty_like(out)
        partial = product.multiply(product.BACKWARD, du, weight, [grad, first, scaled, out])
        assert partial is not None
        return out, scaled, partial
    return fused_cross_backward(du, weight, grad, first, out, BACKWARD)


def fused_cross_backward(
    du: Tensor, weight: Tensor, grad: Tensor, first: Tensor, out: Tensor, shape: TileShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same in one kernel."""
    (size, width), depth = grad.shape, du.shape[1]
    scaled = torch.empty_like(out)
    down = ceil_div(size, shape.rows)
    partial = torch.empty(down, width, dtype=torch.float32, device=grad.device)
    with on_device(grad):
        cross_backward_kernel[(down * ceil_div(width, shape.columns),)](
            tiles_of(du, shape.rows, shape.depth), tiles_of(weight, shape.depth, shape.columns),
            *(tiles_of(one, shape.rows, shape.columns) for one in (grad, first, out, scaled)), partial,
            size, width, depth, **shape.options(),
        )  # fmt: skip
    return out, scaled, partial


def cross_last(du: Tensor, weight: Tensor, top: Tensor, grads: Tensor, ys: Tensor) -> Tensor:
    """Return du V + g_1 + sum over l of g_{l+1} * y_l."""
    layers = len(ys)
    if not fits_tensor_copies(du, weight, top, ys[0]):
        every = [*grads[: layers - 1], top]
        out = torch.addmm(every[0], du, weight)
        for g, y in zip(every, ys, strict=True):
            out.addcmul_(g, y)
        return out
    watch = watched(top.device)
    status = None if watch is None else watch.status
    if product.serves(du):
        out = torch.empty_like(top)
        product.multiply(product.LAST, du, weight, [top, grads, ys, out], layers=layers, status=status)
    else:
        out = fused_cross_last(du, weight, top, grads, ys, LAST, status)
    if watch is not None:
        watch.add(out)
    return out


def fused_cross_last(
    du: Tensor, weight: Tensor, top: Tensor, grads: Tensor, ys: Tensor, shape: TileShape, status: Tensor | None = None
) -> Tensor:
    """Do the same in one kernel."""
    (size, width), depth = top.shape, du.shape[1]
    out = torch.empty_like(top)
    with on_device(du):
        cross_last_kernel[(ceil_div(size, shape.rows) * ceil_div(width, shape.columns),)](
            tiles_of(du, shape.rows, shape.depth), tiles_of(weight, shape.depth, shape.columns),
            *(tiles_of(one.view(-1, width), shape.rows, shape.columns) for one in (top, grads, ys, out)),
            status, size, width, depth, layers=len(ys), **shape.options(),
        )  # fmt: skip
    return out

"""Fully connected layers on a GPU: cuBLAS products with their epilogues, Triton's where cuBLAS has none for torch."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.mlp.gpu_kernels import (
    input_gradient_kernel,
    narrow_backward_kernel,
    narrow_forward_kernel,
    widen_kernel,
)
from viviane.ops.triton_parts.gate import gated_gradient
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two
from viviane.ops.triton_parts.product import TileShape, fits_tensor_copies, tiles_of
from viviane.ops.triton_parts.weights import cast_together, weight_gradient

_WIDEST_NARROW = 2048  # inputs of an output of width 1 that a program holds at once
_NARROW_NUMBERS = 8192  # of one tile
_NARROW_PROGRAMS = 528  # four on each of 132 multiprocessors
_COPY_ROWS = 128


def product_shape(rows: int, width: int) -> TileShape:
    """Choose the tile of the masked backward product.

    Example:
        >>> product_shape(65536, 1024).rows
        128
    """
    return TileShape(128, 128, 64, 8, 3)


def forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], relu: list[bool], dtype: torch.dtype
) -> list[Tensor]:
    """Return the activations of every layer, (B, n_l)."""
    below = prepared(x, dtype)
    found = []
    casts = cast_together([*weights[1:], *biases], dtype)
    matrices = [prepared(weights[0], dtype), *casts[: len(weights) - 1]]
    for weight, bias, positive in zip(matrices, casts[len(weights) - 1 :], relu, strict=True):
        if _is_narrow(weight):
            below = _narrow_forward(below, weight, bias, positive)
        elif positive:
            below = torch._addmm_activation(bias, below, weight.t())
        else:
            below = torch.addmm(bias, below, weight.t())
        found.append(below)
    return found


def backward(
    grad: Tensor, x: Tensor, activations: list[Tensor], weights: list[Tensor], relu: list[bool], needs_x: bool
) -> list[Tensor]:
    """Return the gradients of all weights, all biases, and x where asked for."""
    dtype, top = grad.dtype, len(weights) - 1
    inputs = [prepared(x, dtype), *activations[:-1]]
    matrices = [prepared(weights[0], dtype), *cast_together(weights[1:], dtype)]
    weight_grads: list[Tensor | None] = [None] * len(weights)
    sums: list[Tensor | None] = [None] * len(weights)
    dz = grad.contiguous()
    narrow = _is_narrow(matrices[top]) and not relu[top]
    if not narrow:
        dz, partial = gated_gradient(dz, activations[-1] if relu[-1] else None, relu=True)
        sums[top] = partial.sum(0)
    for index in range(top, -1, -1):
        below, wanted = inputs[index], index > 0 or needs_x
        mask = index > 0 and relu[index - 1]
        if narrow and index == top:
            above, (lower, weight_grads[index], sums[index]) = dz, (None, None, None)
            dz, lower, weight_grads[index], sums[index] = _narrow_backward(above, below, matrices[index], mask, wanted)
        else:
            weight_grads[index] = weight_gradient(dz, below, weights[index].dtype)
            lower = None
            if wanted:
                dz, lower = input_gradient(dz, matrices[index], below if mask else None, sums_too=index > 0)
        if index:
            sums[index - 1] = lower
    found = [
        one[:, : weight.shape[1]].to(weight.dtype).contiguous()
        for one, weight in zip(_all(weight_grads), weights, strict=True)
    ]
    found += [one.to(weight.dtype) for one, weight in zip(_all(sums), weights, strict=True)]
    return [*found, dz[:, : x.shape[1]].to(x.dtype).contiguous()] if needs_x else found


def input_gradient(
    grad: Tensor, weight: Tensor, below: Tensor | None, *, sums_too: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return grad W, where `below` > 0 if it is given, and the sums of its columns.

    Args:
        grad: (M, K), weight: (K, N), below: (M, N), of one dtype.
        sums_too: whether the sums are wanted.
    """
    if below is None and not sums_too:
        return grad @ weight, None
    if not fits_tensor_copies(grad, weight):
        out, partial = gated_gradient(grad @ weight, below, relu=True, in_place=True)
        return out, partial.sum(0)
    out, partial = fused_input_gradient(grad, weight, below, product_shape(len(grad), weight.shape[1]))
    return out, partial.sum(0)


def fused_input_gradient(grad: Tensor, weight: Tensor, below: Tensor | None, shape: TileShape) -> tuple[Tensor, Tensor]:
    """Return the masked product, and partial sums of its columns, from one kernel."""
    (size, depth), width = grad.shape, weight.shape[1]
    out = grad.new_empty(size, width)
    down = ceil_div(size, shape.rows)
    partial = torch.empty(down, width, dtype=torch.float32, device=grad.device)
    tiles = tiles_of(out, shape.rows, shape.columns)
    with on_device(grad):
        input_gradient_kernel[(down * ceil_div(width, shape.columns),)](
            tiles_of(grad, shape.rows, shape.depth), tiles_of(weight, shape.depth, shape.columns),
            tiles if below is None else tiles_of(below, shape.rows, shape.columns), tiles, partial, size, width, depth,
            relu=below is not None, rows=shape.rows, columns=shape.columns, step=shape.depth,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    return out, partial


def prepared(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in a dtype, with zeros behind where its rows would not begin at multiples of 16 bytes.

    cuBLAS takes slow kernels for such rows, and 13 dense columns are the rule rather than the exception.
    """
    size, width = matrix.shape
    unit = 16 // dtype.itemsize
    new_width = ceil_div(width, unit) * unit
    matrix = matrix.contiguous()
    if new_width == width:
        return matrix.to(dtype)
    out = torch.empty(size, new_width, dtype=dtype, device=matrix.device)
    rows = max(1, min(_COPY_ROWS, _NARROW_NUMBERS // power_of_two(new_width)))
    with on_device(matrix):
        widen_kernel[(ceil_div(size, rows),)](
            matrix, out, size, width, new_width, rows=rows, block=power_of_two(new_width), num_warps=4
        )
    return out


def _is_narrow(weight: Tensor) -> bool:
    return weight.shape[0] == 1 and weight.shape[1] <= _WIDEST_NARROW


def _narrow_rows(dim: int) -> int:
    return max(1, _NARROW_NUMBERS // power_of_two(dim))


def _narrow_forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    size, dim = x.shape
    out = x.new_empty(size, 1)
    rows = _narrow_rows(dim)
    with on_device(x):
        narrow_forward_kernel[(ceil_div(size, rows),)](
            x, weight, bias, out, size, dim=dim, relu=relu, rows=rows, block=power_of_two(dim), num_warps=4
        )
    return out


def _narrow_backward(
    grad: Tensor, x: Tensor, weight: Tensor, relu: bool, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of x, the sums of its columns, and the gradients of the weights and of the bias."""
    size, dim = x.shape
    rows = _narrow_rows(dim)
    turns = power_of_two(max(1, ceil_div(size, rows * _NARROW_PROGRAMS)))
    programs = ceil_div(size, rows * turns)
    out = torch.empty_like(x) if wanted else None
    partial = torch.empty(programs, 2 * dim + 1, dtype=torch.float32, device=x.device)
    with on_device(x):
        narrow_backward_kernel[(programs,)](
            grad, x, weight, out, partial, size,
            dim=dim, relu=relu, rows=rows, block=power_of_two(dim), turns=turns, num_warps=8,
        )  # fmt: skip
    sums = partial.sum(0)
    return (
        x if out is None else out,
        sums[:dim].clone(),
        sums[dim : 2 * dim].unsqueeze(0).clone(),
        sums[2 * dim :].clone(),
    )


def _all(tensors: list[Tensor | None]) -> list[Tensor]:
    return [one for one in tensors if one is not None]

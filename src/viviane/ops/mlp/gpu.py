"""Fully connected layers on a GPU: cuBLAS products with their epilogues, Triton's where cuBLAS has none for torch."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.finished_gradients import tell_of_gradient
from viviane.ops.mlp.gpu_kernels import (
    input_gradient_kernel,
    narrow_backward_kernel,
    narrow_forward_kernel,
    widen_kernel,
)
from viviane.ops.packing import packing, padded_width
from viviane.ops.triton_parts.gate import gated_gradient
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two
from viviane.ops.triton_parts.product import TileShape, fits_tensor_copies, tiles_of
from viviane.ops.triton_parts.sums import ColumnSums
from viviane.ops.triton_parts.weights import pack_weights, weight_gradient

_MANY_ROWS, _SHORT_DEPTH = 32768, 512
_WIDEST_NARROW = 2048  # inputs of an output of width 1 that a program holds at once
_NARROW_NUMBERS = 8192  # of one tile
_NARROW_PROGRAMS = 264  # two on each of 132 multiprocessors
_NARROW_WARPS = 4
_COPY_ROWS = 128


def product_shape(size: int, depth: int) -> TileShape:
    """Choose the tile of the masked backward product, (size, depth) by (depth, N): what an H200 was quickest with.

    Example:
        >>> product_shape(65536, 1024), product_shape(65536, 512).depth
        (TileShape(rows=128, columns=128, depth=64, warps=4, stages=3), 32)
    """
    if size >= _MANY_ROWS and depth <= _SHORT_DEPTH:  # bound by memory: shorter steps begin sooner
        return TileShape(128, 128, 32, 4, 4)
    return TileShape(128, 128, 64, 4, 3)


def forward(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    relu: list[bool],
    dtype: torch.dtype,
    packed: Tensor | None = None,
) -> list[Tensor]:
    """Return the activations of every layer (B, n_l), the packed weights and biases, and x as the products read it.

    Packed ones that were given are not returned: an empty tensor replaces them.
    """
    whole = pack_weights([*weights, *biases], dtype) if packed is None else packed
    parts = packing([one.shape for one in (*weights, *biases)], dtype).parts(whole)
    below = first = prepared(x, dtype)
    found = []
    for weight, bias, positive in zip(parts[: len(weights)], parts[len(weights) :], relu, strict=True):
        w = weight[:, : below.shape[1]]  # an activation is as wide as its layer, padded or not
        if _is_narrow(w):
            below = _narrow_forward(below, w, bias, positive)
        elif positive:
            below = torch._addmm_activation(bias, below, w.t())
        else:
            below = torch.addmm(bias, below, w.t())
        found.append(below)
    none = x.new_empty(0, dtype=dtype)
    return [*found, whole if packed is None else none, first if is_changed(x, dtype) else none.clone()]


def backward(
    grad: Tensor, x: Tensor, kept: list[Tensor], weights: list[Tensor], relu: list[bool], needs_x: bool
) -> list[Tensor]:
    """Return the gradients of all weights, all biases, and x where asked for."""
    dtype, top = grad.dtype, len(weights) - 1
    *activations, packed, first = kept
    inputs = [first if first.numel() else x.contiguous(), *activations[:-1]]
    layout = packing([*(w.shape for w in weights), *(w.shape[:1] for w in weights)], dtype)
    matrices = [w[:, : one.shape[1]] for w, one in zip(layout.parts(packed), inputs, strict=False)]
    weight_grads, bias_grads = [grad] * (top + 1), [grad] * (top + 1)
    sums, last = ColumnSums(), top  # `last`: the last layer of the loop below
    if _is_narrow(matrices[top]) and not relu[top]:
        last = top - 1
        dtypes = weights[top].dtype, weights[last].dtype
        mask, wanted = top > 0 and relu[last], top > 0 or needs_x
        dz, sums_below, *own = _narrow_backward(grad.contiguous(), inputs[top], matrices[top], mask, wanted, dtypes)
        weight_grads[top], bias_grads[top] = own[0].unsqueeze(0), own[1]
        tell_of_gradient(weights[top], weight_grads[top])
        if top:
            bias_grads[last] = sums_below
    else:
        dz, partial = gated_gradient(grad, activations[-1] if relu[-1] else None, relu=True)
        bias_grads[top] = sums.of(partial, weights[top].dtype)
    for index in range(last, -1, -1):
        below, wanted, mask = inputs[index], index > 0 or needs_x, index > 0 and relu[index - 1]
        weight_grads[index] = weight_gradient(dz, below, weights[index].dtype)
        tell_of_gradient(weights[index], weight_grads[index])
        if wanted:
            dz, partial = input_gradient(dz, matrices[index], below if mask else None, sums_too=index > 0)
        if index:
            bias_grads[index - 1] = sums.of(partial, weights[index - 1].dtype)
    sums.compute()
    found = [*(_first_columns(one, w.shape[1]) for one, w in zip(weight_grads, weights, strict=True)), *bias_grads]
    return [*found, _first_columns(dz, x.shape[1]).to(x.dtype)] if needs_x else found


def _first_columns(matrix: Tensor, count: int) -> Tensor:
    return matrix if matrix.shape[1] == count else matrix[:, :count].contiguous()


def input_gradient(
    grad: Tensor, weight: Tensor, below: Tensor | None, *, sums_too: bool = True
) -> tuple[Tensor, Tensor]:
    """Return grad W, where `below` > 0 if it is given, and partial sums of its columns, if they are wanted.

    Args:
        grad: (M, K), weight: (K, N), below: (M, N), of one dtype.
        sums_too: see above.
    """
    if below is None and not sums_too:
        return grad @ weight, grad
    if not fits_tensor_copies(grad, weight):
        return gated_gradient(grad @ weight, below, relu=True, in_place=True)
    return fused_input_gradient(grad, weight, below, product_shape(*grad.shape))


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
            tiles if below is None else tiles_of(below, shape.rows, shape.columns), tiles, partial,
            size, width, depth, relu=below is not None, **shape.options(),
        )  # fmt: skip
    return out, partial


def prepared(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype, with zeros behind where its rows would not begin at multiples of 16 bytes.

    cuBLAS takes slow kernels for such rows, and 13 dense columns are the rule rather than the exception.
    """
    size, width = x.shape
    x = x.contiguous()
    new_width = padded_width(width, dtype)
    if new_width == width:
        return x.to(dtype)
    out = torch.empty(size, new_width, dtype=dtype, device=x.device)
    rows = max(1, min(_COPY_ROWS, _NARROW_NUMBERS // power_of_two(new_width)))
    with on_device(x):
        widen_kernel[(ceil_div(size, rows),)](
            x, out, size, width, new_width, rows=rows, block=power_of_two(new_width), num_warps=4
        )
    return out


def is_changed(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `prepared` makes another tensor of x."""
    return x.dtype != dtype or padded_width(x.shape[1], dtype) != x.shape[1]


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
    grad: Tensor, x: Tensor, weight: Tensor, relu: bool, wanted: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> list[Tensor]:
    """Return the gradient of x, the sums of its columns, and the gradients of the weights and of the bias.

    Args:
        dtypes: of the layer's weights, and of those of the layer below.
    """
    dtype, lower = dtypes
    size, dim = x.shape
    rows = _narrow_rows(dim)
    turns = power_of_two(max(1, ceil_div(size, rows * _NARROW_PROGRAMS)))
    programs = ceil_div(size, rows * turns)
    out = torch.empty_like(x) if wanted else None
    partial = torch.empty(programs, 2 * dim + 1, dtype=torch.float32, device=x.device)
    with on_device(x):
        narrow_backward_kernel[(programs,)](
            grad, x, weight, out, partial, size,
            dim=dim, relu=relu, rows=rows, block=power_of_two(dim), turns=turns, num_warps=_NARROW_WARPS,
        )  # fmt: skip
    sums = ColumnSums()
    found = [
        sums.of(partial, lower, 0, dim),
        sums.of(partial, dtype, dim, dim),
        sums.of(partial, dtype, 2 * dim),
    ]
    sums.compute()
    return [x if out is None else out, *found]

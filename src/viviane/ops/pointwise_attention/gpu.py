"""Pointwise attention on a GPU.

Forward and the gradients of q, k and v have a program for each block of places of each head. The biases' gradients are
sums over all rows and heads: their programs own a tile of (L, L) each and go through a share of the rows, so that
every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from viviane.ops.pointwise_attention.gpu_kernels import bias_kernel, forward_kernel, key_value_kernel, query_kernel
from viviane.ops.triton_parts.arithmetic import dot_precision
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

_BLOCK = 32  # places of a tile
_SHARES = 64  # of the rows and heads, for the biases


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None,
    times: Tensor | None,
    time_bias: Tensor | None,
    unit: int,
) -> Tensor:
    """Return y."""
    inputs = _contiguous(q, k, v, held, position, times, time_bias)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    batch, length, heads, _ = q.shape
    with on_device(q):
        forward_kernel[(batch * heads, ceil_div(length, _BLOCK))](
            *inputs, out, length, heads, unit, **_sizes(q, v, time_bias), num_warps=4
        )
    return out


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None,
    times: Tensor | None,
    time_bias: Tensor | None,
    unit: int,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, p and r; empty ones for a bias that is not there."""
    inputs = _contiguous(q, k, v, held, position, times, time_bias)
    grad = grad.contiguous()
    dq, dk, dv = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))
    batch, length, heads, _ = q.shape
    blocks, sizes = ceil_div(length, _BLOCK), _sizes(q, v, time_bias)
    with on_device(q):
        query_kernel[(batch * heads, blocks)](*inputs, grad, dq, length, heads, unit, **sizes, num_warps=4)
        key_value_kernel[(batch * heads, blocks)](*inputs, grad, dk, dv, length, heads, unit, **sizes, num_warps=4)
    by_place, by_time = _biases(inputs, grad, unit)
    return dq, dk, dv, by_place, by_time


def _biases(inputs: list[Tensor | None], grad: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    q, _, v, _, position, _, time_bias = inputs
    assert q is not None
    assert v is not None
    by_place, by_time = (q.new_empty(0, dtype=torch.float32) for _ in range(2))
    if position is None and time_bias is None:
        return by_place, by_time
    batch, length, heads, _ = q.shape
    shares, blocks = min(_SHARES, batch * heads), ceil_div(length, _BLOCK)
    sizes = _sizes(q, v, time_bias)
    tiles = None if position is None else q.new_zeros((shares, length, length), dtype=torch.float32)
    times = None
    if time_bias is not None:
        times = q.new_zeros((shares, blocks, blocks, sizes["buckets_block"]), dtype=torch.float32)
    with on_device(q):
        bias_kernel[(shares, blocks, blocks)](
            *inputs, grad, tiles, times, length, heads, unit, batch * heads, **sizes, num_warps=4
        )
    if tiles is not None:
        by_place = _along_diagonals(tiles.sum(0))
    if times is not None:
        by_time = times.sum((0, 1, 2))[: sizes["num_buckets"]].clone()
    return by_place, by_time


def _along_diagonals(tile: Tensor) -> Tensor:
    """Return for each offset o the sum of tile[i, i - o]."""
    place = torch.arange(len(tile), device=tile.device)
    other = place.unsqueeze(1) - place  # i - o
    return (tile.gather(1, other.clamp_min(0)) * (other >= 0)).sum(0)


def _contiguous(*inputs: Tensor | None) -> list[Tensor | None]:
    return [None if one is None else one.contiguous() for one in inputs]


def _sizes(q: Tensor, v: Tensor, time_bias: Tensor | None) -> dict[str, Any]:
    """Return the kernels' constants; tiles of a product have at least 16 columns."""
    num_buckets = 0 if time_bias is None else len(time_bias)
    return {
        "dim": q.shape[-1],
        "value_dim": v.shape[-1],
        "dim_block": max(16, power_of_two(q.shape[-1])),
        "value_block": max(16, power_of_two(v.shape[-1])),
        "num_buckets": num_buckets,
        "buckets_block": power_of_two(max(num_buckets, 1)),
        "block": _BLOCK,
        "precision": dot_precision(),
    }

"""The normaliser of a softmax over candidates on a GPU.

L and du have a program for each block of rows, which goes through all candidates; dv one for each block of candidates,
which goes through all rows that count. Every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from viviane.ops.candidate_sums.gpu_kernels import candidate_kernel, row_kernel, sum_kernel
from viviane.ops.triton_parts.arithmetic import dot_precision
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

_WIDE = 128  # from here on tiles are half as large


def forward(
    u: Tensor, v: Tensor, correction: Tensor, own: Tensor, ids: Tensor, of: Tensor, order: Tensor, count: Tensor
) -> Tensor:
    """Return L, (B,)."""
    u, v = u.contiguous(), v.contiguous()
    sums, sizes = own.clone(memory_format=torch.contiguous_format), _sizes(u)
    with on_device(u):
        sum_kernel[(ceil_div(len(u), sizes["rows"]),)](
            u, v, correction.contiguous(), sums, ids.contiguous(), of.contiguous(), order, count, len(v), **sizes
        )
    return sums


def backward(
    u: Tensor, v: Tensor, correction: Tensor, sums: Tensor, ids: Tensor, of: Tensor, order: Tensor, count: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return du and dv."""
    u, v, sizes = u.contiguous(), v.contiguous(), _sizes(u)
    du, dv = torch.zeros_like(u), torch.empty_like(v)
    inputs = (u, v, correction.contiguous(), sums, ids.contiguous(), of.contiguous(), order, count, grad.contiguous())
    with on_device(u):
        row_kernel[(ceil_div(len(u), sizes["rows"]),)](*inputs, du, len(v), **sizes)
        candidate_kernel[(ceil_div(len(v), sizes["candidates"]),)](*inputs, dv, len(v), **sizes)
    return du, dv


def _sizes(u: Tensor) -> dict[str, Any]:
    """Return the kernels' constants; tiles of a product have at least 16 columns."""
    dim = u.shape[1]
    block = 64 if dim <= _WIDE else 32
    return {
        "dim": dim, "dim_block": max(16, power_of_two(dim)), "rows": block, "candidates": block,
        "precision": dot_precision(), "num_warps": 4,
    }  # fmt: skip

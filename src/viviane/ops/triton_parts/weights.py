"""Weights of dense layers on a GPU: brought to the products' dtype in one launch, their gradients kept in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def cast_together(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Bring tensors to a dtype, contiguous, in one launch.

    Example:
        >>> [one.dtype for one in cast_together([torch.ones(2), torch.ones(3)], torch.bfloat16)]
        [torch.bfloat16, torch.bfloat16]
    """
    if all(one.dtype == dtype and one.is_contiguous() for one in tensors):
        return list(tensors)
    found = [torch.empty(one.shape, dtype=dtype, device=one.device) for one in tensors]
    torch._foreach_copy_(found, [one.detach() for one in tensors])
    return found


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad^T x, summed in float32 and, where the weights are float32, not rounded to 16 bits on the way.

    Example:
        >>> weight_gradient(torch.ones(2, 1).half(), torch.ones(2, 3).half(), torch.float32).tolist()
        [[2.0, 2.0, 2.0]]
    """
    if dtype != torch.float32 or grad.dtype == dtype:
        return (grad.t() @ x).to(dtype)
    if not grad.is_cuda:  # the interpreter's tensors
        return grad.float().t() @ x.float()
    return torch.mm(grad.t(), x, out_dtype=torch.float32)

"""Binary cross-entropy and its gradient on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.logistic_loss.gpu_kernels import logistic_loss_kernel
from viviane.ops.triton_parts.launch import ceil_div, on_device

_BLOCK = 512


def forward(
    logits: Tensor, labels: Tensor, weight: Tensor | None, negative: float, positive: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient to the logits, float32."""
    logits, labels = logits.contiguous(), labels.contiguous()
    size = logits.numel()
    slope = torch.empty_like(logits, dtype=torch.float32)
    partial = torch.empty(ceil_div(size, _BLOCK), dtype=torch.float32, device=logits.device)
    divisor = None
    if weight is not None:
        weight = weight.contiguous()
        divisor = weight.sum(dtype=torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    with on_device(logits):
        logistic_loss_kernel[(len(partial),)](
            logits, labels, weight, divisor, slope, partial, size, negative, positive, smoothing,
            block=_BLOCK, num_warps=4,
        )  # fmt: skip
    return partial.sum(), slope

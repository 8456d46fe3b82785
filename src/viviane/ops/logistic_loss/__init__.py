"""Binary cross-entropy from logits, with its gradient from the same pass.

    l_b = log(1 + e^z_b) - t_b z_b       t_b = y_b (1 - s) + s / 2       c_b = c_0 + (c_1 - c_0) y_b
    loss = sum_b c_b w_b l_b / D         dloss/dz_b = c_b w_b (sigmoid(z_b) - t_b) / D

D is B, or the sum of the weights w where they are given. z, y and w are (B,).

On a GPU one kernel computes losses and gradients, a second adds the losses up; torch's own functions need about ten
launches for the two, and B numbers are so few that launches are all that counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.dispatch import kernels_serve
from viviane.ops.logistic_loss.operator import logistic_loss_kernel
from viviane.ops.logistic_loss.reference import logistic_loss as plain

__all__ = ["logistic_loss", "reason"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def logistic_loss(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    class_weights: tuple[float, float] = (1.0, 1.0),
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss, a float32 number.

    Args:
        logits, labels: (B,).
        weight: (B,), or None; if all are 0 the loss is 0.
        class_weights, label_smoothing: c_0, c_1 and s above.

    Example:
        >>> round(logistic_loss(torch.zeros(2), torch.tensor([0.0, 1.0])).item(), 4)
        0.6931
    """
    if reason(logits, labels, weight) is not None:
        return plain(logits, labels, weight, class_weights, label_smoothing)
    return logistic_loss_kernel(logits, labels, weight, *class_weights, label_smoothing)


def reason(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> str | None:
    """Return the reason why plain torch is used for these inputs, or None if the kernel does.

    Example:
        >>> reason(torch.ones(1), torch.ones(1))
        'no GPU, or VIVIANE_OPS: plain torch'
    """
    if not kernels_serve(logits.device):
        return "no GPU, or VIVIANE_OPS: plain torch"
    if logits.dtype not in _TYPES:
        return "only float32, bfloat16 and float16 have a kernel"
    if labels.requires_grad or (weight is not None and weight.requires_grad):
        return "the kernel has gradients of the logits alone"
    if not logits.numel():
        return "nothing to compute"
    return None

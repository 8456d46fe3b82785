"""Binary cross-entropy from logits in plain torch: the truth, and what serves on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def logistic_loss(
    logits: Tensor, labels: Tensor, weight: Tensor | None, class_weights: tuple[float, float], label_smoothing: float
) -> Tensor:
    """Return the weighted mean of the losses; float64 stays float64, all else is computed in float32."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logits, labels = logits.to(wide), labels.to(wide)
    targets = labels * (1 - label_smoothing) + label_smoothing / 2 if label_smoothing else labels
    if weight is None and class_weights == (1.0, 1.0):
        return F.binary_cross_entropy_with_logits(logits, targets)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    if class_weights != (1.0, 1.0):
        losses = losses * (class_weights[0] + (class_weights[1] - class_weights[0]) * labels)
    if weight is None:
        return losses.mean()
    weight = weight.to(wide)
    return (losses * weight).sum() / weight.sum().clamp_min(torch.finfo(wide).tiny)

"""Fully connected layers in plain torch: the truth, and what serves on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], relu: Sequence[bool]) -> Tensor:
    """Return act(... act(x W_1^T + b_1) ... W_L^T + b_L)."""
    for weight, bias, positive in zip(weights, biases, relu, strict=True):
        x = F.linear(x, weight, bias)
        if positive:
            x = F.relu(x)
    return x

"""Cross layers in plain torch: the truth, and what serves on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_layers(
    x: Tensor, projections: Sequence[Tensor] | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Return x_L of x_{l+1} = x_0 * (W_l u_l + b_l) + x_l, u_l = V_l x_l or x_l."""
    first = x
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        u = x if projections is None else F.linear(x, projections[index])
        x = torch.addcmul(x, first, F.linear(u, weight, bias))
    return x

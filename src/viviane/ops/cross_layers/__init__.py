"""Cross layers of the Deep & Cross Network v2: x_{l+1} = x_0 * y_l + x_l, y_l = W_l u_l + b_l, u_l = V_l x_l or x_l.

Shapes: B rows, n their width, k the rank, L layers.

On a GPU the product W_l u_l forms x_{l+1} before it is stored, and the backward product forms both what flows down and
x_0 times it, with the sums of the columns for the bias; what flows to x_0 from all layers is added up once, in the last
product. On the CPU `viviane.ops.linear` makes predictions. Elsewhere, and where `reason` returns a reason, plain torch
computes it.

Source: Wang et al. 2021 (DCN v2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.core.errors import SchemaError
from viviane.ops.cross_layers.operator import cross_layers_kernels
from viviane.ops.cross_layers.reference import cross_layers as plain
from viviane.ops.dispatch import kernels_serve
from viviane.ops.linear import linear
from viviane.ops.linear import reason as linear_reason

__all__ = ["cross_layers", "reason"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def cross_layers(
    x: Tensor, projections: Sequence[Tensor] | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Return the last cross layer's output, (B, n).

    On a GPU products, and what is kept between layers, are of autocast's dtype where it is on, else of the input's.

    Args:
        x: (B, n).
        projections: V_l (k, n), or None for full rank.
        weights: W_l (n, k), or (n, n) for full rank.
        biases: b_l (n).

    Raises:
        SchemaError: shapes that do not fit.

    Example:
        >>> x = torch.tensor([[2.0, 3.0]])
        >>> cross_layers(x, None, [torch.eye(2)], [torch.ones(2)]).tolist()
        [[8.0, 15.0]]
    """
    n = x.shape[-1]
    backs = weights if projections is None else projections
    fits = x.dim() == 2 and len(weights) == len(biases) == len(backs) > 0
    fits = fits and all(w.shape == v.shape[::-1] and w.shape[0] == n for w, v in zip(weights, backs, strict=True))
    if not fits or any(tuple(bias.shape) != (n,) for bias in biases):
        given = ", ".join(str(tuple(one.shape)) for one in (x, *(projections or ()), *weights, *biases))
        raise SchemaError(
            "cross layers take x (B, n), projections (k, n), weights (n, k) and biases (n), one each a layer",
            value=given,
        )
    if linear_reason(x, weights[0]) is None:
        return _in_linear_layers(x, projections, weights, biases)
    if reason(x, weights) is not None:
        return plain(x, projections, weights, biases)
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return cross_layers_kernels(x, projections or [], weights, biases, dtype)


def _in_linear_layers(
    x: Tensor, projections: Sequence[Tensor] | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    first = x
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        u = x if projections is None else linear(x, projections[index], None)
        x = linear(u, weight, bias, cross=(first, x))
    return x


def reason(x: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Return the reason why plain torch is used for these inputs, or None if the kernels do.

    Example:
        >>> reason(torch.ones(1, 2), [torch.ones(2, 2)])
        'no GPU, or VIVIANE_OPS: plain torch'
    """
    if not kernels_serve(x.device):
        return "no GPU, or VIVIANE_OPS: plain torch"
    if any(one.dtype not in _TYPES for one in (x, *weights)):
        return "only float32, bfloat16 and float16 have kernels"
    if not x.numel():
        return "nothing to compute"
    return None

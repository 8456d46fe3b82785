"""The cross layers as a chain of functions, one a layer, for autograd as it runs.

As one operator they would give all gradients at once, when the first layer's are there; so those of a later layer
leave for the other processes while backward is at the layers before it. The kernels and the bits are the operator's.

Shapes: B samples, n columns, rank k, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.ops.cross_layers import gpu
from viviane.ops.triton_parts.gate import gated_gradient


@dataclass
class _Pass:
    """What forward leaves for the functions of the layers, and their backwards hand on to one another.

    Args:
        made: x_1 ... x_L, (B, n) each; taken by the functions that return them.
        kept: for each layer what its own backward reads.
    """

    made: list[Tensor]
    kept: list[list[Tensor]]
    under_way: dict[str, Tensor] = field(default_factory=dict)


def cross_chain(
    x: Tensor,
    projections: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    """Return x_L; arguments as of `viviane.ops.cross_layers.operator`."""
    layers = len(weights)
    with torch.no_grad():
        found = gpu.forward(x, list(projections), list(weights), list(biases), dtype, packed)
        ws, vs = gpu.matrices_of(found[-1] if packed is None else packed, weights, projections, dtype)
    us = found[layers:-2]
    kept = [[ws[i], *(one[i] for one in (vs, us) if one)] for i in range(layers)]
    kept[0].append(found[-2])  # all y_l
    kept[-1].append(x)
    run, out = _Pass(found[:layers], kept), x
    for i in range(layers):
        out = _Layer.apply(run, i, out, weights[i], biases[i], *projections[i : i + 1])  # type: ignore[no-untyped-call]
    return out


class _Layer(torch.autograd.Function):
    """One layer: its output was computed with all others."""

    @staticmethod
    def forward(
        ctx: Any, run: _Pass, index: int, x: Tensor, weight: Tensor, bias: Tensor, *projection: Tensor
    ) -> Tensor:
        """Return x_{l+1}."""
        ctx.run, ctx.index, ctx.layers = run, index, len(run.kept)
        ctx.types = (weight.dtype, projection[0].dtype if projection else None)
        ctx.save_for_backward(x, *run.kept[index])
        run.kept[index] = []
        out, run.made[index] = run.made[index], torch.empty(0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of x_l, the layer's weight, its bias and its projection."""
        run, index, (x, weight, *rest) = ctx.run.under_way, ctx.index, ctx.saved_tensors
        wide, narrow = ctx.types
        back, u = (rest.pop(0), rest.pop(0)) if narrow is not None else (None, None)
        if index + 1 == ctx.layers:
            run["top"] = run["g"] = gradients[0].contiguous()
            run["first"] = rest.pop().to(run["top"].dtype).contiguous()
            run["grads"] = run["top"].new_empty(max(1, ctx.layers - 1), *run["top"].shape)  # g_1 ... g_{L-1}
            run["dy"], run["partial"] = gated_gradient(run["top"], run["first"], relu=False)
        given = x if index else run["first"]
        parts = gpu.weight_gradients(run["dy"], run["partial"], given, u, weight, back, wide, narrow)
        dx: Tensor | None = None
        if index and ctx.needs_input_grad[2]:
            own = run["grads"][index - 1]
            dx, run["dy"], run["partial"] = gpu.cross_backward(parts.du, parts.back, run["g"], run["first"], own)
            run["g"] = dx
        elif ctx.needs_input_grad[2]:
            dx = gpu.cross_last(parts.du, parts.back, run["top"], run["grads"], rest[0]).to(x.dtype)
        if dx is None or not index:
            run.clear()
        return None, None, dx, parts.weight, parts.bias, *([] if parts.projection is None else [parts.projection])

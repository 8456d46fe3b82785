"""Fully connected layers one after another: h_{l+1} = act(h_l W_l^T + b_l), act = ReLU or none.

Shapes: B rows, k_l inputs and n_l outputs of layer l.

On a GPU no pass over activations is made that a matrix product could make on its way: bias and ReLU belong to the
forward product; the backward product of a layer masks its result by the ReLU below and sums the columns for the bias
below; weight gradients are summed in float32 and stay float32 where the weights are. An output of width 1 has kernels
of its own, that read its input once. In 16 bits and without gradients one launch computes four or more layers of up to
8 rows, whose results do not depend on their number. On the CPU `viviane.ops.linear` makes predictions; in training all
layers are one step of backward, and ReLU and its gradient overwrite what the products wrote. Where `reason` returns a
reason, plain torch computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.core.errors import SchemaError
from viviane.ops.dispatch import choose, kernels_serve
from viviane.ops.linear import linear
from viviane.ops.linear import reason as linear_reason
from viviane.ops.mlp.operator import mlp_kernels
from viviane.ops.mlp.reference import mlp as plain
from viviane.ops.packing import padded_width

__all__ = ["mlp", "reason", "zeros_behind"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    relu: Sequence[bool],
    *,
    is_fit: bool = False,
) -> Tensor:
    """Return the last layer's activations, (B, n).

    Products are made in autocast's dtype where it is on, else in the input's.

    Args:
        x: (B, k); or with `zeros_behind` columns of zeros after the first k columns.
        weights: W_l (n_l, k_l).
        biases: b_l (n_l), or None.
        relu: whether a ReLU follows each layer.
        is_fit: whether the caller knows that `reason` returns None for these inputs.

    Raises:
        SchemaError: shapes that do not fit.

    Example:
        >>> w, b = torch.tensor([[1.0, -1.0]]), torch.tensor([0.5])
        >>> mlp(torch.tensor([[3.0, 1.0], [1.0, 3.0]]), [w], [b], [True]).tolist()
        [[2.5], [0.0]]
    """
    widths = [x.shape[-1], *(weight.shape[0] for weight in weights)]
    serves = is_fit or reason(x, weights, biases) is None
    k = weights[0].shape[1] if weights else 0
    if weights and serves and widths[0] != k and widths[0] == k + zeros_behind(k, x):
        widths[0] = k
    if x.dim() != 2 or not weights or [weight.shape[1] for weight in weights] != widths[:-1]:
        given = ", ".join(str(tuple(one.shape)) for one in (x, *weights))
        raise SchemaError("each layer's weights (n, k) must fit the output before it, and x be (B, k)", value=given)
    if not len(weights) == len(biases) == len(relu):
        raise SchemaError("one bias and one flag per layer", value=f"{len(weights)}, {len(biases)}, {len(relu)}")
    if not serves:
        return plain(x, weights, biases, relu)
    all_biases = [bias for bias in biases if bias is not None]
    if linear_reason(x, weights[0]) is None:
        for weight, bias, positive in zip(weights, biases, relu, strict=True):
            x = linear(x, weight, bias, relu=positive)
        return x
    if not kernels_serve(x.device):
        return mlp_in_place(x, weights, all_biases, relu)
    return mlp_kernels(x, weights, all_biases, relu, _product_dtype(x))


def zeros_behind(k: int, x: Tensor) -> int:
    """Return how many columns of zeros spare a GPU's kernels a copy of an input with k columns; elsewhere 0.

    Args:
        k: inputs of the first layer.
        x: of the input's type and device.

    Example:
        >>> zeros_behind(479, torch.ones(1))
        0
    """
    return padded_width(k, _product_dtype(x)) - k if kernels_serve(x.device) else 0


def _product_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def reason(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> str | None:
    """Return the reason why plain torch is used for these inputs, layer by layer, or None if one operator does.

    Example:
        >>> reason(torch.ones(1, 2), [torch.ones(1, 2)], [None])
        'a layer has no bias: the fused products always add one'
    """
    on_gpu = kernels_serve(x.device)
    unfit = None if on_gpu else _unfit_without_gpu(x)
    if unfit is not None:
        return unfit
    types = _TYPES if on_gpu else (torch.float32,)
    if any(bias is None for bias in biases):
        return "a layer has no bias: the fused products always add one"
    if any(one is not None and one.dtype not in types for one in (x, *weights, *biases)):
        return "only float32, and on a GPU bfloat16 and float16, have kernels"
    if not x.numel():
        return "nothing to compute"
    return None


def _unfit_without_gpu(x: Tensor) -> str | None:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "a trace reads plain torch"
    if choose(x.device) == "reference":
        return "VIVIANE_OPS: plain torch"
    return "autocast without a GPU" if torch.is_autocast_enabled(x.device.type) else None


def mlp_in_place(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu: Sequence[bool]) -> Tensor:
    """Return the output on a CPU: torch's products; ReLU and its gradient overwrite their results."""
    return cast(Tensor, _Chain.apply(x, tuple(relu), *weights, *biases))  # type: ignore[no-untyped-call]


class _Chain(torch.autograd.Function):
    """One node of the autograd graph for all layers; the only memory is that of the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: tuple[bool, ...], *parameters: Tensor) -> Tensor:
        count = len(relu)
        outputs = [x]
        for weight, bias, positive in zip(parameters[:count], parameters[count:], relu, strict=True):
            y = torch.addmm(bias, outputs[-1], weight.t())
            outputs.append(y.relu_() if positive else y)
        ctx.relu = relu
        ctx.save_for_backward(*parameters[:count], *outputs)
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        count = len(ctx.relu)
        weights, outputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        grad, own = grad_outputs[0], False  # whether the gradient's memory has no other reader
        weight_grads: list[Tensor | None] = [None] * count
        bias_grads: list[Tensor | None] = [None] * count
        for i in reversed(range(count)):
            if ctx.relu[i]:
                place = grad if own else torch.empty_like(grad)
                torch.ops.aten.threshold_backward.grad_input(grad, outputs[i + 1], 0, grad_input=place)
                grad = place
            if ctx.needs_input_grad[2 + i]:
                weight_grads[i] = grad.t() @ outputs[i]
            if ctx.needs_input_grad[2 + count + i]:
                bias_grads[i] = grad.sum(0)
            if i or ctx.needs_input_grad[0]:
                grad, own = grad @ weights[i], True
        return grad if ctx.needs_input_grad[0] else None, None, *weight_grads, *bias_grads

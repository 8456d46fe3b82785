"""Fully connected layers on the CPU: torch's products, with ReLU and its gradient written over their results.

One node of the autograd graph for all layers, no memory but that of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu: Sequence[bool]) -> Tensor:
    """Return act(... act(x W_1^T + b_1) ... W_L^T + b_L)."""
    return cast(Tensor, _Chain.apply(x, tuple(relu), *weights, *biases))  # type: ignore[no-untyped-call]


class _Chain(torch.autograd.Function):
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

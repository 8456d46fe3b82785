"""The fused loss as a torch operator: `torch.compile` and CUDA graphs take it whole."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from viviane.ops.dispatch import load
from viviane.ops.eager import Kernels, call, is_traced


def logistic_loss_kernel(
    logits: Tensor, labels: Tensor, weight: Tensor | None, negative: float, positive: float, smoothing: float
) -> Tensor:
    """Call the fused kernel; `negative` and `positive` are the classes' weights."""
    inputs = (logits, labels, weight, negative, positive, smoothing)
    found = _forward(*inputs) if is_traced(logits, labels, weight) else call(_KERNELS, *inputs)
    return cast(tuple[Tensor, Tensor], found)[0]


def _run(
    logits: Tensor, labels: Tensor, weight: Tensor | None, negative: float, positive: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient to the logits."""
    forward = load("logistic_loss", "gpu").forward
    return cast(tuple[Tensor, Tensor], forward(logits, labels, weight, negative, positive, smoothing))


_forward = torch.library.custom_op(
    "viviane::logistic_loss",
    _run,
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, Tensor? weight, float negative, float positive, float smoothing)"
    " -> (Tensor, Tensor)",
)


@_forward.register_fake
def _(
    logits: Tensor, labels: Tensor, weight: Tensor | None, negative: float, positive: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    (slope,) = ctx.saved_tensors
    if grad is None:
        return (None,) * 6
    if slope.dtype == ctx.dtype or torch.compiler.is_compiling() or grad.requires_grad:
        return (slope * grad).to(ctx.dtype), None, None, None, None, None
    out = torch.empty_like(slope, dtype=ctx.dtype)  # multiplied in float32, and rounded by the same launch
    return torch.mul(slope, grad, out=out), None, None, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
_KERNELS = Kernels(_run, _setup, _gradient)

"""Pointwise attention as torch operators: `torch.compile` and CUDA graphs take them whole."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from viviane.ops.dispatch import load
from viviane.ops.eager import Kernels, call, is_differentiated, is_traced

_INPUTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor held, Tensor? position, Tensor? times, Tensor? time_bias, int unit{more})"
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None,
    times: Tensor | None,
    time_bias: Tensor | None,
    unit: int,
) -> Tensor:
    """Call the kernels; arguments as for `viviane.ops.pointwise_attention.pointwise_attention`."""
    inputs = (q, k, v, held, position, times, time_bias, unit)
    return cast(Tensor, _forward(*inputs) if is_traced(*inputs[:-1]) else call(_KERNELS, *inputs))


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None,
    times: Tensor | None,
    time_bias: Tensor | None,
    unit: int,
) -> Tensor:
    """Return y."""
    forward = load("pointwise_attention", "gpu").forward
    return cast(Tensor, forward(q, k, v, held, position, times, time_bias, unit))


_forward = torch.library.custom_op(
    "viviane::pointwise_attention", _run, mutates_args=(), schema=_INPUTS.format(more="") + " -> Tensor"
)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None,
    times: Tensor | None,
    time_bias: Tensor | None,
    unit: int,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, p and r; empty ones for a bias that is not there."""
    backward = load("pointwise_attention", "gpu").backward
    return cast(
        tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        backward(q, k, v, held, position, times, time_bias, unit, grad),
    )


_backward = torch.library.custom_op(
    "viviane::pointwise_attention_backward",
    _run_backward,
    mutates_args=(),
    schema=_INPUTS.format(more=", Tensor grad") + " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None,
    times: Tensor | None,
    time_bias: Tensor | None,
    unit: int,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = [0 if one is None else one.shape[0] for one in (position, time_bias)]
    biases = [q.new_empty(size, dtype=torch.float32) for size in sizes]
    like = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v)]
    return like[0], like[1], like[2], biases[0], biases[1]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.unit = inputs[7]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, held, position, times, time_bias = ctx.saved_tensors
    run = _backward if is_differentiated(grad) else _run_backward
    dq, dk, dv, dp, dr = run(q, k, v, held, position, times, time_bias, ctx.unit, grad)
    by_place = None if position is None else dp.to(position.dtype)
    by_time = None if time_bias is None else dr.to(time_bias.dtype)
    return dq, dk, dv, None, by_place, None, by_time, None


_forward.register_autograd(_gradient, setup_context=_setup)
_KERNELS = Kernels(_run, _setup, _gradient)

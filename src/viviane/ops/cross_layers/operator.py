"""The fused cross layers as torch operators: `torch.compile` and CUDA graphs take them whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from viviane.ops.dispatch import load
from viviane.ops.eager import Kernels, call, is_differentiated, is_traced
from viviane.ops.packing import packing
from viviane.ops.packing_ahead import take_packed


def cross_layers_kernels(
    x: Tensor, projections: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """Call the fused layers; without projections they are of full rank. `dtype` is that of the products."""
    every = [*weights, *projections, *biases]
    packed = take_packed(every, dtype)
    inputs = (x, list(projections), list(weights), list(biases), dtype, packed)
    if not (torch.is_grad_enabled() and any(one.requires_grad for one in (x, *every))):
        return cast(Tensor, _predict(*inputs))
    found = _forward(*inputs) if is_traced(x, *every) else call(_KERNELS, *inputs)
    return cast(list[Tensor], found)[len(weights) - 1]


def _run(
    x: Tensor,
    projections: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> list[Tensor]:
    """Return x_1 ... x_L, the u_l where there are projections, the y_l in one tensor (L, B, n), and packed weights.

    The last is empty where they were given.
    """
    return cast(list[Tensor], load("cross_layers", "gpu").forward(x, projections, weights, biases, dtype, packed))


_forward = torch.library.custom_op(
    "viviane::cross_layers",
    _run,
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor[] projections, Tensor[] weights, Tensor[] biases, ScalarType dtype, Tensor? packed)"
        " -> Tensor[]"
    ),
)


@_forward.register_fake
def _(
    x: Tensor,
    projections: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> list[Tensor]:
    found = [x.new_empty(x.shape, dtype=dtype) for _ in weights]
    found += [x.new_empty(x.shape[0], one.shape[0], dtype=dtype) for one in projections]
    every = [*weights, *projections, *biases]
    size = 0 if packed is not None else packing([one.shape for one in every], dtype).size
    return [*found, x.new_empty(len(weights), *x.shape, dtype=dtype), x.new_empty(size, dtype=dtype)]


@torch.library.custom_op(
    "viviane::cross_layers_predict",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor[] projections, Tensor[] weights, Tensor[] biases, ScalarType dtype, Tensor? packed)"
        " -> Tensor"
    ),
)
def _predict(
    x: Tensor,
    projections: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    """Return x_L alone."""
    return cast(Tensor, load("cross_layers", "gpu").predict(x, projections, weights, biases, dtype, packed))


@_predict.register_fake
def _(
    x: Tensor,
    projections: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _run_backward(
    grad: Tensor, x: Tensor, kept: list[Tensor], projections: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of x, the projections, the weights and the biases."""
    return cast(list[Tensor], load("cross_layers", "gpu").backward(grad, x, kept, projections, weights))


_backward = torch.library.custom_op(
    "viviane::cross_layers_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor[] kept, Tensor[] projections, Tensor[] weights) -> Tensor[]",
)


@_backward.register_fake
def _(grad: Tensor, x: Tensor, kept: list[Tensor], projections: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(one) for one in (x, *projections, *weights)]
    return [*found, *(weight.new_empty(weight.shape[0]) for weight in weights)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, projections, weights, _, _, packed = inputs
    ctx.counts = (len(projections), len(weights))
    ctx.save_for_backward(x, *projections, *weights, *output[:-1], output[-1] if packed is None else packed)
    ctx.set_materialize_grads(False)  # what is kept between layers gets none


def _gradient(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *saved = ctx.saved_tensors
    ranks, layers = ctx.counts
    grad = grads[layers - 1]
    if grad is None:
        return None, [None] * ranks, [None] * layers, [None] * layers, None, None
    projections, weights, kept = saved[:ranks], saved[ranks : ranks + layers], saved[ranks + layers :]
    run = _backward if is_differentiated(grad) else _run_backward
    dx, *found = run(grad, x, kept, projections, weights)
    return dx, found[:ranks], found[ranks : ranks + layers], found[ranks + layers :], None, None


_forward.register_autograd(_gradient, setup_context=_setup)
_KERNELS = Kernels(_run, _setup, _gradient)

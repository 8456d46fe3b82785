"""The fused layers as torch operators: `torch.compile` and CUDA graphs take them whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from viviane.ops.capture import is_capturing
from viviane.ops.dispatch import load
from viviane.ops.eager import Kernels, call, is_differentiated, is_traced
from viviane.ops.packing import packing, padded_width
from viviane.ops.packing_ahead import take_packed, weights_are_constant


def mlp_kernels(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu: Sequence[bool], dtype: torch.dtype
) -> Tensor:
    """Call the fused layers; `dtype` is that of the products and of the result."""
    packed = take_packed([*weights, *biases], dtype)
    if _are_few_rows(x, weights, dtype):
        return cast(Tensor, _few_rows(x, list(weights), list(biases), list(relu), dtype, packed))
    inputs = (x, list(weights), list(biases), list(relu), dtype, packed)
    found = _forward(*inputs) if is_traced(x, *weights, *biases) else call(_KERNELS, *inputs)
    return cast(list[Tensor], found)[len(weights) - 1]


_MOST_ROWS, _FEWEST_LAYERS = 8, 4  # for more rows, or fewer layers, cuBLAS was as quick on an H200


def _are_few_rows(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether one launch computes all layers: of predictions, in 16 bits, for a few rows."""
    if torch.is_grad_enabled() or dtype.itemsize != 2 or len(weights) < _FEWEST_LAYERS:
        return False
    if not 0 < x.shape[0] <= _MOST_ROWS:
        return False
    # A session replays its graphs on the stream that recorded them, where launches share a counter.
    return weights_are_constant() or not is_capturing(x.device)


@torch.library.custom_op(
    "viviane::mlp_few_rows",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] biases, bool[] relu, ScalarType dtype, Tensor? packed) -> Tensor",
)
def _few_rows(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    relu: list[bool],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    return cast(Tensor, load("mlp", "gpu_few_rows").forward(x, weights, biases, relu, dtype, packed))


@_few_rows.register_fake
def _(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    relu: list[bool],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    return x.new_empty(x.shape[0], weights[-1].shape[0], dtype=dtype)


def _run(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    relu: list[bool],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> list[Tensor]:
    """Return the activations of every layer, the packed weights and biases, and x as the products read it.

    The last is empty where they read x itself, the one before where it was given.
    """
    return cast(list[Tensor], load("mlp", "gpu").forward(x, weights, biases, relu, dtype, packed))


_forward = torch.library.custom_op(
    "viviane::mlp",
    _run,
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] biases, bool[] relu, ScalarType dtype, Tensor? packed) -> Tensor[]",
)


@_forward.register_fake
def _(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    relu: list[bool],
    dtype: torch.dtype,
    packed: Tensor | None,
) -> list[Tensor]:
    found = [x.new_empty(x.shape[0], weight.shape[0], dtype=dtype) for weight in weights]
    size = 0 if packed is not None else packing([one.shape for one in (*weights, *biases)], dtype).size
    width = padded_width(x.shape[1], dtype)
    changed = width != x.shape[1] or x.dtype != dtype
    prepared = x.new_empty(x.shape[0], width, dtype=dtype) if changed else x.new_empty(0, dtype=dtype)
    return [*found, x.new_empty(size, dtype=dtype), prepared]


def _run_backward(
    grad: Tensor, x: Tensor, kept: list[Tensor], weights: list[Tensor], relu: list[bool], needs_x: bool
) -> list[Tensor]:
    return cast(list[Tensor], load("mlp", "gpu").backward(grad, x, kept, weights, relu, needs_x))


_backward = torch.library.custom_op(
    "viviane::mlp_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor[] kept, Tensor[] weights, bool[] relu, bool needs_x) -> Tensor[]",
)


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, kept: list[Tensor], weights: list[Tensor], relu: list[bool], needs_x: bool
) -> list[Tensor]:
    found = [torch.empty_like(weight) for weight in weights]
    found += [weight.new_empty(weight.shape[0]) for weight in weights]
    return [*found, torch.empty_like(x)] if needs_x else found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.relu, _, packed = inputs
    *activations, own, prepared = output
    ctx.needs_x = x.requires_grad
    ctx.save_for_backward(x, *weights, *activations, own if packed is None else packed, prepared)
    ctx.set_materialize_grads(False)  # hidden activations get none


def _gradient(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *saved = ctx.saved_tensors
    count = len(ctx.relu)
    grad = grads[count - 1]
    if grad is None:
        return None, [None] * count, [None] * count, None, None, None
    run = _backward if is_differentiated(grad) else _run_backward
    found = run(grad, x, saved[count:], saved[:count], ctx.relu, ctx.needs_x)
    dx = found[2 * count] if ctx.needs_x else None
    return dx, found[:count], found[count : 2 * count], None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
_KERNELS = Kernels(_run, _setup, _gradient)

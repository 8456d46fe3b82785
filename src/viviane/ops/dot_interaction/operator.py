"""The fused dot interaction as torch operators: `torch.compile` and CUDA graphs take them whole."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from viviane.ops.dispatch import load
from viviane.ops.dot_interaction.reference import num_pairs
from viviane.ops.eager import Kernels, call, is_differentiated, is_traced


def dot_interaction_kernel(
    dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool, dtype: torch.dtype
) -> Tensor:
    """Call the fused kernel; `dtype` is that of the products.

    Example:
        >>> dot_interaction_kernel(None, torch.ones(2, 3, 4), True, False, torch.float32)  # doctest: +SKIP
    """
    inputs = (dense, embeddings, pad, itself, dtype)
    return cast(Tensor, _forward(*inputs) if is_traced(dense, embeddings) else call(_KERNELS, *inputs))


def _run(dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool, dtype: torch.dtype) -> Tensor:
    return cast(Tensor, load("dot_interaction", "gpu").forward(dense, embeddings, pad, itself, dtype))


_forward = torch.library.custom_op(
    "viviane::dot_interaction",
    _run,
    mutates_args=(),
    schema="(Tensor? dense, Tensor embeddings, bool pad, bool itself, ScalarType dtype) -> Tensor",
)


@_forward.register_fake
def _(dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool, dtype: torch.dtype) -> Tensor:
    first = embeddings if dense is None else dense
    s, front = embeddings.shape[1], 0
    if dense is not None:
        s, front = s + 1, dense.shape[1]
    return first.new_empty(first.shape[0], front + num_pairs(s, itself) + int(pad))


def _run_backward(
    grad: Tensor, dense: Tensor | None, embeddings: Tensor, itself: bool, dtype: torch.dtype
) -> list[Tensor]:
    return cast(list[Tensor], load("dot_interaction", "gpu").backward(grad, dense, embeddings, itself, dtype))


_backward = torch.library.custom_op(
    "viviane::dot_interaction_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor? dense, Tensor embeddings, bool itself, ScalarType dtype) -> Tensor[]",
)


@_backward.register_fake
def _(grad: Tensor, dense: Tensor | None, embeddings: Tensor, itself: bool, dtype: torch.dtype) -> list[Tensor]:
    given = [embeddings] if dense is None else [embeddings, dense]
    return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in given]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, embeddings, _, ctx.itself, ctx.dtype = inputs
    ctx.save_for_backward(dense, embeddings)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
    dense, embeddings = ctx.saved_tensors
    run = _backward if is_differentiated(grad) else _run_backward
    found = run(grad, dense, embeddings, ctx.itself, ctx.dtype)
    return None if dense is None else found[1], found[0], None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
_KERNELS = Kernels(_run, _setup, _gradient)

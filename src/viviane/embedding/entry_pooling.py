"""Pooling of looked-up vectors by torch: what a lookup of whole bags does not compute.

Shapes: N entries of all bags, B bags, D the width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class _ScaledGradient(torch.autograd.Function):
    """Vectors as they are, whose gradients are multiplied by (N, 1)."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return vectors.view_as(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (scale,) = ctx.saved_tensors
        return (grad_outputs[0] * scale).to(grad_outputs[0].dtype), None


def scale_gradient_by_frequency(vectors: Tensor, ids: Tensor) -> Tensor:
    """Return the vectors, (N, D), with gradients divided by how often each id, (N,), occurs.

    Example:
        >>> vectors = torch.ones(3, 1, requires_grad=True)
        >>> scale_gradient_by_frequency(vectors, torch.tensor([7, 4, 7])).sum().backward()
        >>> vectors.grad.tolist()
        [[0.5], [1.0], [0.5]]
    """
    if not vectors.requires_grad:
        return vectors
    # By sorting: the shapes are known without asking a GPU, and no memory of the table's size is needed.
    ordered, ids = ids.sort().values, ids.contiguous()
    counts = torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)
    scaled: Tensor = _ScaledGradient.apply(  # type: ignore[no-untyped-call]
        vectors, counts.to(torch.float32).reciprocal().unsqueeze(1)
    )
    return scaled


def pool_entries(
    vectors: Tensor, bounds: Tensor, mode: str, skipped: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Pool vectors, (N, D), by bag: (B, D), differentiable by vectors and weights.

    Args:
        vectors: of all entries.
        bounds: of the bags, (B + 1,), int64.
        mode: "sum", "mean" or "max"; an empty bag gives zeros.
        skipped: entries that do not count, (N,), bool.
        weights: what vectors are multiplied by, (N,); for "sum".

    Example:
        >>> pool_entries(torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([0, 2, 2]), "max").tolist()
        [[2.0, 5.0], [0.0, 0.0]]
    """
    count = vectors.shape[0]
    # A row more, of zeros, is the one that padding points to.
    rows = torch.cat([vectors.to(torch.float32), vectors.new_zeros(1, vectors.shape[1], dtype=torch.float32)])
    entries = torch.arange(count, device=vectors.device)
    if skipped is not None:
        entries = torch.where(skipped, count, entries)
    pooled = functional.embedding_bag(
        entries, rows, bounds, mode=mode, include_last_offset=True, padding_idx=count,
        per_sample_weights=None if weights is None else weights.to(torch.float32),
    )  # fmt: skip
    return pooled.to(vectors.dtype)

"""The plain truth: rows become float32 first."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.embedding_bag import reference
from viviane.ops.int8_rows import dequantize


def gather_rows(
    storage: Tensor, dim: int, rows: Tensor, out: Tensor, columns: tuple[int, ...], weights: Tensor | None
) -> None:
    """out[b, columns[f] : + D] = weights[b, f] * row rows[b, f]."""
    vectors = dequantize(storage[rows.reshape(-1).to(torch.int64)], dim)
    every = torch.arange(len(vectors), device=rows.device).view(rows.shape)
    reference.gather_rows(vectors, every, out, columns, weights)


def pool_rows(
    storage: Tensor, dim: int, rows: Tensor, offsets: Tensor, out: Tensor, columns: tuple[int, ...],
    weights: Tensor | None,
) -> None:  # fmt: skip
    """out[b, columns[f] : + D] = sum of weights[n] * row rows[n] over bag f * B + b."""
    vectors = dequantize(storage[rows.to(torch.int64)], dim)
    every = torch.arange(len(vectors), device=rows.device)
    reference.pool_rows(vectors, every, offsets, out, columns, weights)

"""The dot interaction in plain torch: the definition, and what serves where no kernel does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F


def num_pairs(s: int, itself: bool = False) -> int:
    """Return P, the number of pairs of S vectors.

    Example:
        >>> num_pairs(27), num_pairs(27, itself=True)
        (351, 378)
    """
    return s * (s + 1) // 2 if itself else s * (s - 1) // 2


class _PairwiseDots(torch.autograd.Function):
    """z (B, s, d) -> dots of its rows i > j (or i >= j), row by row, (B, P).

    Torch's own backward of the triangle's selection scatters element by element; here the gradient is laid
    out as one symmetric matrix and multiplied once: dz = (G + G^T) z.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, lower: Tensor, source: Tensor, itself: bool) -> Tensor:
        ctx.save_for_backward(z, source)
        ctx.itself = itself
        return _dots(z, lower)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        z, source = ctx.saved_tensors
        batch, s, _ = z.shape
        # source[i, j] is the pair's place in the output; without `itself` the diagonal reads a column of zeros
        padded = F.pad(grads[0].to(z.dtype), (0, 1))
        symmetric = padded.index_select(1, source).view(batch, s, s)
        if ctx.itself:
            symmetric = symmetric + torch.diag_embed(symmetric.diagonal(dim1=1, dim2=2))
        return torch.bmm(symmetric, z), None, None, None


def _dots(z: Tensor, lower: Tensor) -> Tensor:
    return torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, lower)


def dot_interaction(dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool) -> Tensor:
    """Return [dense | dots of all pairs | zero], (B, W)."""
    z = embeddings if dense is None else torch.cat([dense.unsqueeze(1), embeddings.to(dense.dtype)], 1)
    lower, source = _triangle(z, itself)
    # TorchScript cannot hold a function of autograd; what it traces is never differentiated.
    traced = torch._C._get_tracing_state() is not None
    dots = _dots(z, lower) if traced else _PairwiseDots.apply(z, lower, source, itself)  # type: ignore[no-untyped-call]
    parts = [cast(Tensor, dots)]
    if dense is not None:
        parts.insert(0, dense)
    if pad:
        parts.append(z.new_zeros(z.shape[0], 1))
    return torch.cat([part.to(z.dtype) for part in parts], 1) if len(parts) > 1 else parts[0]


def _triangle(z: Tensor, itself: bool) -> tuple[Tensor, Tensor]:
    """Return where the square holds each pair, and where the output holds each entry of the square."""
    if torch.compiler.is_compiling() or type(z) is not Tensor:
        return _lay_out(z.shape[1], itself, z.device)  # what a trace makes must not outlive it
    return _kept(z.shape[1], itself, z.device)


def _lay_out(s: int, itself: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.tril_indices(s, s, 0 if itself else -1)
    source = torch.full((s, s), rows.numel(), dtype=torch.int64)
    source[rows, columns] = source[columns, rows] = torch.arange(rows.numel())
    return (rows * s + columns).to(device), source.flatten().to(device)


_kept = lru_cache(maxsize=64)(_lay_out)

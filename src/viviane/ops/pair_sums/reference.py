"""Sums over pairs in plain torch: the readable truth."""

from __future__ import annotations

from torch import Tensor


def pair_sums(vectors: Tensor) -> Tensor:
    """Return ((sum_i e_i)^2 - sum_i e_i^2) / 2, (B, D)."""
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))

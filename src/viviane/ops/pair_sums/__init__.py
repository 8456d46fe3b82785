"""Sums of all pairwise products of a sample's vectors, without the pairs: a factorisation machine's second order.

Shapes: B samples, S vectors a sample, D their width.

    y = sum over i < j of e_i * e_j = ((sum_i e_i)^2 - sum_i e_i^2) / 2        (B, D)
    dy/de_i = sum_j e_j - e_i

On the CPU forward reads the vectors once, and backward reads them and writes their gradient once. Elsewhere, and where
`reason` returns a reason, plain torch computes it, with the same results up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.core.errors import SchemaError
from viviane.ops.dispatch import choose, kernels_serve, load
from viviane.ops.pair_sums.reference import pair_sums as plain

__all__ = ["pair_sums", "reason"]


def pair_sums(vectors: Tensor) -> Tensor:
    """Return the sums over pairs, (B, D).

    Args:
        vectors: (B, S, D).

    Raises:
        SchemaError: it has another shape.

    Example:
        >>> pair_sums(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).tolist()
        [[3.0, 8.0]]
    """
    if vectors.dim() != 3:
        raise SchemaError("sums over pairs take vectors (B, S, D)", value=tuple(vectors.shape))
    if reason(vectors) is not None:
        return plain(vectors)
    sums: Tensor = load("pair_sums", "cpu").pair_sums(vectors)
    return sums


def reason(vectors: Tensor) -> str | None:
    """Return the reason why plain torch is used for these vectors, or None if the kernel does.

    Example:
        >>> reason(torch.ones(1, 2, 3, dtype=torch.float64))
        'only float32 has a kernel'
    """
    if vectors.device.type != "cpu" or kernels_serve(vectors.device):
        return "the kernel is for CPUs"
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "a trace reads plain torch"
    if choose(vectors.device) == "reference":
        return "VIVIANE_OPS: plain torch"
    if vectors.dtype != torch.float32:
        return "only float32 has a kernel"
    return None if vectors.numel() else "nothing to compute"

"""Look rows up in a table and pool them into bags.

Shapes: R rows of the storage, D its width, N entries (one row looked up once each), B bags.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.core.errors import VivianeError

__all__ = ["embedding_bag", "embedding_lookup", "entry_bags", "mean_weights"]


def embedding_lookup(storage: Tensor, rows: Tensor) -> Tensor:
    """Copy rows out of the storage: out[n] = storage[rows[n]].

    Args:
        storage: (R, D), float32.
        rows: (N,), int64, 0 <= row < R; the caller has checked them.

    Returns:
        (N, D), contiguous.

    Example:
        >>> embedding_lookup(torch.eye(3), torch.tensor([2, 0])).tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    _check_storage(storage)
    _check_vector("rows", rows, torch.int64)
    return storage.index_select(0, rows)


def embedding_bag(storage: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum rows by bag: out[b] = sum of weights[n] * storage[rows[n]] over offsets[b] <= n < offsets[b + 1].

    Every combiner is this sum with its own weights: 1 for "sum", `mean_weights` for "mean". An empty bag
    gives zeros. The entries of a bag are added in their order, so that the result does not depend on the
    number of threads.

    Args:
        storage: (R, D), float32.
        rows: (N,), int64, 0 <= row < R; the caller has checked them.
        offsets: (B + 1,), int64, rising from 0 to N.
        weights: (N,), float32, or None for ones.

    Returns:
        (B, D), contiguous.

    Example:
        >>> rows, offsets = torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2, 3])
        >>> embedding_bag(torch.eye(3), rows, offsets).tolist()
        [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    _check_storage(storage)
    _check_vector("rows", rows, torch.int64)
    _check_vector("offsets", offsets, torch.int64)
    if weights is not None:
        _check_vector("weights", weights, storage.dtype)
    if len(rows) == 0:
        return storage.new_zeros(len(offsets) - 1, storage.shape[1])
    return F.embedding_bag(rows, storage, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)


def mean_weights(offsets: Tensor, counted: Tensor | None, weights: Tensor | None, num_entries: int) -> Tensor:
    """Return the weights that turn a sum by bag into a mean: c w / (sum of c w over the bag), (N,), float32.

    Args:
        offsets: (B + 1,), int64.
        counted: (N,), bool; entries that count (c), or None where all do.
        weights: (N,), float32, or None for ones; a bag whose weights sum to zero gives zeros.
        num_entries: N.

    Example:
        >>> mean_weights(torch.tensor([0, 2, 3]), None, None, 3).tolist()
        [0.5, 0.5, 1.0]
    """
    bags = entry_bags(offsets, num_entries)
    if counted is None and weights is None:
        return offsets.diff().to(torch.float32).reciprocal()[bags]
    if weights is None:
        assert counted is not None
        running = F.pad(counted.to(torch.int64).cumsum(0), (1, 0))
        totals = (running[offsets[1:]] - running[offsets[:-1]]).to(torch.float32)
        share = counted.to(torch.float32)
    else:
        share = weights if counted is None else weights * counted
        totals = embedding_bag(share.unsqueeze(1), torch.arange(num_entries, device=share.device), offsets).squeeze(1)
    return share * torch.where(totals == 0, 0.0, totals.reciprocal())[bags]


def entry_bags(offsets: Tensor, num_entries: int) -> Tensor:
    """Return the bag of each entry, (N,), int64.

    Example:
        >>> entry_bags(torch.tensor([0, 2, 2, 3]), 3).tolist()
        [0, 0, 2]
    """
    bags = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=num_entries)


def _check_storage(storage: Tensor) -> None:
    if storage.dim() != 2 or not storage.is_contiguous():
        raise VivianeError("the storage must be a contiguous matrix (R, D)", value=tuple(storage.shape))


def _check_vector(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype:
        raise VivianeError(f"{name} must be a vector of {dtype}", value=f"{tuple(tensor.shape)} of {tensor.dtype}")

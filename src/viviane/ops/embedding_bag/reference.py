"""The plain truth of lookup and pooling: one entry at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding_lookup(storage: Tensor, rows: Tensor) -> Tensor:
    """out[n] = storage[rows[n]]."""
    out = torch.zeros(len(rows), storage.shape[1], dtype=storage.dtype)
    for n, row in enumerate(rows.tolist()):
        out[n] = storage[row]
    return out


def embedding_bag(storage: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """out[b] = sum of weights[n] * storage[rows[n]] over the entries n of bag b, in order."""
    out = torch.zeros(len(offsets) - 1, storage.shape[1], dtype=storage.dtype)
    for b in range(len(offsets) - 1):
        for n in range(int(offsets[b]), int(offsets[b + 1])):
            out[b] += storage[rows[n]] * (1.0 if weights is None else weights[n])
    return out


def mean_weights(offsets: Tensor, counted: Tensor | None, weights: Tensor | None, num_entries: int) -> Tensor:
    """c w / (sum of c w over the bag), zero where that sum is zero."""
    out = torch.zeros(num_entries)
    for b in range(len(offsets) - 1):
        entries = range(int(offsets[b]), int(offsets[b + 1]))
        shares = {
            n: (1.0 if weights is None else float(weights[n])) * (1.0 if counted is None else float(counted[n]))
            for n in entries
        }
        total = sum(shares.values())
        for n in entries:
            out[n] = shares[n] / total if total != 0 else 0.0
    return out

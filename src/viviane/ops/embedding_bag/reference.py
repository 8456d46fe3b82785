"""The plain truth of lookup and pooling: one bag at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_rows(
    storage: Tensor, rows: Tensor, out: Tensor, columns: Sequence[int], weights: Tensor | None, *, aside: bool = False
) -> None:
    """out[b, columns[f] : + D] = weights[b, f] * storage[rows[b, f]]."""
    dim = storage.shape[1]
    for f, column in enumerate(columns):
        vectors = storage[rows[:, f].to(torch.int64)].to(_wide(storage))
        if weights is not None:
            vectors = vectors * weights[:, f].unsqueeze(1).to(vectors.dtype)
        out[:, column : column + dim] = vectors.to(out.dtype)


def pool_rows(
    storage: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, columns: Sequence[int], weights: Tensor | None
) -> None:
    """out[b, columns[f] : + D] = sum of weights[n] * storage[rows[n]] over bag f * B + b."""
    size, dim = out.shape[0], storage.shape[1]
    ends = offsets.tolist()
    for f, column in enumerate(columns):
        for b in range(size):
            entries = slice(ends[f * size + b], ends[f * size + b + 1])
            vectors = storage[rows[entries].to(torch.int64)].to(_wide(storage))
            if weights is not None:
                vectors = vectors * weights[entries].unsqueeze(1).to(vectors.dtype)
            out[b, column : column + dim] = vectors.sum(0).to(out.dtype)


def entry_sources(offsets: Tensor | None, columns: Sequence[int], size: int, apart: int, out: Tensor) -> None:
    """Write where in a flat gradient of rows `apart` from one another each entry's vector begins."""
    rows = torch.arange(size, device=out.device) * apart
    places = torch.tensor(columns, dtype=torch.int64, device=out.device)
    if offsets is None:
        out.copy_((rows.unsqueeze(1) + places).view(-1))
    else:
        whole = (places.unsqueeze(1) + rows).view(-1)
        out.copy_(torch.repeat_interleave(whole, offsets.diff(), output_size=len(out)))


def _wide(storage: Tensor) -> torch.dtype:
    return torch.float64 if storage.dtype == torch.float64 else torch.float32

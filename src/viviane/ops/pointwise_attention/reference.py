"""Pointwise attention in plain torch: the truth, and what serves on CPUs."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

UNKNOWN_TIME: Final = -(2**63)
"""Marks an unknown time; the value of padding in a tensor of ids."""


def pointwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None = None,
    times: Tensor | None = None,
    time_bias: Tensor | None = None,
    unit: int = 1,
) -> Tensor:
    """Return y, (B, L, H, e); 16-bit input is computed in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    length = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        queries, keys, values = (one.to(wide).transpose(1, 2) for one in (q, k, v))  # (B, H, L, d)
        scores = queries @ keys.transpose(2, 3)
        place = torch.arange(length, device=q.device)
        offset = place.unsqueeze(1) - place
        if position is not None:
            scores = scores + position.to(wide)[offset.clamp_min(0)]
        if times is not None and time_bias is not None:
            bucket = time_buckets(times, unit, len(time_bias))
            bias = time_bias.to(wide)[bucket.clamp_min(0)] * (bucket >= 0)
            scores = scores + bias.unsqueeze(1)
        allowed = (offset >= 0) & held.unsqueeze(1).unsqueeze(1)
        weights = F.silu(scores) * allowed
        return (weights @ values / length).transpose(1, 2).to(v.dtype)


def time_buckets(times: Tensor, unit: int, num_buckets: int) -> Tensor:
    """Return bucket(t_i - t_j) for each pair of places, (B, L, L), int64; -1 where a time is not known.

    Example:
        >>> time_buckets(torch.tensor([[0, 60, 200]]), 60, 3)[0].tolist()
        [[0, 0, 0], [1, 0, 0], [2, 1, 0]]
    """
    known = times != UNKNOWN_TIME
    safe = torch.where(known, times, 0)
    age = (safe.unsqueeze(2) - safe.unsqueeze(1)).clamp_min(0) // unit + 1  # (B, L, L): i, j
    edges = 2 ** torch.arange(1, num_buckets, device=times.device)
    bucket = torch.bucketize(age, edges, right=True)
    return torch.where(known.unsqueeze(2) & known.unsqueeze(1), bucket, -1)

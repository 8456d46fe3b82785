"""The normaliser of a softmax over candidates in plain torch: the truth, with the whole matrix of scores."""

from __future__ import annotations

import torch
from torch import Tensor


def log_sum(u: Tensor, v: Tensor, correction: Tensor, own: Tensor, ids: Tensor, of: Tensor, counts: Tensor) -> Tensor:
    """Return L, (B,).

    Example:
        >>> one, ids = torch.ones(2, 1), torch.tensor([5, 6])
        >>> log_sum(one, one, torch.zeros(2), one[:, 0], ids, ids, torch.tensor([True, False])).tolist()
        [1.6931471824645996, 1.0]
    """
    scores = (u @ v.T - correction).masked_fill(ids.unsqueeze(1) == of, -torch.inf)
    sums = torch.cat([own.unsqueeze(1), scores], 1).logsumexp(1)
    return torch.where(counts, sums, own)

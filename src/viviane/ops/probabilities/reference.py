"""Probabilities of logits in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def write_probabilities(
    logits: Tensor, out: Tensor, shift: float, records: Sequence[Tensor], flag: Tensor | None
) -> None:
    """Write 1 / (1 + e^(shift - z)), and how many records are set."""
    torch.sigmoid(logits.float() - shift if shift else logits.float(), out=out)
    if flag is not None:
        found = [record[:1] != 0 for record in records]
        flag.copy_(torch.stack(found).sum(0) if found else torch.zeros_like(flag))

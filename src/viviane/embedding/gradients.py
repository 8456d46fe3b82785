"""Gradients of looked-up rows that wait for a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.ops.row_update import Entries


@dataclass(frozen=True)
class RowGradients:
    """Gradients of one backward pass.

    Args:
        entries: looked-up rows of the storage and their gradients.
        tables: names of the tables whose rows they may move.
    """

    entries: Entries
    tables: frozenset[str]


def distinct_gradients(waiting: Sequence[RowGradients]) -> Iterator[Tensor]:
    """Give each flat gradient that waits, once."""
    seen: set[int] = set()
    for one in waiting:
        if id(one.entries.gradients) not in seen:
            seen.add(id(one.entries.gradients))
            yield one.entries.gradients


def join_entries(waiting: Sequence[Entries]) -> Entries:
    """Join passes and parts into one list of entries; a gradient that parts share stays one."""
    if len(waiting) == 1:
        return waiting[0]
    gradients: list[Tensor] = []
    sources: list[Tensor] = []
    start, aligned = 0, waiting[0].aligned
    for one in waiting:
        if not gradients or one.gradients is not gradients[-1]:
            start += len(gradients[-1]) if gradients else 0
            gradients.append(one.gradients)
        assert one.sources is not None
        sources.append(one.sources.to(torch.int64) + start if start else one.sources)
        aligned = math.gcd(aligned, one.aligned, start)
    weights = None
    if any(one.weights is not None for one in waiting):
        ones = (torch.ones(len(e.rows), device=e.rows.device) if e.weights is None else e.weights for e in waiting)
        weights = torch.cat(list(ones))
    flat = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
    return Entries(torch.cat([one.rows for one in waiting]), flat, torch.cat(sources), weights, aligned)

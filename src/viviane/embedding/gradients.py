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
    weights = join_weights([one.weights for one in waiting], [one.rows for one in waiting])
    flat = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
    return Entries(torch.cat([one.rows for one in waiting]), flat, torch.cat(sources), weights, aligned)


def join_weights(weights: Sequence[Tensor | None], rows: Sequence[Tensor]) -> Tensor | None:
    """Join the weights of lists of entries, flat, with ones where a list has none; None where no list has any.

    Example:
        >>> join_weights([None, torch.tensor([0.5])], [torch.tensor([3, 4]), torch.tensor([5])])
        tensor([1.0000, 1.0000, 0.5000])
    """
    if all(one is None for one in weights):
        return None
    pairs = zip(weights, rows, strict=True)
    own = [torch.ones(r.numel(), device=r.device) if w is None else w.reshape(-1) for w, r in pairs]
    return own[0] if len(own) == 1 else torch.cat(own)

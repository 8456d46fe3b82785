"""The plain truth of checking bags; it waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.bag_checks import LAST


def check_bags(
    offsets: Sequence[Tensor], counts: Sequence[int], weights: Sequence[Tensor | None], kept: Tensor | None = None
) -> Tensor | None:
    """Return the record of the first wrong offset or weight; None where all are right."""
    device = offsets[0].device
    place = _first_place(offsets, counts, weights)
    if kept is not None:
        if place is not None:
            kept.copy_(torch.maximum(kept, torch.tensor([1, LAST - place, 0], device=device)))
        return kept
    return None if place is None else torch.tensor([1, LAST - place, 0], device=device)


def _first_place(offsets: Sequence[Tensor], counts: Sequence[int], weights: Sequence[Tensor | None]) -> int | None:
    size = len(offsets[0])
    for f, (own, count) in enumerate(zip(offsets, counts, strict=True)):
        before = 0
        for b, offset in enumerate(own.tolist()):
            wrong = offset != 0 if b == 0 else not before <= offset <= count
            if wrong or (b == size - 1 and offset != count):
                return f * size + b
            before = offset
    start = len(offsets) * size
    for one, count in zip(weights, counts, strict=True):
        bad = [] if one is None else (~torch.isfinite(one)).nonzero().flatten().tolist()
        if bad:
            return start + int(bad[0])
        start += count
    return None

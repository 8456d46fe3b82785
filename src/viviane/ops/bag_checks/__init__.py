"""Check the offsets and weights of bags before a kernel reads memory by them.

Shapes: F features, B bags of each, N_f entries of feature f.

Right offsets begin with 0, never fall, and end with N_f. Right weights are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from viviane.ops.dispatch import implementation

__all__ = ["LAST", "check_bags", "place_of"]

LAST: Final = 2**62
"""What a place is subtracted from in a record, so that an empty record is all zeros and a maximum keeps the first."""


def check_bags(
    offsets: Sequence[Tensor],
    counts: Sequence[int],
    weights: Sequence[Tensor | None],
    kept: Tensor | None = None,
) -> Tensor | None:
    """Return the record of the first wrong offset or weight; None where the host knows that all are right.

    Nothing waits for a GPU, where the record stays on the device. Types, shapes and devices are what the caller has
    checked: see `viviane.embedding.batch_keys`.

    Args:
        offsets: of each feature, (B + 1,), int64, contiguous.
        counts: N_f.
        weights: of each feature, (N_f,), float32, contiguous, or None.
        kept: a record that takes the finding if it is empty or has a later place; None makes one.

    Returns:
        (3,), int64: [1, LAST - place, 0], or zeros where all are right. Place f * (B + 1) + b is that of an offset,
        F * (B + 1) + n that of a weight, where n counts the entries of all features one after another.

    Example:
        >>> import torch
        >>> offsets = torch.tensor([0, 3, 2])
        >>> record = check_bags([offsets], [2], [None])
        >>> place_of(record)
        1
        >>> check_bags([torch.tensor([0, 1, 2])], [2], [torch.ones(2)]) is None
        True
    """
    record: Tensor | None = implementation("bag_checks", offsets[0].device).check_bags(offsets, counts, weights, kept)
    return record


def place_of(record: Tensor) -> int | None:
    """Return the position in a record, or None; waits for a GPU.

    Example:
        >>> import torch
        >>> place_of(torch.tensor([1, LAST - 7, 0]))
        7
    """
    found, place, _ = record.tolist()
    return LAST - place if found else None

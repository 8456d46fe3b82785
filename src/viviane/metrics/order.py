"""Sorting of rows by group, and the starts of groups."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from viviane.metrics.auc import Doubles, Floats, ordered_bits

Groups: TypeAlias = NDArray[np.int64]


def in_order(groups: Groups, scores: Floats, labels: Floats, *, best_first: bool) -> tuple[Groups, Groups, Doubles]:
    """Return group, score (as an integer of the same order) and label of the rows, by group, score, label.

    If labels are 0 and 1, all three are packed into one integer: a plain sort, without a permutation and without a
    gather.
    """
    key = ordered_bits(scores) + 2**31
    key = 2**32 - 1 - key if best_first else key
    if are_binary(labels) and groups.min() >= 0 and groups.max() < 2**30:
        packed = groups << 33
        packed |= key << 1
        packed |= labels.astype(np.int64)
        packed.sort()
        return packed >> 33, (packed >> 1) & (2**32 - 1), (packed & 1).astype(np.float64)
    order = np.lexsort((labels, key, groups))
    return groups[order], key[order], labels[order].astype(np.float64)


def are_binary(labels: NDArray[np.floating]) -> bool:
    """Return whether all labels are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def starts_of(*keys: NDArray[np.generic]) -> NDArray[np.intp]:
    """Return the starts of runs of equal keys, in arrays sorted by them.

    Example:
        >>> starts_of(np.array([3, 3, 7])).tolist()
        [0, 2]
    """
    changed = np.zeros(len(keys[0]), dtype=bool)
    changed[0] = True
    for key in keys:
        changed[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(changed)


def places_in(starts: NDArray[np.intp], count: int) -> NDArray[np.int64]:
    """Return the position of each of `count` rows within its run, from 0.

    Example:
        >>> places_in(np.array([0, 2]), 3).tolist()
        [0, 1, 0]
    """
    lengths = np.diff(np.append(starts, count))
    return np.asarray(np.arange(count) - np.repeat(starts, lengths), dtype=np.int64)

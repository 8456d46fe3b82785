"""The exact area under the ROC curve, ties and weights included."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import NumericsError
from viviane.core.logging import get_logger
from viviane.metrics.given import columns, flat_rows
from viviane.metrics.registry import METRICS, Metric, Processes
from viviane.metrics.score_ranges import exchange_rows

log = get_logger(__name__)


Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]


def roc_auc(scores: Floats, labels: Floats, weights: Floats | None = None) -> float:
    """Probability that a positive row scores above a negative one; ties count one half.

        AUC = sum over groups g of equal score: P_g (N_below_g + N_g / 2)  /  (P N)

    P_g, N_g are the positive and negative weight of a group, N_below_g the negative weight under it. Sums are in
    float64: exact up to 2^53 rows without weights.

    Args:
        scores: (n,) finite values.
        labels: (n,) 0 or 1; a probability counts as that fraction of a positive row.
        weights: (n,) or None.

    Returns:
        The AUC, or NaN if there are no positive or no negative rows.

    Example:
        >>> roc_auc(np.float32([0.1, 0.4, 0.35, 0.8]), np.float32([0, 0, 1, 1]))
        0.75
    """
    scores, labels, weights = columns(scores=scores, labels=labels, weights=weights)
    if not len(scores):
        return math.nan
    check_finite(scores)
    return _area(*pair_sums(scores, labels, weights))


def pair_sums(scores: Floats, labels: Floats, weights: Floats | None = None) -> tuple[float, float, float]:
    """Return P, N, and twice the weight of correctly ordered pairs, where ties count one half."""
    if not len(scores):
        return 0.0, 0.0, 0.0
    if weights is None and ((labels == 0) | (labels == 1)).all():
        positives, total = _group_counts(scores, labels)
    else:
        positives, total = _group_sums(scores, labels, weights)
    negatives = total - positives
    positive_steps = np.diff(positives, prepend=0.0)
    below = np.concatenate(([0.0], negatives[:-1]))
    return float(positives[-1]), float(negatives[-1]), float(np.dot(positive_steps, below + negatives))


def _area(positives: float, negatives: float, twice: float) -> float:
    return twice / (2.0 * positives * negatives) if positives > 0 and negatives > 0 else math.nan


def check_finite(scores: Floats) -> None:
    """Refuse predictions that are NaN or infinite.

    Raises:
        NumericsError: a prediction is not finite; names the first row.
    """
    if not np.isfinite(scores).all():
        row = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise NumericsError("a prediction is not finite", where=f"row {row}", value=float(scores[row]))


def ordered_bits(scores: Floats) -> NDArray[np.int64]:
    """Return 32-bit integers with the same order and equality as the scores.

    Example:
        >>> np.argsort(ordered_bits(np.float32([0.5, -1.0, 0.0]))).tolist()
        [1, 2, 0]
    """
    bits = np.ascontiguousarray(scores + np.float32(0), np.float32).view(np.int32)  # + 0 turns -0.0 into 0.0
    return np.where(bits < 0, ~bits ^ np.int32(-(2**31)), bits).astype(np.int64)  # negative floats sort in reverse


def _group_counts(scores: Floats, labels: Floats) -> tuple[Doubles, Doubles]:
    """Return positives and rows up to the end of each group of equal score, for labels 0 and 1.

    Score and label are packed into one integer, so that one plain sort is enough. Without a permutation and a
    gather this is several times faster than sorting indices.
    """
    packed = ordered_bits(scores) << 1
    packed |= labels.astype(np.int64)
    packed.sort()
    group = packed >> 1
    ends = np.append(np.flatnonzero(group[1:] != group[:-1]), len(group) - 1)
    positives = np.cumsum(packed & 1)[ends]
    return positives.astype(np.float64), (ends + 1).astype(np.float64)


def _group_sums(scores: Floats, labels: Floats, weights: Floats | None) -> tuple[Doubles, Doubles]:
    """Return positive and total weight up to the end of each group of equal score."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    weight = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    return np.cumsum(labels[order] * weight)[ends], np.cumsum(weight)[ends]


def joined_weights(scores: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor | None:
    """Return the weights of all batches' rows, (n,), ones for batches without weights; None if no batch has weights.

    Example:
        >>> joined_weights([torch.zeros(1), torch.zeros(2)], [torch.tensor([0.5]), None])
        tensor([0.5000, 1.0000, 1.0000])
    """
    if all(one is None for one in weights):
        return None
    pairs = zip(scores, weights, strict=True)
    return torch.cat([torch.ones_like(own) if one is None else one for own, one in pairs])


@METRICS.register("auc")
class Auc(Metric):
    """Exact area under the ROC curve; stores 8 bytes per row (12 with weights).

    Example:
        >>> auc = Auc()
        >>> auc.update(torch.tensor([0.2, 0.7]), torch.tensor([0.0, 1.0]))
        >>> auc.compute()
        1.0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all rows."""
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._weights: list[Tensor | None] = []
        self._joined: tuple[float, float, float] | None = None

    def update(self, predictions: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch."""
        p, y, w = flat_rows(predictions, labels, weight)
        self._scores.append(p.float().clone())
        self._labels.append(y.float().clone())
        self._weights.append(None if w is None else w.float().clone())

    def _rows(self) -> tuple[Floats, Floats, Floats | None]:
        parts = [torch.cat(part).cpu().numpy() if part else None for part in (self._scores, self._labels)]
        nothing = np.empty(0, np.float32)
        scores, labels = (nothing if part is None else part for part in parts)
        weights = joined_weights(self._scores, self._weights)
        return scores, labels, None if weights is None else weights.cpu().numpy()

    def join(self, processes: Processes) -> None:
        """Rank the rows of all processes; each process ranks one range of scores.

        Let P_r, N_r, A_r be the positives, negatives and ordered pairs of range r. A positive of range r ranks above
        the negatives of all lower ranges, so all ordered pairs are the sum over r of A_r + P_r (N_0 + ... + N_{r-1}).
        """
        scores, labels, weights = self._rows()
        numbers = [int(np.isfinite(scores).all()), int(weights is not None)]
        flags = processes.gather_numbers(numbers)
        bad = [rank for rank, one in enumerate(flags) if not one[0]]
        if bad:
            raise NumericsError("a prediction is not finite", where=f"rows of rank {bad[0]}")
        if any(one[1] for one in flags) and weights is None:
            weights = np.ones(len(scores), np.float32)
        own = pair_sums(*exchange_rows(processes, scores, labels, weights))
        every = [part.tolist() for part in processes.gather(torch.tensor(own, dtype=torch.float64))]
        positives = negatives = twice = 0.0
        for range_positives, range_negatives, range_twice in every:
            twice += range_twice + 2.0 * range_positives * negatives
            positives, negatives = positives + range_positives, negatives + range_negatives
        self._joined = positives, negatives, twice

    def compute(self) -> float:
        """Return the AUC of all rows."""
        if self._joined is not None:
            value = _area(*self._joined)
            if math.isnan(value) and any(self._joined):
                self._say("AUC is undefined: all labels are %s", "1" if self._joined[0] else "0")
            return value
        if not self._scores:
            return math.nan
        scores, labels, weights = self._rows()
        value = roc_auc(scores, labels, weights)
        if math.isnan(value):
            self._say("AUC is undefined: all %d labels are %s", len(labels), "1" if labels.any() else "0")
        return value

    def _say(self, text: str, *values: object) -> None:
        log.log(logging.WARNING if self.warns else logging.INFO, text, *values)

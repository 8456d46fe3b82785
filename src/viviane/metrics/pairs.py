"""Metrics of recommenders beside AUC: average precision, ordered pairs of graded labels, entropy by segment, recall."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import ConfigError, DataError
from viviane.core.tensors import check_tensor
from viviane.metrics.auc import Doubles, Floats, ordered_bits
from viviane.metrics.given import flat
from viviane.metrics.order import Groups, starts_of
from viviane.metrics.ranking import StoredRows
from viviane.metrics.registry import GROUPED, METRICS, Processes

_EDGE = 1e-7


@METRICS.register("auprc")
class Auprc(StoredRows):
    """Area under the precision-recall curve as average precision; rows of equal score count together.

        AP = sum over thresholds t of (recall_t - recall_{t-1}) precision_t

    NaN without a positive row.

    Example:
        >>> metric = Auprc()
        >>> metric.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> round(metric.compute(), 4)
        0.8333
    """

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return the average precision, and 1; zeros without a positive row."""
        order = np.argsort(-ordered_bits(scores), kind="stable")
        key = ordered_bits(scores)[order]
        weight = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
        ends = np.append(np.flatnonzero(key[1:] != key[:-1]), len(key) - 1)
        positives, total = np.cumsum(labels[order] * weight)[ends], np.cumsum(weight)[ends]
        if positives[-1] <= 0:
            return 0.0, 0.0
        precision = np.divide(positives, total, out=np.zeros_like(total), where=total > 0)
        return float(np.diff(positives, prepend=0.0) @ precision / positives[-1]), 1.0


@METRICS.register("rauc")
class Rauc(StoredRows):
    """Share of pairs of rows with different labels whose predictions have the order of the labels; ties count one half.

    For labels 0 and 1 it is the AUC; it is also defined for graded labels, such as watch time. Every process gathers
    all rows. Sample weights are refused: a pair has no weight of its own. NaN if all labels are equal.

    Example:
        >>> metric = Rauc()
        >>> metric.update(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([1.0, 3.0, 5.0]))
        >>> round(metric.compute(), 4)
        0.6667
    """

    any_label: ClassVar[bool] = True

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return ordered pairs, ties as halves, and the number of pairs with different labels."""
        if weights is not None and not np.all(weights == weights[0]):
            raise ConfigError("rauc counts pairs, which have no weights", fix="choose auc, or leave out sample weights")
        _, score = np.unique(ordered_bits(scores), return_inverse=True)
        _, label = np.unique(labels, return_inverse=True)
        pairs = float(_pairs_of(len(label))) - float(_pairs_of(np.bincount(label)).sum())
        both = np.unique(label.astype(np.int64) * (int(score.max()) + 1) + score, return_counts=True)[1]
        tied = float(_pairs_of(np.bincount(score)).sum() - _pairs_of(both).sum())
        order = np.lexsort((score, label))  # equal labels by rising score: no inversion among them
        wrong = float(_inversions(score[order].astype(np.int64)))
        return float(pairs - wrong - tied / 2), float(pairs)


def _pairs_of(counts: int | NDArray[np.int64]) -> Doubles:
    many = np.asarray(counts, dtype=np.float64)
    return many * (many - 1) / 2


def _inversions(values: NDArray[np.int64]) -> int:
    """Count pairs whose first value is greater than the second, bit by bit from the highest one.

    Two values differ first at some bit. Sorted stably by the higher bits, pairs that agree in those lie together in
    their old order; of these, a 1 before a 0 is an inversion.
    """
    found = 0
    for bit in range(int(values.max(initial=0)).bit_length() - 1, -1, -1):
        order = np.argsort(values >> (bit + 1), kind="stable")
        high, ones = values[order] >> (bit + 1), (values[order] >> bit) & 1
        starts = np.flatnonzero(np.concatenate(([True], high[1:] != high[:-1])))
        before = np.cumsum(ones) - ones
        own_start = np.repeat(before[starts], np.diff(np.append(starts, len(high))))
        found += int((before - own_start)[ones == 0].sum())
    return found


@GROUPED.register("normalized_entropy")
class SegmentedNormalizedEntropy(StoredRows):
    """Normalised entropy within each segment, averaged with the segments' weights: "normalized_entropy:country".

        NE = sum_s n_s NE_s / sum_s n_s        n_s the rows (or their sample weight) of segment s

    over the segments that have both labels; see `NormalizedEntropy`. `segments` has the value of each of them.

    Example:
        >>> metric = SegmentedNormalizedEntropy()
        >>> p, y = torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([0.0, 1.0, 0.0, 1.0])
        >>> metric.update(p, y, groups=torch.tensor([3, 3, 4, 4]))
        >>> metric.compute(), metric.segments()
        (1.0, {3: 1.0, 4: 1.0})
    """

    higher_is_better: ClassVar[bool | None] = False
    by_group: ClassVar[bool] = True

    def __init__(self, k: int | None = None) -> None:
        if k is not None:
            raise ConfigError("the entropy uses complete segments", value=f"normalized_entropy@{k}",
                              fix="remove the number: 'normalized_entropy:country'")  # fmt: skip
        super().__init__()

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return the sum of entropies times their segments' weights, and of those weights."""
        _, ratio, weight = _entropies(groups, scores, labels, weights)
        known = ~np.isnan(ratio)
        return float((ratio * weight)[known].sum()), float(weight[known].sum())

    def segments(self) -> dict[int, float]:
        """Return the normalised entropy of each segment of this process's rows; NaN where all labels are equal."""
        p, y, w, ids = self._columns()
        if not len(p):
            return {}
        segment, ratio, _ = _entropies(ids, p, y, w if len(w) else None)
        return dict(zip(segment.tolist(), ratio.tolist(), strict=True))


def _entropies(
    groups: Groups, scores: Floats, labels: Floats, weights: Floats | None
) -> tuple[NDArray[np.int64], Doubles, Doubles]:
    """Return segments, the normalised entropy of each, NaN where it is undefined, and their weights."""
    order = np.argsort(groups, kind="stable")
    group, y = groups[order], labels[order].astype(np.float64)
    p = np.clip(scores[order].astype(np.float64), _EDGE, 1 - _EDGE)
    w = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    starts = starts_of(group)
    loss = np.add.reduceat(-w * (y * np.log(p) + (1 - y) * np.log1p(-p)), starts)
    positives, total = np.add.reduceat(w * y, starts), np.add.reduceat(w, starts)
    both = (positives > 0) & (positives < total)
    rate = np.where(both, positives / np.where(total > 0, total, 1.0), 0.5)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    ratio = np.where(both, loss / np.where(total > 0, total, 1.0) / entropy, np.nan)
    return group[starts], ratio, total


class MulticlassRecall:
    """Recall of each class of predictions with several classes: the share of its rows whose class scores highest.

    Of equal scores the class with the smallest number is taken, or all of the k best ones count.

    Args:
        num_classes: C.
        k: a row counts as found if its class is among the k highest scores.

    Example:
        >>> metric = MulticlassRecall(3)
        >>> metric.update(torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1], [0.2, 0.5, 0.3]]), torch.tensor([0, 1, 2]))
        >>> metric.compute(), metric.by_class()
        (0.6666666666666666, [1.0, 1.0, 0.0])
    """

    def __init__(self, num_classes: int, k: int = 1) -> None:
        if num_classes < 2 or not 1 <= k <= num_classes:
            raise ConfigError("not a recall of classes", value=f"num_classes={num_classes}, k={k}",
                              allowed="2 classes or more, 1 <= k <= num_classes")  # fmt: skip
        self.num_classes, self.k = num_classes, k
        self.reset()

    def reset(self) -> None:
        """Discard all rows."""
        self._sums = torch.zeros(2, self.num_classes, dtype=torch.float64)

    def update(self, predictions: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch: scores (B, C), classes (B,) from 0, weights (B,) or None.

        Raises:
            DataError: another shape, or a class out of range.
        """
        y = flat(labels, "labels").long()
        if not isinstance(predictions, Tensor):
            raise DataError("scores are no tensor", value=type(predictions).__name__)
        check_tensor(predictions, "scores")
        if predictions.shape != (len(y), self.num_classes):
            what = f"{tuple(predictions.shape)} for {len(y)} labels"
            raise DataError("scores need one column per class", value=what, allowed=f"(B, {self.num_classes})")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.num_classes:
            raise DataError("a class is out of range", value=f"{int(y.min())} to {int(y.max())}",
                            allowed=f"0 to {self.num_classes - 1}")  # fmt: skip
        best = torch.sort(predictions.detach(), dim=1, descending=True, stable=True).indices[:, : self.k]
        w = torch.ones(len(y), dtype=torch.float64) if weight is None else flat(weight, "weights").double().cpu()
        if len(w) != len(y):
            raise DataError("labels and weights differ in number", value=f"{len(y)} and {len(w)}")
        found = (best == y[:, None]).any(1).double().cpu()
        self._sums.index_add_(1, y.cpu(), torch.stack([w * found, w]))

    def join(self, processes: Processes) -> None:
        """Add the rows of all processes; a collective call."""
        self._sums = processes.all_reduce(self._sums)

    def by_class(self) -> list[float]:
        """Return the recall of each class; NaN where it has no row."""
        found: list[float] = (self._sums[0] / self._sums[1]).tolist()
        return found

    def compute(self) -> float:
        """Return the mean recall of the classes that have rows; NaN without rows."""
        known = [one for one in self.by_class() if not math.isnan(one)]
        return sum(known) / len(known) if known else math.nan

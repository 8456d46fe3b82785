"""HugeCTR's evaluation metrics, over all rows since they were last read.

Shapes: N rows, L columns of a label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from viviane.compat.hugectr.enums import MetricsType
from viviane.compat.hugectr.names import script_name

Array: TypeAlias = NDArray[np.float64]


def auc(scores: Array, labels: Array) -> float:
    """Area under the ROC curve, ties counting half: sum of y_i (1 - y_j) [s_i > s_j] / (sum y * sum (1 - y)).

    A label between 0 and 1 counts as that fraction of a positive row. NaN without positive or negative rows.

    Example:
        >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0]))
        0.75
    """
    _, place = np.unique(scores, return_inverse=True)
    positive = np.bincount(place, labels)
    negative = np.bincount(place, 1.0 - labels)
    total = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / total) if total else float("nan")


def hit_rate(scores: Array, labels: Array) -> float:
    """Fraction of label 1 among the rows predicted above 0.8; NaN if there are none.

    Example:
        >>> hit_rate(np.array([0.9, 0.85, 0.2]), np.array([1.0, 0.0, 1.0]))
        0.5
    """
    hits = scores > 0.8
    return float(labels[hits].mean()) if hits.any() else float("nan")


def ndcg(scores: Array, labels: Array) -> float:
    """Discounted gain of all rows by score, divided by that of the ideal order: sum y / log2(rank + 1), rank from 1.

    Example:
        >>> ndcg(np.array([0.9, 0.1]), np.array([1.0, 0.0]))
        1.0
    """
    discount = 1.0 / np.log2(np.arange(len(scores)) + 2.0)
    ideal = float((np.sort(labels)[::-1] * discount).sum())
    order = np.argsort(-scores, kind="stable")
    return float((labels[order] * discount).sum()) / ideal if ideal else float("nan")


def smape(scores: Array, labels: Array) -> float:
    """Mean of |p - y| / ((p + y) / 2).

    Example:
        >>> smape(np.array([0.5]), np.array([1.5]))
        1.0
    """
    return float(np.mean(np.abs(scores - labels) / ((scores + labels) / 2)))


_OF_ROWS: Final[dict[MetricsType, Callable[[Array, Array], float]]] = {
    MetricsType.AUC: auc,
    MetricsType.HitRate: hit_rate,
    MetricsType.NDCG: ndcg,
    MetricsType.SMAPE: smape,
}


class Scores:
    """Accumulates predictions, labels and losses of evaluation batches.

    Args:
        metrics: metrics to compute.
        labels: columns of each label, by name.
    """

    def __init__(self, metrics: list[MetricsType], labels: Mapping[str, range]) -> None:
        self.metrics, self.labels = metrics, labels
        self.last: tuple[Array, Array] | None = None
        """Predictions and labels of the last batch, (N, L)."""
        self._parts: list[tuple[Array, Array]] = []
        self._losses: list[float] = []

    def add(self, predictions: Array, labels: Array, loss: float) -> None:
        """Add a batch: predictions and labels (N, L), and its mean loss."""
        self.last = (predictions, labels)
        self._parts.append(self.last)
        self._losses.append(loss)

    def take(self) -> list[tuple[str, float]]:
        """Return and reset each metric; with several labels AUC is the mean, followed by that of each label."""
        if not self._parts:
            return [(metric.name, 0.0) for metric in self.metrics]
        scores, labels = (np.concatenate([part[i] for part in self._parts]) for i in range(2))
        result: list[tuple[str, float]] = []
        for metric in self.metrics:
            if metric is MetricsType.AverageLoss:
                result.append((metric.name, float(np.mean(self._losses))))
                continue
            by_label = {
                name: float(np.mean([_OF_ROWS[metric](scores[:, i], labels[:, i]) for i in places]))
                for name, places in self.labels.items()
            }
            result.append((metric.name, float(np.mean(list(by_label.values())))))
            if len(by_label) > 1:
                result += [(f"{metric.name}_{script_name(name)}", value) for name, value in by_label.items()]
        self._parts, self._losses = [], []
        return result

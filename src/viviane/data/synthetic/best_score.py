"""The best score that any model can reach, given the true probabilities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_auc(probabilities: NDArray[np.float64]) -> float:
    """Return the expected AUC of the true probabilities p, (R,), over draws of the labels.

        AUC = sum_ij p_i (1 - p_j) ([p_i > p_j] + [p_i = p_j] / 2) / (sum_i p_i  sum_j (1 - p_j))

    No scorer does better in expectation (Neyman-Pearson); labels are integrated out, so the value has less
    noise than one measured on drawn labels.

    Returns: NaN if one class has probability 0.

    Example:
        >>> round(best_auc(np.array([0.1, 0.9] * 500)), 3)
        0.9
    """
    values, inverse = np.unique(probabilities, return_inverse=True)
    positive = np.bincount(inverse, probabilities, len(values))
    negative = np.bincount(inverse, 1 - probabilities, len(values))
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return float("nan")
    return float((positive * (np.cumsum(negative) - negative / 2)).sum() / pairs)


def best_log_loss(probabilities: NDArray[np.float64]) -> float:
    """Return the mean entropy -p log p - (1 - p) log(1 - p) of the labels, in nats.

    Example:
        >>> round(best_log_loss(np.array([0.5, 0.5])), 4)
        0.6931
    """
    if not len(probabilities):
        return float("nan")
    p = np.clip(probabilities, 1e-300, 1 - 1e-16)
    return float(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean())

"""Calibration of scores to probabilities: Platt scaling, isotonic regression, and correction of a changed base rate."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from viviane.core.errors import ConfigError, DataError

Floats = NDArray[np.float64]
_STEPS = 50
_LEAST = 1e-7


def logit(p: ArrayLike) -> Floats:
    """Return ln(p / (1 - p)), with p clipped to [1e-7, 1 - 1e-7].

    Example:
        >>> logit([0.5]).tolist()
        [0.0]
    """
    inside = np.clip(np.asarray(p, dtype=np.float64), _LEAST, 1 - _LEAST)
    result: Floats = np.log(inside) - np.log1p(-inside)
    return result


def sigmoid(x: ArrayLike) -> Floats:
    """Return 1 / (1 + e^-x).

    Example:
        >>> sigmoid([0.0]).tolist()
        [0.5]
    """
    result: Floats = 0.5 * (1 + np.tanh(0.5 * np.asarray(x, dtype=np.float64)))
    return result


@dataclass(frozen=True)
class PlattScaling:
    """p' = sigmoid(a logit(p) + b), fitted by maximum likelihood with a weak prior at a = 1, b = 0.

    Source: Platt 1999, "Probabilistic Outputs for Support Vector Machines".

    Example:
        >>> p, y = np.full(1000, 0.5), np.arange(1000) < 100
        >>> round(float(PlattScaling.fit(p, y)([0.5])[0]), 2)
        0.1
    """

    slope: float
    shift: float

    @classmethod
    def fit(cls, p: ArrayLike, y: ArrayLike, weight: ArrayLike | None = None) -> PlattScaling:
        """Fit to predictions and labels of rows that the model was not trained on.

        Args:
            p, y: probabilities and labels 0 or 1, (rows,).
            weight: weights of the rows.

        Raises:
            DataError: lengths differ, or there are no rows.
        """
        predictions, labels, weights = _rows(p, y, weight)
        weights_of_logits, shift = fit_blend(logit(predictions)[:, None], labels, weights)
        return cls(float(weights_of_logits[0]), shift)

    def __call__(self, p: ArrayLike) -> Floats:
        """Return calibrated probabilities."""
        return sigmoid(self.slope * logit(p) + self.shift)


@dataclass(frozen=True)
class IsotonicCalibration:
    """The increasing step function of p that fits the labels best, linearly interpolated.

    Source: Zadrozny and Elkan 2002, "Transforming classifier scores into accurate multiclass probability estimates".

    Example:
        >>> IsotonicCalibration.fit([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1])([0.05, 0.95]).round(3).tolist()
        [0.0, 1.0]
    """

    x: Floats
    y: Floats

    @classmethod
    def fit(cls, p: ArrayLike, y: ArrayLike, weight: ArrayLike | None = None) -> IsotonicCalibration:
        """Fit to predictions and labels of rows that the model was not trained on; arguments as for `PlattScaling`.

        Raises:
            DataError: lengths differ, or there are no rows.
        """
        predictions, labels, weights = _rows(p, y, weight)
        points, place = np.unique(predictions, return_inverse=True)
        total: Floats = np.bincount(place, weights).astype(np.float64)
        mean = np.bincount(place, weights * labels) / np.maximum(total, _LEAST)
        heights, _sizes, starts = _pool(mean, total)
        ends = np.append(starts[1:], len(points)) - 1
        x = np.column_stack([points[starts], points[ends]]).reshape(-1)
        keep = np.append(True, np.diff(x) > 0)
        return cls(x[keep], np.repeat(heights, 2)[keep])

    def __call__(self, p: ArrayLike) -> Floats:
        """Return calibrated probabilities."""
        result: Floats = np.interp(np.asarray(p, dtype=np.float64), self.x, self.y)
        return result


@dataclass(frozen=True)
class PriorCorrection:
    """Corrects a changed base rate: odds' = odds c0 / c1, with the weight factors c1 of positives and c0 of negatives.

    For class weights (w0, w1), c0 = w0 and c1 = w1; for a sample with a fraction r of the negatives, c0 = r and c1 = 1.

    Source: Elkan 2001, "The Foundations of Cost-Sensitive Learning"; He et al. 2014, "Practical Lessons from Predicting
    Clicks on Ads at Facebook".

    Example:
        >>> PriorCorrection.of_sampling(0.1)([0.5]).round(4).tolist()
        [0.0909]
    """

    negatives: float
    positives: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.negatives < np.inf and 0 < self.positives < np.inf):
            value = (self.negatives, self.positives)
            raise ConfigError("factors of a prior correction must be positive", value=value)

    @classmethod
    def of_sampling(cls, kept: float) -> PriorCorrection:
        """Return the correction for training rows sampled with a fraction `kept` of the negatives.

        Raises:
            ConfigError: the fraction is not in (0, 1].
        """
        given: Any = kept
        if isinstance(given, bool) or not isinstance(given, Real) or not 0 < float(given) <= 1:
            raise ConfigError("not a valid fraction of negatives", value=kept, allowed="0 < kept <= 1")
        return cls(kept)

    @property
    def shift(self) -> float:
        """The value added to the logit."""
        return float(np.log(self.negatives / self.positives))

    def __call__(self, p: ArrayLike) -> Floats:
        """Return corrected probabilities."""
        odds = np.asarray(p, dtype=np.float64) * self.negatives
        result: Floats = odds / (odds + (1 - np.asarray(p, dtype=np.float64)) * self.positives)
        return result


def fit_blend(
    logits: Floats, y: ArrayLike, weight: ArrayLike | None = None, *, prior: float = 1.0
) -> tuple[Floats, float]:
    """Return weights w >= 0 and a shift b of several models, such that sigmoid(sum_m w_m x_m + b) fits the labels.

        minimize  sum_i -ln p(y_i)  +  prior / 2 sum_m (w_m - 1 / M)^2,    w_m >= 0

    Newton's method on the models with positive weight; a model whose weight would become negative is removed.

    Args:
        logits: logits of rows that the models were not trained on, (rows, M).
        y: labels 0 or 1.
        weight: weights of the rows.
        prior: strength of the prior towards equal weights.

    Example:
        >>> weights, shift = fit_blend(np.array([[-2.0, 0.3], [2.0, -0.1]] * 50), [0, 1] * 50)
        >>> bool(weights[0] > weights[1])
        True
    """
    labels = np.asarray(y, dtype=np.float64)
    rows = np.ones(len(labels)) if weight is None else np.asarray(weight, dtype=np.float64)
    count = logits.shape[1]
    start = 1 / count
    used = list(range(count))
    while True:
        found = _newton(logits[:, used], labels, rows, start, prior)
        negative = [place for place, value in enumerate(found[:-1]) if value < 0]
        if not negative or len(used) == 1:
            break
        used.pop(min(negative, key=lambda place: found[place]))
    weights = np.zeros(count)
    weights[used] = np.maximum(found[:-1], 0.0)
    return weights, float(found[-1])


def _newton(x: Floats, y: Floats, rows: Floats, start: float, prior: float) -> Floats:
    design = np.column_stack([x, np.ones(len(x))])
    centre = np.append(np.full(x.shape[1], start), 0.0)
    strength = np.append(np.full(x.shape[1], prior), prior * 1e-3)
    at = centre.copy()

    def cost(w: Floats) -> float:
        z = design @ w
        return float(rows @ (np.logaddexp(0, z) - y * z) + 0.5 * strength @ (w - centre) ** 2)

    now = cost(at)
    for _ in range(_STEPS):
        p = sigmoid(design @ at)
        gradient = design.T @ (rows * (p - y)) + strength * (at - centre)
        hessian = (design * (rows * p * (1 - p))[:, None]).T @ design + np.diag(strength)
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while (after := cost(at - size * step)) > now and size > 1e-4:
            size /= 2
        if now - after < 1e-9 * max(abs(now), 1.0):
            break
        at, now = at - size * step, after
    return at


def _pool(mean: Floats, weight: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Pool adjacent violators: return heights, weights and starts of the blocks of the best increasing function."""
    heights: list[float] = []
    sizes: list[float] = []
    starts: list[int] = []
    for place, (height, size) in enumerate(zip(mean.tolist(), weight.tolist(), strict=True)):
        heights.append(height)
        sizes.append(size)
        starts.append(place)
        while len(heights) > 1 and heights[-2] >= heights[-1]:
            total = sizes[-2] + sizes[-1]
            joined = (heights[-2] * sizes[-2] + heights[-1] * sizes[-1]) / max(total, _LEAST)
            heights[-2:], sizes[-2:] = [joined], [total]
            starts.pop()
    return np.array(heights), np.array(sizes), np.array(starts, dtype=np.int64)


def _rows(p: ArrayLike, y: ArrayLike, weight: ArrayLike | None) -> tuple[Floats, Floats, Floats]:
    predictions, labels = np.asarray(p, dtype=np.float64), np.asarray(y, dtype=np.float64)
    weights = np.ones(len(labels)) if weight is None else np.asarray(weight, dtype=np.float64)
    if predictions.ndim != 1 or predictions.shape != labels.shape or labels.shape != weights.shape or not len(labels):
        value = [predictions.shape, labels.shape, weights.shape]
        raise DataError("predictions, labels and weights need one entry per row", value=value)
    return predictions, labels, weights

"""Metrics that are ratios of sums: log loss, accuracy, calibration; with constant memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from viviane.core.errors import NumericsError
from viviane.metrics.given import flat_rows
from viviane.metrics.registry import METRICS, Metric, Processes

EPSILON = 1e-7
"""Distance of clipped probabilities from 0 and 1 in the log loss: float32 has no finer resolution near 1."""


class Ratio(Metric):
    """A ratio of two float64 sums that stay on the device until `compute`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all rows."""
        self._top: Tensor | None = None
        self._bottom: Tensor | None = None
        self._odd: Tensor | None = None

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator of each row, (B,) and (B,)."""
        raise TypeError(f"{type(self).__name__} does not define terms")

    def update(self, predictions: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch."""
        p, y, given = flat_rows(predictions, labels, weight)
        p, y = p.double(), y.double()
        odd = (~(torch.isfinite(p) & torch.isfinite(y))).sum()
        self._odd = odd if self._odd is None else self._odd + odd
        top, bottom = self.terms(p, y)
        if given is not None:
            w = given.double()
            top, bottom = top * w, bottom * w
        self._top = top.sum() if self._top is None else self._top + top.sum()
        self._bottom = bottom.sum() if self._bottom is None else self._bottom + bottom.sum()

    def join(self, processes: Processes) -> None:
        """Add the sums of all processes."""
        sums = torch.zeros(3, dtype=torch.float64)
        if self._top is not None and self._bottom is not None and self._odd is not None:
            sums = torch.stack([self._top, self._bottom, self._odd.double()]).cpu()
        self._top, self._bottom, self._odd = processes.all_reduce(sums).unbind()

    def compute(self) -> float:
        """Return the ratio, NaN without rows.

        Raises:
            NumericsError: a prediction or a label is NaN or infinite.
        """
        if self._odd is not None and self._odd.item():
            what = "a prediction or label is not finite"
            raise NumericsError(what, where=f"metric {type(self).__name__}", value=f"{int(self._odd.item())} row(s)")
        if self._top is None or self._bottom is None or self._bottom.item() == 0:
            return math.nan
        return float((self._top / self._bottom).item())


@METRICS.register("log_loss")
class LogLoss(Ratio):
    """Mean of -(y log p + (1 - y) log(1 - p)), with p clipped to [1e-7, 1 - 1e-7].

    Example:
        >>> metric = LogLoss()
        >>> metric.update(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
        >>> round(metric.compute(), 4)
        0.6931
    """

    higher_is_better: ClassVar[bool | None] = False

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's loss, and 1."""
        p = p.clamp(EPSILON, 1 - EPSILON)
        return -(torch.xlogy(y, p) + torch.xlogy(1 - y, 1 - p)), torch.ones_like(p)


@METRICS.register("accuracy")
class Accuracy(Ratio):
    """Fraction of rows whose label is 1 if and only if the prediction is at least one half."""

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 for each correct row, and 1."""
        return ((p >= 0.5) == (y >= 0.5)).double(), torch.ones_like(p)


@METRICS.register("calibration")
class Calibration(Ratio):
    """Mean prediction over mean label: 1 is calibrated, 1.1 predicts 10% too many clicks.

    Source: He et al. 2014.
    """

    higher_is_better: ClassVar[bool | None] = None

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's prediction and label."""
        return p, y


@METRICS.register("hit_rate")
class HitRate(Ratio):
    """Fraction of label 1 among rows predicted above 0.8: HugeCTR's HitRate, a precision. NaN without such rows.

    "hit_rate@10:user" is a different metric, see `GroupHitRate`.

    Example:
        >>> metric = HitRate()
        >>> metric.update(torch.tensor([0.9, 0.85, 0.5]), torch.tensor([1.0, 0.0, 1.0]))
        >>> metric.compute()
        0.5
    """

    threshold: ClassVar[float] = 0.8

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 for each hit, and 1 for each row above the threshold."""
        chosen = (p > self.threshold).double()
        return chosen * y, chosen


class _MeanLabel(Ratio):
    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, torch.ones_like(y)


@METRICS.register("normalized_entropy")
class NormalizedEntropy(Metric):
    """Log loss over that of predicting the mean label for every row: below 1 the model is better than the base rate.

        NE = log loss / -(r log r + (1 - r) log(1 - r)),  r the mean label

    NaN if all labels are equal.

    Source: He et al. 2014.

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
        >>> metric.compute()
        1.0
    """

    higher_is_better: ClassVar[bool | None] = False

    def __init__(self) -> None:
        self._loss, self._rate = LogLoss(), _MeanLabel()

    def reset(self) -> None:
        """Discard all rows."""
        self._loss.reset()
        self._rate.reset()

    def update(self, predictions: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch."""
        self._loss.update(predictions, labels, weight)
        self._rate.update(predictions, labels, weight)

    def compute(self) -> float:
        """Return the ratio."""
        rate = self._rate.compute()
        if not 0 < rate < 1:
            return math.nan
        return self._loss.compute() / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


@METRICS.register("average_loss")
class AverageLoss(Metric):
    """Mean of the batches' losses, each batch with weight 1: HugeCTR's AverageLoss.

    The metric "loss" of an evaluation weights batches by their rows instead.

    Example:
        >>> metric = AverageLoss()
        >>> metric.update_loss(torch.tensor(1.0)); metric.update_loss(torch.tensor(3.0))
        >>> metric.compute()
        2.0
    """

    higher_is_better: ClassVar[bool | None] = False
    any_label: ClassVar[bool] = True
    of_loss: ClassVar[bool] = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all batches."""
        self._batches: list[tuple[Tensor, Tensor | float]] = []

    def update_loss(self, loss: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add the loss of a batch, or of a process's share of it with its weight in the batch's mean."""
        self._batches.append((loss.detach().double(), weight))

    def join(self, processes: Processes) -> None:
        """Combine the shares of all processes; all of them must have added the same number of batches."""
        sums = [
            [float(loss) * float(weight) if float(weight) else 0.0, float(weight)] for loss, weight in self._batches
        ]
        whole = processes.all_reduce(torch.tensor(sums, dtype=torch.float64).reshape(-1, 2))
        self._batches = [(total / weight, 1.0) for total, weight in whole if weight > 0]

    def compute(self) -> float:
        """Return the mean, NaN without batches."""
        return float(torch.stack([loss for loss, _ in self._batches]).mean()) if self._batches else math.nan


@dataclass(frozen=True)
class HistogramBin:
    """The rows whose prediction is in one bin."""

    mean_prediction: float
    mean_label: float
    count: int


class CalibrationHistogram:
    """Predictions in bins of equal width over [0, 1], with each bin's mean prediction and mean label.

    Example:
        >>> histogram = CalibrationHistogram(num_bins=2)
        >>> histogram.update(torch.tensor([0.1, 0.3, 1.0]), torch.tensor([0.0, 1.0, 1.0]))
        >>> [(one.count, one.mean_label) for one in histogram.compute()]
        [(2, 0.5), (1, 1.0)]
    """

    def __init__(self, num_bins: int = 20) -> None:
        self.num_bins = num_bins
        self._sums = torch.zeros(3, num_bins, dtype=torch.float64)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch of probabilities (B,) and labels (B,)."""
        p, y, _ = flat_rows(predictions, labels)
        p, y = p.double(), y.double()
        if not bool(torch.isfinite(p).all()):
            raise NumericsError("a prediction is not finite", where=type(self).__name__)
        place = (p * self.num_bins).long().clamp(0, self.num_bins - 1)
        rows = torch.stack([p, y, torch.ones_like(p)])
        sums = torch.zeros(3, self.num_bins, dtype=torch.float64, device=p.device)
        self._sums = self._sums.to(p.device) + sums.index_add_(1, place, rows)

    def join(self, processes: Processes) -> None:
        """Add the rows of all processes."""
        self._sums = processes.all_reduce(self._sums.cpu())

    def compute(self) -> list[HistogramBin]:
        """Return the non-empty bins, by ascending prediction."""
        bins = []
        for predictions, labels, count in self._sums.t().tolist():
            if count:
                bins.append(HistogramBin(predictions / count, labels / count, int(count)))
        return bins

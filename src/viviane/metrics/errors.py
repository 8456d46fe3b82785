"""Metrics of the difference between prediction and label, for all kinds of labels."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from viviane.metrics.means import Ratio
from viviane.metrics.registry import METRICS


@METRICS.register("mean_squared_error")
class MeanSquaredError(Ratio):
    """Mean of (p - y)^2; for probabilities, the Brier score."""

    higher_is_better: ClassVar[bool | None] = False
    any_label: ClassVar[bool] = True

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's squared error, and 1."""
        return (p - y).square(), torch.ones_like(p)


@METRICS.register("root_mean_squared_error")
class RootMeanSquaredError(MeanSquaredError):
    """Root of the mean of (p - y)^2, RMSE.

    Example:
        >>> metric = RootMeanSquaredError()
        >>> metric.update(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0]))
        >>> metric.compute()
        3.0
    """

    def compute(self) -> float:
        """Return the root, NaN without rows."""
        return math.sqrt(super().compute())


@METRICS.register("mean_absolute_error")
class MeanAbsoluteError(Ratio):
    """Mean of |p - y|, MAE."""

    higher_is_better: ClassVar[bool | None] = False
    any_label: ClassVar[bool] = True

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's absolute error, and 1."""
        return (p - y).abs(), torch.ones_like(p)


@METRICS.register("smape")
class Smape(Ratio):
    """Symmetric mean absolute percentage error: mean of |p - y| / ((p + y) / 2), 0 where p = y = 0.

    As in HugeCTR: a fraction, not multiplied by 100, between 0 and 2 for non-negative values.

    Example:
        >>> metric = Smape()
        >>> metric.update(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0]))
        >>> metric.compute()
        0.5
    """

    higher_is_better: ClassVar[bool | None] = False
    any_label: ClassVar[bool] = True

    def terms(self, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's relative error, and 1."""
        error, half = (p - y).abs(), (p + y) / 2
        return torch.where(error == 0, torch.zeros_like(p), error / half), torch.ones_like(p)

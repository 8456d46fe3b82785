"""Metrics by name: fed batch by batch, computed when asked."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from viviane.core.registry import Registry


class Metric:
    """A figure over all the rows it was fed.

    `higher_is_better` is None where neither direction is (calibration: 1 is best).
    """

    higher_is_better: ClassVar[bool | None] = True

    def update(self, predictions: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch: probabilities (B,), labels (B,), weights (B,) or None for 1 each."""
        raise TypeError(f"{type(self).__name__} does not define update")

    def compute(self) -> float:
        """Return the figure over all rows since `reset`; NaN where it is undefined."""
        raise TypeError(f"{type(self).__name__} does not define compute")

    def reset(self) -> None:
        """Forget all rows."""
        raise TypeError(f"{type(self).__name__} does not define reset")


METRICS: Registry[type[Metric]] = Registry("metric")


def build_metric(name: str) -> Metric:
    """Build a metric by its registered name.

    Raises:
        ConfigError: with the nearest name.

    Example:
        >>> build_metric("auc").higher_is_better
        True
    """
    return METRICS[name]()

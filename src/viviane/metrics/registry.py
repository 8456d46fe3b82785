"""Metrics by name: fed batch by batch, computed when asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.core.registry import Registry


class Processes(Protocol):
    """What a metric asks of the processes that evaluate together: see `viviane.parallel.Group`."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every process's tensor (N,), in order of rank."""

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every process, in order of rank."""

    def all_to_all(self, given: Tensor, given_splits: Sequence[int], taken_splits: Sequence[int]) -> Tensor:
        """Send each process its part of a flat tensor, and return the parts they sent."""


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

    def join(self, processes: Processes) -> None:
        """Make the figure that of all processes' rows; all of them call it together, once, before `compute`.

        Raises:
            ConfigError: the metric does not say how.
        """
        raise ConfigError(
            "the metric cannot be joined over processes", value=type(self).__name__,
            fix="define join(processes), or evaluate in one process",
        )  # fmt: skip

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

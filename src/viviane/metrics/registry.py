"""Metrics by name: fed batch by batch, computed when asked.

A name may say more than the metric: "ndcg@10:user" is NDCG over the ten best rows of each user, where user is a
one-hot column of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    any_label: ClassVar[bool] = False
    """Whether it is defined for regression labels too."""
    of_loss: ClassVar[bool] = False
    """Whether it is fed the losses of batches (`update_loss`), not predictions."""
    by_group: ClassVar[bool] = False
    """Whether `update` needs the group of each row, such as its user or query."""

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
GROUPED: Registry[type[Metric]] = Registry("metric by group")


@dataclass(frozen=True)
class MetricName:
    """A metric's name, taken apart: base, the number behind "@" and the column behind ":".

    Example:
        >>> MetricName.parse("ndcg@10:user")
        MetricName(base='ndcg', k=10, group='user')
    """

    base: str
    k: int | None = None
    group: str | None = None

    @classmethod
    def parse(cls, name: str) -> MetricName:
        """Take a name apart.

        Raises:
            ConfigError: what follows "@" is not a number from 1, or no column follows ":".
        """
        front, colon, group = name.partition(":")
        base, at, text = front.partition("@")
        if (at and (not text.isdigit() or int(text) < 1)) or (colon and not group):
            raise ConfigError("not the name of a metric", value=name, allowed="name, name:column or name@k:column")
        return cls(base, int(text) if at else None, group or None)

    @property
    def kind(self) -> type[Metric]:
        """The metric's class; one that compares the rows of a group where "@" or ":" is in the name.

        Raises:
            ConfigError: an unknown metric, with the nearest name; one that knows no groups.
        """
        plain = self.k is None and self.group is None
        if not plain and self.base in METRICS and self.base not in GROUPED:
            raise ConfigError("the metric knows no groups", value=self.base, allowed=", ".join(GROUPED))
        return METRICS[self.base] if plain else GROUPED[self.base]


def build_metric(name: str) -> Metric:
    """Build a metric by its registered name, such as "auc" or "ndcg@10:user".

    Raises:
        ConfigError: with the nearest name.

    Example:
        >>> build_metric("auc").higher_is_better
        True
    """
    parsed = MetricName.parse(name)
    return parsed.kind() if parsed.k is None else parsed.kind(parsed.k)  # type: ignore[call-arg]

"""The interface and the registry of metrics: updated per batch, computed on demand.

A name may have parameters: "ndcg@10:user" is NDCG over the ten best rows of each user, where user is a
one-hot column of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from viviane.core.digits import number_in
from viviane.core.errors import ConfigError
from viviane.core.registry import Registry


class Processes(Protocol):
    """The collectives that a metric needs; implemented by `viviane.parallel.Group`."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every process's tensor (N,), in order of rank."""

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the integers of every process, in order of rank."""

    def all_to_all(self, given: Tensor, given_splits: Sequence[int], taken_splits: Sequence[int]) -> Tensor:
        """Send each process its part of a flat tensor, and return the parts they sent."""


class Metric:
    """A value computed from all rows that were added.

    `higher_is_better` is None where neither direction is (calibration: 1 is best).
    """

    higher_is_better: ClassVar[bool | None] = True
    any_label: ClassVar[bool] = False
    """Whether the metric is also defined for regression labels."""
    of_loss: ClassVar[bool] = False
    """Whether the metric uses the losses of batches (`update_loss`), not predictions."""
    by_group: ClassVar[bool] = False
    """Whether `update` needs the group of each row, such as its user or query."""
    warns: bool = True
    """Whether the reason of an undefined value is logged as a warning, or as information."""

    def update(self, predictions: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch: probabilities (B,), labels (B,), weights (B,) or None for 1 each."""
        raise TypeError(f"{type(self).__name__} does not define update")

    def compute(self) -> float:
        """Return the value for all rows since `reset`; NaN if it is undefined."""
        raise TypeError(f"{type(self).__name__} does not define compute")

    def join(self, processes: Processes) -> None:
        """Combine the rows of all processes; a collective call, once, before `compute`.

        Raises:
            ConfigError: the metric does not define `join`.
        """
        raise ConfigError(
            "the metric cannot be joined over processes", value=type(self).__name__,
            fix="define join(processes), or evaluate in one process",
        )  # fmt: skip

    def reset(self) -> None:
        """Discard all rows."""
        raise TypeError(f"{type(self).__name__} does not define reset")


METRICS: Registry[type[Metric]] = Registry("metric")
GROUPED: Registry[type[Metric]] = Registry("metric by group")


@dataclass(frozen=True)
class MetricName:
    """A parsed metric name: base, the number after "@" and the column after ":".

    Example:
        >>> MetricName.parse("ndcg@10:user")
        MetricName(base='ndcg', k=10, group='user')
    """

    base: str
    k: int | None = None
    group: str | None = None

    @classmethod
    def parse(cls, name: str) -> MetricName:
        """Parse a name.

        Raises:
            ConfigError: what follows "@" is not a number from 1, or no column follows ":".
        """
        front, colon, group = name.partition(":")
        base, at, text = front.partition("@")
        number = number_in(text)
        if (at and not number) or (colon and not group):
            raise ConfigError("not a valid metric name", value=name, allowed="name, name:column or name@k:column")
        return cls(base, number if at else None, group or None)

    @property
    def kind(self) -> type[Metric]:
        """The metric's class; a grouped metric if the name contains "@" or ":".

        Raises:
            ConfigError: the metric is unknown, or does not support groups.
        """
        plain = self.k is None and self.group is None
        if not plain and self.base in METRICS and self.base not in GROUPED:
            raise ConfigError("the metric does not support groups", value=self.base, allowed=", ".join(GROUPED))
        return METRICS[self.base] if plain else GROUPED[self.base]


def build_metric(name: str) -> Metric:
    """Build a metric by its registered name, such as "auc" or "ndcg@10:user".

    Raises:
        ConfigError: the metric is unknown; suggests the nearest name.

    Example:
        >>> build_metric("auc").higher_is_better
        True
    """
    parsed = MetricName.parse(name)
    return parsed.kind() if parsed.k is None else parsed.kind(parsed.k)  # type: ignore[call-arg]

"""A table as the world outside sees it: rows, optimizer state and age, without its storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class TableState:
    """A table's content.

    Args:
        weight: (num_rows, dim), float32.
        state: optimizer state by name, each (num_rows, dim): "accumulator" of AdaGrad, "m" and "v" of Adam.
        step: how many updates the table has had.
    """

    weight: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True)
class TableSummary:
    """A line of a model's summary."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]
    optimizer: str
    trainable: bool
    weight_bytes: int
    state_bytes: int

    @property
    def num_parameters(self) -> int:
        """Numbers in the table."""
        return self.num_rows * self.dim

"""A table as callers see it: rows, optimizer state and age, without its storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import CheckpointError
from viviane.embedding.config import TableConfig
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.ops.row_update import state_row_bytes


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


class SavedRows(Protocol):
    """A table, or a shard of it, as a checkpoint has it."""

    @property
    def step(self) -> int:
        """How many updates the table has had."""

    @property
    def padding_row(self) -> int | None:
        """The row that stays zero."""

    def content(self) -> dict[str, Tensor]:
        """Return all tensors by name, of a dynamic table."""

    def copy_to(self, name: str, target: Tensor, first: int = 0) -> None:
        """Fill a tensor with the rows of a column, "weight" or "state.<name>", from `first` on."""


@dataclass(frozen=True)
class TableSummary:
    """A line of a model's summary; rows of a dynamic table are those that have keys at present."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]
    optimizer: str
    trainable: bool
    weight_bytes: int
    state_bytes: int
    is_dynamic: bool = False

    @property
    def num_parameters(self) -> int:
        """Numbers in the table."""
        return self.num_rows * self.dim


def summarize(
    table: TableConfig | DynamicTableConfig,
    optimizer: AnyOptimizer,
    features: tuple[str, ...],
    num_rows: int,
    trainable: bool,
) -> TableSummary:
    """Describe a table, which need not exist yet.

    Args:
        optimizer: the rule, where the settings have none.
        features: that look it up.
        num_rows: that it has.
        trainable: whether it moves at present.
    """
    rule = (table.optimizer or optimizer) if table.trainable else None
    weight_bytes = num_rows * table.dim * table.torch_dtype.itemsize
    name = rule.type if rule is not None else "none"
    dynamic = isinstance(table, DynamicTableConfig)
    return TableSummary(
        table.name,
        num_rows,
        table.dim,
        features,
        name,
        trainable,
        weight_bytes,
        num_rows * state_row_bytes(rule, table.dim),
        dynamic,
    )


def check_content(table: str, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse rows and state of a table whose names or shapes differ from its own.

    Raises:
        CheckpointError: they do.
    """
    if own.keys() != given.keys():
        raise CheckpointError(
            "another optimizer's state", where=f"table {table!r}", value=", ".join(given), allowed=", ".join(own)
        )
    for name, part in given.items():
        if part.shape != own[name].shape:
            where, allowed = f"table {table!r}, {name}", str(tuple(own[name].shape))
            raise CheckpointError("the shape differs", where=where, value=tuple(part.shape), allowed=allowed)

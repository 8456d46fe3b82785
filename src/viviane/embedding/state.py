"""A table as the world outside sees it: rows, optimizer state and age, without its storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import CheckpointError
from viviane.embedding.config import TableConfig
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.embedding.storage import Storage
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


def export_table(storage: Storage, table: str, copy: bool) -> TableState:
    """Take a table out of its storage: a copy, or views of the live memory."""
    content = TableState(storage.table_rows(table), storage.table_state(table), storage.steps[table])
    if not copy:
        return content
    state = {name: part.clone() for name, part in content.state.items()}
    return TableState(content.weight.clone(), state, content.step)


def import_table(storage: Storage, table: str, content: TableState) -> None:
    """Copy a table into its storage; see `EmbeddingCollection.import_table`."""
    own = {"weight": storage.table_rows(table)}
    given = {"weight": content.weight}
    if content.state:
        own |= storage.table_state(table)
        given |= content.state
    if own.keys() != given.keys():
        raise CheckpointError(
            "another optimizer's state", where=f"table {table!r}", value=", ".join(given), allowed=", ".join(own)
        )
    for name, part in given.items():
        if part.shape != own[name].shape:
            raise CheckpointError(
                "the shape differs",
                where=f"table {table!r}, {name}",
                value=tuple(part.shape),
                allowed=str(tuple(own[name].shape)),
            )
    storage.settle()
    for name, part in given.items():
        own[name].copy_(part)
    if content.state:
        storage.steps[table] = content.step
    else:
        storage.reset_table_state(table)
        if not storage.table_state(table):  # a rule without state, such as SGD: its count is still known
            storage.steps[table] = content.step
    storage.clear_padding(table)


def state_entries(storage: Storage, table: str, prefix: str) -> dict[str, Tensor]:
    """Return a table's part of a state_dict: views, and the step."""
    parts = {"weight": storage.table_rows(table), **storage.table_state(table)}
    parts["step"] = torch.tensor(storage.steps[table])
    return {f"{prefix}{table}.{name}": part for name, part in parts.items()}


def load_entries(
    storage: Storage,
    table: str,
    prefix: str,
    given: Mapping[str, Tensor],
    missing_keys: list[str],
    error_msgs: list[str],
) -> set[str]:
    """Copy a table's part of a state_dict in, as `nn.Module.load_state_dict` asks; returns the keys it knows."""
    own = state_entries(storage, table, prefix)
    for key, target in own.items():
        if key not in given:
            missing_keys.append(key)
        elif given[key].shape != target.shape:
            error_msgs.append(f"{key} has shape {tuple(given[key].shape)}, the table {tuple(target.shape)}")
        else:
            target.copy_(given[key])
    storage.steps[table] = int(own[f"{prefix}{table}.step"])
    storage.clear_padding(table)
    return set(own)

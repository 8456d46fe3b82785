"""Sharding plans: which rank holds which shard of which table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicTableConfig, TableConfig
from viviane.ops.rules import rule_of

Kind = Literal["replicated", "table", "row", "column", "hybrid"]
AnyTable: TypeAlias = TableConfig | DynamicTableConfig


class TablePlan(Settings):
    """Where one table is.

    Args:
        table: its name.
        kind: "replicated"   every process has the whole table
            "table"       one process has it
            "row"         key k is on ranks[k mod n]
            "column"      each of the ranks has some columns of all rows
            "hybrid"      keys below num_hot are replicated, the others as in "row"
        ranks: the processes that hold parts, in order; empty where it is replicated.
        num_hot: of a hybrid table; the ETL numbers ids by falling count, so the first ones are the frequent ones.

    Example:
        >>> TablePlan(table="item", kind="row", ranks=[0, 1]).kind
        'row'
    """

    table: str = Field(min_length=1)
    kind: Kind
    ranks: tuple[int, ...] = ()
    num_hot: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> TablePlan:
        if (self.kind == "replicated") != (not self.ranks):
            raise ValueError(f"table {self.table!r}: {self.kind!r} takes {'no' if self.ranks else 'some'} ranks")
        if self.kind == "table" and len(self.ranks) != 1:
            raise ValueError(f"table {self.table!r}: 'table' takes one rank, got {len(self.ranks)}")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"table {self.table!r}: a rank occurs twice in {self.ranks}")
        if (self.kind == "hybrid") != (self.num_hot > 0):
            raise ValueError(f"table {self.table!r}: num_hot belongs to 'hybrid', and is at least 1 there")
        return self


class ShardingPlan(Settings):
    """The sharding plan of all tables.

    Args:
        world_size: number of processes.
        tables: one for each table.

    Example:
        >>> ShardingPlan(world_size=2, tables=[TablePlan(table="a", kind="table", ranks=[1])]).table("a").ranks
        (1,)
    """

    world_size: int = Field(ge=1)
    tables: tuple[TablePlan, ...]

    @model_validator(mode="after")
    def _check(self) -> ShardingPlan:
        for one in self.tables:
            if any(not 0 <= rank < self.world_size for rank in one.ranks):
                raise ValueError(f"table {one.table!r}: ranks {one.ranks} of {self.world_size} processes")
        return self

    def table(self, name: str) -> TablePlan:
        """Return the plan of one table."""
        for one in self.tables:
            if one.table == name:
                return one
        raise ConfigError("the plan lacks a table", value=name, fix=suggest(name, [one.table for one in self.tables]))

    def check(self, tables: Mapping[str, AnyTable], world_size: int) -> None:
        """Refuse a plan for other tables or for another number of ranks.

        Raises:
            ConfigError: naming what differs, and the command that fits.
        """
        if world_size != self.world_size:
            raise ConfigError(
                "the plan is for another number of processes", value=self.world_size, allowed=str(world_size),
                fix=f"start it with: torchrun --nproc-per-node {self.world_size} ..., or make a new plan",
            )  # fmt: skip
        for one in self.tables:
            if one.table not in tables:
                raise ConfigError("the plan names a table that is not there", value=one.table,
                                  fix=suggest(one.table, tables))  # fmt: skip
        for name, table in tables.items():
            _check_table(self.table(name), table)


def _check_table(plan: TablePlan, table: AnyTable) -> None:
    where = f"table {table.name!r}"
    if isinstance(table, DynamicTableConfig):
        if plan.kind != "table":
            raise ConfigError("a dynamic table is on one process", where=where, value=plan.kind, allowed="'table'")
        return
    parts = len(plan.ranks)
    if plan.kind == "column" and parts > table.dim:
        raise ConfigError("more parts than columns", where=where, value=parts, allowed=f"up to {table.dim}")
    if plan.kind in ("row", "hybrid") and parts > table.num_rows - plan.num_hot:
        fix = "replicate it, or use fewer ranks"
        raise ConfigError("more parts than rows", where=where, value=parts, allowed=str(table.num_rows), fix=fix)
    rule = table.optimizer
    if plan.kind == "column" and rule is not None:
        check_columns(table.name, rule)


def check_columns(table: str, optimizer: AnyOptimizer) -> None:
    """Refuse to shard a table by column if its optimizer needs whole rows.

    Raises:
        ConfigError: naming the table and the optimizer.
    """
    if rule_of(optimizer).needs_whole_rows:
        raise ConfigError(
            "the optimizer reduces over whole rows, so columns cannot be on different ranks",
            where=f"table {table!r}", value=repr(optimizer),
            allowed="kind 'table', 'row', 'hybrid' or 'replicated'",
        )  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """A shard of a table on one rank: keys low + offset, low + offset + stride, ... below high; columns.

    Args:
        table: its name.
        rank: where it is; None: on every process.
        low, high: range of keys.
        stride, offset: every stride-th of them.
        start, stop: columns.
    """

    table: str
    rank: int | None
    low: int
    high: int
    stride: int = 1
    offset: int = 0
    start: int = 0
    stop: int = 0

    @property
    def keys(self) -> range:
        """The keys whose rows it holds."""
        return range(self.low + self.offset, self.high, self.stride)

    @property
    def dim(self) -> int:
        """The columns that it holds."""
        return self.stop - self.start


def shards_of(plan: TablePlan, table: AnyTable) -> list[Shard]:
    """Return the shards of a table, in order.

    Example:
        >>> table = TableConfig(name="t", num_rows=5, dim=2)
        >>> [list(one.keys) for one in shards_of(TablePlan(table="t", kind="row", ranks=[0, 1]), table)]
        [[0, 2, 4], [1, 3]]
    """
    size = table.num_rows if isinstance(table, TableConfig) else 0
    if plan.kind == "replicated":
        return [Shard(table.name, None, 0, size, stop=table.dim)]
    if plan.kind == "column":
        bounds = column_bounds(table.dim, len(plan.ranks))
        return [
            Shard(table.name, rank, 0, size, start=start, stop=stop)
            for rank, start, stop in zip(plan.ranks, bounds[:-1], bounds[1:], strict=True)
        ]
    hot = [Shard(table.name, None, 0, plan.num_hot, stop=table.dim)] if plan.num_hot else []
    stride = len(plan.ranks)
    return hot + [
        Shard(table.name, rank, plan.num_hot, size, stride, offset, stop=table.dim)
        for offset, rank in enumerate(plan.ranks)
    ]


def column_bounds(dim: int, parts: int) -> list[int]:
    """Split columns into parts as even as possible, at multiples of four if there are enough.

    Example:
        >>> column_bounds(16, 3), column_bounds(5, 3)
        ([0, 8, 12, 16], [0, 2, 4, 5])
    """
    step = 4 if dim >= 4 * parts else 1
    units = dim // step
    counts = [units // parts + (i < units % parts) for i in range(parts)]
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count * step)
    bounds[-1] = dim
    return bounds


def replicate(tables: Sequence[AnyTable], world_size: int) -> ShardingPlan:
    """Return the plan that replicates every table: data parallel training.

    Example:
        >>> replicate([TableConfig(name="t", num_rows=5, dim=2)], 4).table("t").kind
        'replicated'
    """
    return ShardingPlan(
        world_size=world_size, tables=tuple(TablePlan(table=one.name, kind="replicated") for one in tables)
    )

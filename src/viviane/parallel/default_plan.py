"""Which process holds which table, where no one has said so."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.core.machine import memory_bytes
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableCollection, TableConfig
from viviane.ops.row_update import state_row_bytes
from viviane.parallel.collection import ShardedCollection
from viviane.parallel.group import Group
from viviane.parallel.plan import AnyTable, Plan, TablePlan

MOST_REPLICATED: Final = 65_536
"""Tables of up to so many numbers stand on every process: their gradients weigh less than the exchange of ids."""
_DEVICE_SHARE: Final = 0.7  # of a device's memory that tables may take
_KINDS: Final = ("replicated", "table", "row", "column")


def table_bytes(table: AnyTable, optimizer: AnyOptimizer) -> int:
    """Return the bytes of a table and its optimizer state; of a dynamic table those of the rows it begins with.

    Example:
        >>> from viviane.config import SGD
        >>> table_bytes(TableConfig(name="t", num_rows=10, dim=4), SGD())
        160
    """
    num_rows = table.initial_capacity if isinstance(table, DynamicTableConfig) else table.num_rows
    rule = (table.optimizer or optimizer) if table.trainable else None
    return num_rows * (table.dim * table.torch_dtype.itemsize + state_row_bytes(rule, table.dim))


def default_plan(
    tables: Sequence[AnyTable],
    optimizer: AnyOptimizer,
    world_size: int,
    *,
    kinds: Mapping[str, str] | None = None,
    device_bytes: int | None = None,
) -> Plan:
    """Spread tables over processes.

    A table of up to `MOST_REPLICATED` numbers is replicated; one that is larger than a device's share is cut by row
    over all processes; every other one goes whole to the process that has the fewest bytes so far, the largest first.

    Args:
        optimizer: the rule of tables without their own, whose state takes memory too.
        kinds: for tables that are to be otherwise, by name: "replicated", "table", "row" or "column".
        device_bytes: memory of a device; None cuts no table.

    Raises:
        ConfigError: a kind of a table that is not there, or no such kind.

    Example:
        >>> from viviane.config import SGD
        >>> tables = [TableConfig(name=n, num_rows=r, dim=16) for n, r in [("a", 9), ("b", 50_000), ("c", 70_000)]]
        >>> [(one.table, one.kind, one.ranks) for one in default_plan(tables, SGD(), 2).tables]
        [('a', 'replicated', ()), ('b', 'table', (1,)), ('c', 'table', (0,))]
    """
    chosen = dict(kinds or {})
    names = [table.name for table in tables]
    for name, kind in chosen.items():
        if name not in names:
            raise ConfigError("the plan names a table that is not there", value=name, fix=suggest(name, names))
        if kind not in _KINDS:
            raise ConfigError("no such kind", where=f"plan of table {name!r}", value=kind, allowed=", ".join(_KINDS))
    share = math.inf if device_bytes is None else _DEVICE_SHARE * device_bytes
    sizes = {table.name: table_bytes(table, optimizer) for table in tables}
    every = tuple(range(world_size))
    load = [0.0] * world_size
    plans: dict[str, TablePlan] = {}
    for table in sorted(tables, key=lambda one: -sizes[one.name]):
        kind = chosen.get(table.name) or _kind(table, sizes[table.name], share, world_size)
        ranks: tuple[int, ...] = () if kind == "replicated" else every
        if kind == "table":
            ranks = (min(every, key=lambda rank: (load[rank], rank)),)
        elif kind == "row" and isinstance(table, TableConfig):
            ranks = every[: table.num_rows]
        elif kind == "column":
            ranks = every[: table.dim]
        for rank in ranks or every:
            load[rank] += sizes[table.name] / max(1, len(ranks))
        plans[table.name] = TablePlan(table=table.name, kind=kind, ranks=ranks)
    return Plan(world_size=world_size, tables=tuple(plans[name] for name in names))


def _kind(table: AnyTable, size: int, share: float, world_size: int) -> str:
    if isinstance(table, DynamicTableConfig):
        return "table"
    if table.num_rows * table.dim <= MOST_REPLICATED:
        return "replicated"
    return "row" if size > share and table.num_rows >= world_size else "table"


def read_plan(
    given: Mapping[str, Any] | None,
    tables: Sequence[AnyTable],
    optimizer: AnyOptimizer,
    group: Group,
    device: str,
    name: str = "",
) -> Plan:
    """Return the plan of a collection's tables.

    Args:
        given: `Solver.plan`: a whole plan, kinds by table, or None. It may speak of tables of other collections.
        name: of the collection: a plan of "<name>.<table>" goes before one of "<table>".
    """
    names = {table.name for table in tables}
    if given is not None and "world_size" in given:
        plan = Plan.from_dict(dict(given), where="solver.plan")
        entries = {one.table: one for one in plan.tables if one.table in names}
        entries |= {
            table: one.model_copy(update={"table": table})
            for one in plan.tables
            if (table := one.table.removeprefix(f"{name}.")) in names and one.table != table
        }
        own = Plan(world_size=plan.world_size, tables=tuple(entries.values()))
        own.check({table.name: table for table in tables}, group.size)
        return own
    kinds = {table: kind for table, kind in (given or {}).items() if table in names}
    own_kinds = {table.removeprefix(f"{name}."): kind for table, kind in (given or {}).items() if table not in names}
    kinds |= {table: kind for table, kind in own_kinds.items() if table in names}
    return default_plan(tables, optimizer, group.size, kinds=kinds, device_bytes=_memory(device))


def check_plan_names(given: Mapping[str, Any] | None, tables: Sequence[str]) -> None:
    """Refuse a `Solver.plan` that speaks of a table which is in no collection of a model.

    Raises:
        ConfigError: naming the table and the nearest one.
    """
    names = [one["table"] for one in given["tables"]] if given and "world_size" in given else list(given or {})
    for name in names:
        if name not in tables:
            fix = suggest(name, tables)
            raise ConfigError("the plan names a table that is not there", where="solver.plan", value=name, fix=fix)


def make_tables(
    tables: Sequence[AnyTable],
    features: Sequence[FeatureConfig],
    optimizer: AnyOptimizer,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    group: Group | None = None,
    plan: Mapping[str, Any] | None = None,
    wire_dtype: str = "float32",
    name: str = "",
) -> TableCollection:
    """Return the collection for a group: spread over its processes, or an ordinary one in a process alone.

    Args:
        tables, features, optimizer, device, seed: as of an EmbeddingCollection.
        group: the processes; None: this one alone.
        plan: see `read_plan`.
        wire_dtype: type of vectors and gradients between processes.
        name: of the collection, see `read_plan`.
    """
    together = group or Group()
    if plan is not None and "world_size" in plan:
        read_plan(
            plan, tables, optimizer, together, str(device), name
        )  # a plan for others is refused in one process too
    if together.size == 1:
        return EmbeddingCollection(tables, features, optimizer, device=device, seed=seed)
    return ShardedCollection(
        tables, features, optimizer, plan=read_plan(plan, tables, optimizer, together, str(device), name),
        group=together, device=device, seed=seed, wire_dtype=getattr(torch, wire_dtype),
    )  # fmt: skip


def _memory(device: str) -> int | None:
    """Return the bytes of one process's device: a GPU's memory, or its share of the machine's."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    total, _ = memory_bytes()
    return None if total is None else total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

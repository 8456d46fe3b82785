"""How much of each table is in memory: the memory given, shared out among tables.

Rows of a table of fixed size that memory does not hold lie in tiers below a cache. Those of a dynamic table lie in a
working file that the system maps into memory, or, beside a GPU, in host memory that its kernels read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from viviane.config.memory_sizes import MemorySize, num_bytes
from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.core.machine import free_memory
from viviane.embedding.config import TableConfig
from viviane.embedding.dynamic_config import AnyTable, DynamicTableConfig
from viviane.ops.hash_table.reserve import MOST_ROWS
from viviane.ops.rules import rule_of
from viviane.store import Column, RowLayout

_SLOT_BYTES: Final = 22  # what a cache notes of each slot, rounded up
_HOST_SHARE: Final = 0.5
"""The share of the free host memory that rows beside a GPU take at most, where nothing is set."""


@dataclass(frozen=True)
class CacheSettings:
    """Memory for the rows and optimizer state of embedding tables, and where the others lie.

    Args:
        memory: bytes, or text such as "8 GiB", of all tables together; None: no limit but those by table.
        tables: of single tables, by name.
        folder: of files with rows that do not fit; None: a temporary folder.
        host_memory: of a GPU's tables: host memory of all tables together, for rows that are not on the GPU; the others
            lie in files. None: what they need, at most half of what is free.
    """

    memory: MemorySize | None = None
    tables: Mapping[str, MemorySize] = field(default_factory=dict)
    folder: Path | None = None
    host_memory: MemorySize | None = None


def row_layout(table: AnyTable, rule: AnyOptimizer | None) -> RowLayout:
    """Return the columns of a table's rows with the state of their optimizer.

    Example:
        >>> from viviane.config import Adam
        >>> row_layout(TableConfig(name="item", num_rows=9, dim=4), Adam()).row_bytes
        48
    """
    columns = [Column("weight", table.dtype, table.dim)]
    if rule is not None:
        arithmetic = rule_of(rule)
        columns += [
            Column(name, "float32", 1 if name in arithmetic.per_row else table.dim) for name in arithmetic.states
        ]
    return RowLayout(columns)


def rule_of_table(table: AnyTable, optimizer: AnyOptimizer) -> AnyOptimizer | None:
    """Return the rule that moves a table."""
    return (table.optimizer or optimizer) if table.trainable else None


def most_rows(table: AnyTable) -> int:
    """Return the rows of a table, at most; of a dynamic one without max_capacity, what any table can have."""
    return table.num_rows if isinstance(table, TableConfig) else table.max_capacity or MOST_ROWS


def table_bytes(table: AnyTable, optimizer: AnyOptimizer) -> int:
    """Return the bytes of all rows of a table with the state of their optimizer."""
    return most_rows(table) * row_layout(table, rule_of_table(table, optimizer)).row_bytes


def slot_bytes(table: AnyTable, optimizer: AnyOptimizer) -> int:
    """Return the bytes of a row in a cache: with its optimizer state, and what is noted of its slot."""
    return slot_bytes_of(row_layout(table, rule_of_table(table, optimizer)))


def slot_bytes_of(layout: RowLayout) -> int:
    """Return the bytes of a row in a cache, from its layout."""
    return layout.row_bytes + _SLOT_BYTES


def divided(
    tables: Sequence[AnyTable], optimizer: AnyOptimizer, settings: CacheSettings
) -> tuple[CacheSettings, dict[str, int]]:
    """Divide memory between the tables of fixed size and the dynamic ones.

    Returns:
        the settings of the tables of fixed size; and bytes of each dynamic table that may need more than it gets.

    Raises:
        ConfigError: a dynamic table has a size, and `memory` says where its rows are.

    Example:
        >>> from viviane.config import SGD
        >>> fixed, dynamic = TableConfig(name="a", num_rows=10**6, dim=2), DynamicTableConfig(name="b", dim=2)
        >>> divided([fixed, dynamic], SGD(), CacheSettings(memory=60_000))
        (CacheSettings(memory=30000, tables={}, folder=None, host_memory=None), {'b': 30000})
    """
    dynamic = {one.name: one for one in tables if isinstance(one, DynamicTableConfig) and one.memory == "device"}
    for one in tables:
        if isinstance(one, DynamicTableConfig) and one.name not in dynamic and one.name in settings.tables:
            raise ConfigError(
                "the table has a size of memory, and a place of its own", where=f"table {one.name!r}",
                value=f"memory {settings.tables[one.name]!r}, dynamic memory {one.memory!r}",
                fix="leave one of them out: a size places rows by itself",
            )  # fmt: skip
    costs = {one.name: slot_bytes(one, optimizer) for one in tables}
    taken = {one.name: own_bytes(one, optimizer, settings) for one in tables if one.name in settings.tables}
    sizes = {name: size for name, size in taken.items() if name in dynamic}
    memory = None if settings.memory is None else num_bytes(settings.memory, "embedding_memory")
    if memory is not None and dynamic:
        left = memory - sum(taken.values())
        others = [one for one in tables if isinstance(one, TableConfig) or one.name in dynamic]
        own = {one.name: most_rows(one) for one in others if one.name not in settings.tables}
        shares = _shared_out(own, costs, left)
        sizes |= {name: max(1, rows * costs[name]) for name, rows in shares.items() if name in dynamic}
        memory -= sum(sizes.values())
    fixed = {name: size for name, size in settings.tables.items() if name not in dynamic}
    short = {name: size for name, size in sizes.items() if size < most_rows(dynamic[name]) * costs[name]}
    return replace(settings, memory=memory, tables=fixed), short


def own_bytes(table: AnyTable, optimizer: AnyOptimizer, settings: CacheSettings) -> int:
    """Return the bytes that a table with a size of its own takes: that size, or what all of its rows need."""
    size = num_bytes(settings.tables[table.name], f"embedding_memory of table {table.name!r}")
    return min(size, most_rows(table) * slot_bytes(table, optimizer))


def placed(table: DynamicTableConfig, optimizer: AnyOptimizer, size: int, device_type: str) -> DynamicTableConfig:
    """Return a dynamic table whose rows lie partly outside of the memory of its device.

    Args:
        size: bytes of that memory.
        device_type: on a GPU the first rows are in its memory, the others in the host's; on the CPU all are in a file,
            of which the system keeps in memory what it has room for.

    Example:
        >>> from viviane.config import SGD
        >>> table = placed(DynamicTableConfig(name="b", dim=2), SGD(), 3000, "cuda")
        >>> table.memory, table.device_rows
        ('split', 100)
    """
    if device_type == "cpu":
        return table.model_copy(update={"memory": "file"})
    rows = size // slot_bytes(table, optimizer)
    return table.model_copy(update={"memory": "split", "device_rows": rows} if rows else {"memory": "host"})


def slots_of_tables(tables: Sequence[TableConfig], optimizer: AnyOptimizer, settings: CacheSettings) -> dict[str, int]:
    """Return how many rows of each table its memory holds; all of them where that is enough.

    Tables with a size of their own get it. The rest is shared out evenly: a table that needs less than an even share
    is held whole, and what it leaves goes to the others.

    Example:
        >>> from viviane.config import SGD
        >>> small, large = (TableConfig(name=n, num_rows=r, dim=2) for n, r in (("a", 10), ("b", 10**6)))
        >>> slots_of_tables([small, large], SGD(), CacheSettings(memory=30 * 1010))
        {'a': 10, 'b': 1000}
    """
    for name in settings.tables:
        if name not in {table.name for table in tables}:
            fix = suggest(name, [table.name for table in tables])
            raise ConfigError("embedding_memory names a table that is not there", value=name, fix=fix)
    costs = {one.name: slot_bytes(one, optimizer) for one in tables}
    found = {one.name: one.num_rows for one in tables}
    shared = [one for one in tables if one.name not in settings.tables]
    for table in tables:
        if table.name in settings.tables:
            size = num_bytes(settings.tables[table.name], f"embedding_memory of table {table.name!r}")
            found[table.name] = min(table.num_rows, size // costs[table.name])
    if settings.memory is not None:
        left = num_bytes(settings.memory, "embedding_memory")
        left -= sum(found[name] * costs[name] for name in settings.tables)
        found |= _shared_out({one.name: one.num_rows for one in shared}, costs, left)
    for table in tables:
        if found[table.name] < 1:
            raise ConfigError(
                "embedding_memory is too small for one row of a table", where=f"table {table.name!r}",
                value=settings.tables.get(table.name, settings.memory), fix="give it more memory",
            )  # fmt: skip
    return found


def _shared_out(num_rows: Mapping[str, int], costs: Mapping[str, int], memory: int) -> dict[str, int]:
    """Return how many rows of each table memory holds: small tables whole, an even share of the rest for the others."""
    found, left = {}, memory
    names = sorted(num_rows, key=lambda name: num_rows[name] * costs[name])
    for i, name in enumerate(names):
        share = max(left, 0) // (len(names) - i)
        found[name] = min(num_rows[name], share // costs[name])
        left -= found[name] * costs[name]
    return found


def host_rows_of_tables(
    tables: Sequence[TableConfig], optimizer: AnyOptimizer, settings: CacheSettings, slots: Mapping[str, int]
) -> dict[str, int]:
    """Return how many rows of each table that is not whole on its GPU the host's memory holds, at least one.

    Args:
        tables: of one process.
        optimizer: the rule of tables without their own.
        settings: its host_memory is for all tables together.
        slots: rows of each table that the GPU holds.

    Example:
        >>> from viviane.config import SGD
        >>> small, large = (TableConfig(name=n, num_rows=r, dim=2) for n, r in (("a", 10), ("b", 10**6)))
        >>> host_rows_of_tables([small, large], SGD(), CacheSettings(host_memory=30_000), {"a": 10, "b": 100})
        {'b': 1000}
    """
    own = [one for one in tables if slots[one.name] < one.num_rows]
    costs = {one.name: slot_bytes(one, optimizer) for one in own}
    if settings.host_memory is not None:
        memory = num_bytes(settings.host_memory, "embedding_host_memory")
    else:
        free = free_memory()
        if free is None:
            return {one.name: one.num_rows for one in own}
        memory = int(_HOST_SHARE * free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = _shared_out({one.name: one.num_rows for one in own}, costs, memory)
    return {name: max(1, rows) for name, rows in found.items()}

"""How much memory each table of a model gets: from the solver, or from the free memory of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from viviane.config import AnyOptimizer, Solver
from viviane.config.memory_sizes import MemorySize, num_bytes
from viviane.core.errors import ConfigError, suggest
from viviane.core.locations import local_path
from viviane.core.logging import get_logger
from viviane.core.machine import free_memory
from viviane.embedding import DynamicTableConfig, TableConfig
from viviane.embedding.cache_sizes import CacheSettings, divided, own_bytes, slot_bytes, slots_of_tables, table_bytes
from viviane.embedding.dynamic_config import AnyTable

_log = get_logger("model")
FITS = 0.8
"""Tables whose rows and state take more than this share of the free memory do not fit: layers and batches need some."""
_SHARE = 0.5


def table_memory(
    tables: Mapping[str, Sequence[AnyTable]],
    optimizer: AnyOptimizer,
    solver: Solver,
    device: torch.device,
    num_processes: int = 1,
    sizes_of_tables: Mapping[str, MemorySize] | None = None,
) -> dict[str, CacheSettings]:
    """Return the memory of the tables of each collection that has tables outside of memory.

    That of a collection whose only such tables are dynamic ones with memory="file" holds `embedding_folder` alone.

    Args:
        tables: settings of the tables, by collection.
        optimizer: the rule of tables that have none of their own.
        solver: its embedding_memory: for all collections together.
        device: where the tables are.
        num_processes: that share the tables and this machine.
        sizes_of_tables: memory of single tables as their option, by "<node>.<table>"; embedding_memory goes first where
            it names one.

    Raises:
        ConfigError: embedding_memory names a table that is not there; or a dynamic table has a size, and a place of its
            own.
    """
    own = {node: [one for one in every if isinstance(one, TableConfig)] for node, every in tables.items()}
    joined = [one.model_copy(update={"name": f"{node}.{one.name}"}) for node, every in tables.items() for one in every]
    given = solver.embedding_memory
    if solver.embedding_host_memory is not None and device.type == "cpu":
        raise ConfigError(
            "embedding_host_memory is of rows beside a GPU", where="device cpu", value=solver.embedding_host_memory,
            fix="leave it out: embedding_memory is host memory on a CPU",
        )  # fmt: skip
    fixed = dict(sizes_of_tables or {})
    if given is None:  # a dynamic table without max_capacity grows as long as there is memory
        joined = [
            one for one in joined
            if isinstance(one, TableConfig) or one.name in fixed or (one.max_capacity and one.memory == "device")
        ]  # fmt: skip
    others = [one for one in joined if one.name not in fixed]
    settings = _chosen(others, optimizer, device, num_processes) if given is None else _given(given, tables)
    if fixed:
        settings = settings or CacheSettings()
        taken = 0 if given is not None or settings.memory is None else _fixed_bytes(joined, optimizer, fixed)
        memory = settings.memory if not taken else num_bytes(settings.memory or 0, "embedding_memory") + taken
        settings = replace(settings, memory=memory, tables={**fixed, **settings.tables})
    folder = None if solver.embedding_folder is None else local_path(solver.embedding_folder)
    in_files = {node for node, every in tables.items() if any(_is_in_file(one) for one in every)} if folder else set()
    if settings is None:
        return {node: CacheSettings(folder=folder) for node in in_files}
    settings, short = divided(joined, optimizer, settings)
    slots = slots_of_tables([one for one in joined if isinstance(one, TableConfig)], optimizer, settings)
    found = {}
    for node, every in own.items():
        sizes: dict[str, MemorySize] = {
            one.name: slots[f"{node}.{one.name}"] * slot_bytes(one, optimizer)
            for one in every
            if slots[f"{node}.{one.name}"] < one.num_rows
        }
        sizes |= {one.name: short[f"{node}.{one.name}"] for one in tables[node] if f"{node}.{one.name}" in short}
        if sizes or node in in_files:
            found[node] = CacheSettings(
                tables=sizes, folder=folder, host_memory=_host_share(solver, own, node, optimizer)
            )
    return found


def memory_for_tables(device: torch.device) -> int | None:
    """Return the free bytes of a device's memory, or of the machine's for the CPU; None if unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def _fixed_bytes(tables: Sequence[AnyTable], optimizer: AnyOptimizer, fixed: Mapping[str, MemorySize]) -> int:
    """Return the bytes that tables with a size of their own take."""
    settings = CacheSettings(tables=fixed)
    return sum(own_bytes(one, optimizer, settings) for one in tables if one.name in fixed)


def _is_in_file(table: object) -> bool:
    return isinstance(table, DynamicTableConfig) and table.memory == "file"


def _host_share(
    solver: Solver, tables: Mapping[str, Sequence[TableConfig]], node: str, optimizer: AnyOptimizer
) -> int | None:
    """Return the part of a collection in `embedding_host_memory`, by the bytes of its tables."""
    if solver.embedding_host_memory is None or not tables[node]:
        return None
    sizes = {name: sum(table_bytes(one, optimizer) for one in every) for name, every in tables.items()}
    return num_bytes(solver.embedding_host_memory, "embedding_host_memory") * sizes[node] // sum(sizes.values())


def _given(given: int | str | Mapping[str, int | str], tables: Mapping[str, Sequence[AnyTable]]) -> CacheSettings:
    if not isinstance(given, Mapping):
        return CacheSettings(memory=given)
    names = [(node, one.name) for node, every in tables.items() for one in every]
    sizes: dict[str, int | str] = {}
    for name, size in given.items():
        own = [(node, table) for node, table in names if name in (table, f"{node}.{table}")]
        if not own:
            fix = suggest(name, [table for _, table in names])
            raise ConfigError("embedding_memory names a table that is not there", value=name, fix=fix)
        sizes |= {f"{node}.{table}": size for node, table in own}
    return CacheSettings(tables=sizes)


def _chosen(
    tables: Sequence[AnyTable], optimizer: AnyOptimizer, device: torch.device, num_processes: int
) -> CacheSettings | None:
    """Return the memory of tables that do not fit into what is free; None where they do."""
    free = memory_for_tables(device)
    needed = sum(table_bytes(one, optimizer) for one in tables) // num_processes
    if device.type == "cpu" and free is not None:
        free //= num_processes
    if free is None or needed <= FITS * free:
        return None
    memory = int(free * _SHARE)
    _log.info(
        "embedding tables take %.1f GiB with their optimizer state, and %.1f GiB are free: %.1f GiB of rows stay in "
        "memory, the others lie %s (Solver.embedding_memory sets the size)",
        needed / 2**30, free / 2**30, memory / 2**30,
        "in host memory, and on disk where that is too small" if device.type == "cuda" else "on disk",
    )  # fmt: skip
    return CacheSettings(memory=memory)

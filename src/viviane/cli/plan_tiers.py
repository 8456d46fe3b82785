"""`viviane plan`: where tables larger than memory go, how often rows are found there, what a step has to move."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from viviane.cli.train_config import TrainConfig
    from viviane.config import AnyOptimizer
    from viviane.data import Dataset
    from viviane.embedding.cache_sizes import CacheSettings
    from viviane.embedding.dynamic_config import DynamicTableConfig
    from viviane.model.graph import GraphPlan

_ROWS_LOOKED_AT = 200_000
_PROBE_BYTES = 64 << 20
_PAGE = 4096  # what a disk reads at least for a row


@dataclass(frozen=True)
class Placed:
    """A table in tiers.

    Args:
        name: "<collection>.<table>".
        num_rows, slots: rows of the table, and of them in memory.
        slot_bytes, row_bytes: of a row in memory and on disk, with its optimizer state.
        hit_rate: expected share of distinct rows of a step that are in memory.
        missing: expected rows of a step that are not.
        host_rows: rows that the host's memory holds beside a GPU's slots; 0 on a CPU.
    """

    name: str
    num_rows: int
    slots: int
    slot_bytes: int
    row_bytes: int
    hit_rate: float
    missing: float
    host_rows: int = 0

    @property
    def uses_disk(self) -> bool:
        """Whether rows lie in a file."""
        return self.slots < self.num_rows and self.host_rows < self.num_rows


@dataclass(frozen=True)
class PlacedDynamic:
    """A dynamic table whose rows need not be in the memory of its device.

    Args:
        name: "<collection>.<table>".
        most_bytes: of all rows of max_capacity, with their optimizer state; None: it has no max_capacity.
        place: where its rows are.
        first_bytes: of the rows that it begins with, where the planner counts them as on the device.
    """

    name: str
    most_bytes: int | None
    place: str
    first_bytes: int


def placed_tables(
    settings: TrainConfig, graph: GraphPlan, data: Dataset, device: torch.device, processes: int
) -> tuple[list[Placed], list[PlacedDynamic]]:
    """Return the tables that training would keep in tiers, as `Model.compile` places them; logs why."""
    from viviane.embedding import DynamicTableConfig, TableConfig
    from viviane.embedding.cache_sizes import (
        CacheSettings,
        host_rows_of_tables,
        row_layout,
        rule_of_table,
        slot_bytes,
        slots_of_tables,
    )
    from viviane.model.table_memory import table_memory

    rule = settings.embedding_optimizer or settings.optimizer
    tables = {node: own.tables for node, own in graph.tables.items()}
    found, counts, dynamic = [], None, []
    memory = table_memory(tables, rule, settings.solver, device, processes, graph.table_memory)
    for node, every in tables.items():
        cache = memory.get(node, CacheSettings())
        for table in every:
            if isinstance(table, DynamicTableConfig) and (table.name in cache.tables or table.memory != "device"):
                dynamic.append(_placed_dynamic(f"{node}.{table.name}", table, rule, cache, device.type))
        own = [one for one in every if isinstance(one, TableConfig) and one.name in cache.tables]
        sizes = {one.name: cache.tables[one.name] for one in own}
        slots = slots_of_tables(own, rule, replace(cache, tables=sizes))
        host = host_rows_of_tables(own, rule, cache, slots) if device.type == "cuda" else {}
        for table in own:
            columns = [one.name for one in graph.tables[node].features if one.table == table.name]
            if counts is None:
                counts = _sample(data)
            batch = settings.solver.batch_size
            hits, missing = _expected(counts, columns, slots[table.name], batch, len(data))
            size = row_layout(table, rule_of_table(table, rule)).row_bytes
            name = f"{node}.{table.name}"
            found.append(
                Placed(
                    name, table.num_rows, slots[table.name], slot_bytes(table, rule), size, hits, missing,
                    host.get(table.name, 0),
                )
            )  # fmt: skip
    return found, dynamic


def _placed_dynamic(
    name: str, table: DynamicTableConfig, rule: AnyOptimizer, cache: CacheSettings, device_type: str
) -> PlacedDynamic:
    from viviane.config.memory_sizes import num_bytes
    from viviane.embedding.cache_sizes import placed, row_layout, rule_of_table, table_bytes

    own = table
    if table.name in cache.tables:
        own = placed(table, rule, num_bytes(cache.tables[table.name], name), device_type)
    place = {
        "file": "in a working file, of which the system keeps in memory what it has room for",
        "host": "in host memory",
        "split": f"the first {own.device_rows or 0:,} on the GPU, the others in host memory",
    }[own.memory]
    most = None if table.max_capacity is None else table_bytes(table, rule)
    first = table.initial_capacity * row_layout(table, rule_of_table(table, rule)).row_bytes
    return PlacedDynamic(name, most, place, first if table.memory == "device" else 0)


def show_dynamic(placed: list[PlacedDynamic]) -> None:
    """Print where rows of dynamic tables are."""
    for one in placed:
        size = "without max_capacity" if one.most_bytes is None else f"up to {one.most_bytes / 1e9:.3f} GB"
        typer.echo(f"dynamic table {one.name}, {size}: rows are {one.place}")


def show_tiers(placed: list[Placed], folder: str | None, device: torch.device) -> None:
    """Print the placement, the expected hits, and the time that disk and link add to a step."""
    from rich import box
    from rich.table import Table

    from viviane.cli.console import output

    shown = Table(title="Tables in tiers", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    on_gpu = device.type == "cuda"
    memory = ("on the GPU", "GB on the GPU", "in host memory") if on_gpu else ("in memory", "GB in memory")
    for name in ("table", "rows", *memory, "GB in all", "found in memory", "rows missing a step"):
        shown.add_column(name, justify="left" if name == "table" else "right")
    for one in placed:
        host = [f"{min(1.0, one.host_rows / one.num_rows):.1%}"] if on_gpu else []
        shown.add_row(
            one.name, f"{one.num_rows:,}", f"{one.slots / one.num_rows:.1%}", f"{one.slots * one.slot_bytes / 1e9:.3f}",
            *host, f"{one.num_rows * one.row_bytes / 1e9:.3f}", f"{one.hit_rate:.1%}", f"{one.missing:,.0f}",
        )  # fmt: skip
    output().print(shown)
    linked = sum(one.missing * one.row_bytes for one in placed)
    if on_gpu and linked:
        rate = link_bytes_per_s(device)
        typer.echo(
            f"each step brings {linked / 1e6:,.2f} MB of rows to the GPU and takes as many back to host memory; at the "
            f"{rate / 1e6:,.0f} MB/s of a copy of page-locked memory: {1e3 * linked / rate:,.2f} ms beside the step, "
            "both ways at once"
        )
    on_disk = [one for one in placed if one.uses_disk]
    if on_disk:
        rate = disk_bytes_per_s(Path(folder or tempfile.gettempdir()))
        moved = sum(one.missing * max(_PAGE, one.row_bytes) for one in on_disk)
        read = sum(one.missing * one.row_bytes for one in on_disk)
        typer.echo(
            f"each step reads {'up to ' if on_gpu else ''}{read / 1e6:,.2f} MB of rows and writes as many back; at the "
            f"{rate / 1e6:,.0f} MB/s that this disk writes: {2e3 * moved / rate:,.2f} ms beside the step, in the pages "
            f"of {_PAGE:,} bytes that it moves"
        )


def link_bytes_per_s(device: torch.device) -> float:
    """Return the rate at which page-locked memory of 64 MiB is copied to a GPU: the best of five."""
    import torch

    given = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    there, best = torch.empty_like(given, device=device), float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        there.copy_(given)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return _PROBE_BYTES / best


def disk_bytes_per_s(folder: Path) -> float:
    """Return the rate at which a folder's disk takes a file of 64 MiB, with fsync."""
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(_PROBE_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _PROBE_BYTES / (time.perf_counter() - start)


def _sample(data: Dataset) -> Mapping[str, NDArray[np.int64]]:
    """Return the ids of up to 200,000 rows by column, in the order of the data set."""
    from viviane.data.key_sets import ids_of

    parts: dict[str, list[NDArray[Any]]] = {column.name: [] for column in data.schema.categorical}
    seen = 0
    with data.reader(8192, shuffle=True) as reader:
        for batch in reader:
            for name, own in parts.items():
                own.append(ids_of(batch, name))
            seen += len(batch)
            if seen >= _ROWS_LOOKED_AT:
                break
    return {name: np.concatenate(own) if own else np.zeros(0, np.int64) for name, own in parts.items()}


def _expected(
    ids: Mapping[str, NDArray[np.int64]], columns: list[str], slots: int, batch: int, num_rows: int
) -> tuple[float, float]:
    """Return the share of a step's distinct rows that are in memory, and how many are not.

    Memory holds about the rows of the last batches. So the sample is played through: an id is missing where `slots`
    other rows came since its last use, or where it comes first. Later in a longer epoch more ids come again, so the
    share is one from below.
    """
    given = np.stack([ids[name] for name in columns], 1) if len({len(ids[n]) for n in columns}) == 1 else None
    stream = given.reshape(-1) if given is not None else np.concatenate([ids[name] for name in columns])
    rows = min(num_rows, _ROWS_LOOKED_AT)
    width = max(1, round(batch * len(stream) / max(1, rows)))
    steps = [np.unique(stream[start : start + width]) for start in range(0, len(stream), width)]
    last: dict[int, int] = {}
    hits = misses = 0
    sizes = np.cumsum([0, *(len(step) for step in steps)])
    for number, step in enumerate(steps):
        for key in step.tolist():
            before = last.get(key)
            if before is None:
                misses += 1
            elif sizes[number] - sizes[before] <= slots:
                hits += 1
            else:
                misses += 1
            last[key] = number
    asked = hits + misses
    return (hits / asked if asked else 1.0), misses / max(1, len(steps))

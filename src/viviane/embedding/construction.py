"""What a collection is made of: its storages, and what its settings are checked for."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding.cache_sizes import CacheSettings, divided, host_rows_of_tables, placed, slots_of_tables
from viviane.embedding.cached_storage import CachedStorage
from viviane.embedding.config import TableConfig
from viviane.embedding.dynamic_config import AnyTable, DynamicTableConfig
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.storage import Storage
from viviane.embedding.tier_rows import MakeTier
from viviane.ops.slot_table import MAX_ROWS
from viviane.store import ArrayTier, FileTier, HostCacheTier, RowLayout, Tier
from viviane.store.streams import DeviceStreams, TransferStreams


def make_storages(
    tables: Sequence[AnyTable],
    optimizer: AnyOptimizer,
    device: torch.device,
    seed: int,
    cache: CacheSettings | None = None,
) -> tuple[list[Storage], list[DynamicStorage]]:
    """Make the storages: one for each width and type, and one for each dynamic table."""
    plain = [table for table in tables if isinstance(table, TableConfig)]
    short: dict[str, int] = {}
    if cache is not None:
        cache, short = divided(tables, optimizer, cache)
    slots = {} if cache is None else slots_of_tables(plain, optimizer, cache)
    host_rows: dict[str, int] = {}
    if cache is not None and transfer_streams(device) is not None:
        host_rows = host_rows_of_tables(plain, optimizer, cache, slots)
    fixed: list[Storage] = []
    for kind in dict.fromkeys((table.dim, table.dtype) for table in plain):
        own = [table for table in plain if (table.dim, table.dtype) == kind]
        if cache is None or all(slots[table.name] == table.num_rows for table in own):
            fixed.append(Storage(own, optimizer, device, seed))
        else:
            fixed.append(_cached(own, optimizer, device, seed, slots, host_rows, cache.folder))
    dynamic = []
    for table in tables:
        if isinstance(table, DynamicTableConfig):
            if table.name in short:
                table = placed(table, optimizer, short[table.name], device.type)  # noqa: PLW2901
            folder = None if cache is None else cache.folder
            dynamic.append(DynamicStorage(table, optimizer, device, seed, folder))
    return fixed, dynamic


def _cached(
    tables: Sequence[TableConfig],
    optimizer: AnyOptimizer,
    device: torch.device,
    seed: int,
    slots: Mapping[str, int],
    host_rows: Mapping[str, int],
    folder: Path | None,
) -> CachedStorage:
    """Make a storage in tiers; a device that reaches all of its rows in host memory moves them itself."""
    streams = transfer_streams(device)
    tiered = [one for one in tables if slots[one.name] < one.num_rows]
    make_tier = file_tiers(folder) if streams is None else host_tiers(folder, host_rows)
    is_of_words = all(one.dim * one.torch_dtype.itemsize % 4 == 0 for one in tables)
    on_device = False
    if streams is not None and streams.maps_memory and is_of_words:
        on_device = all(host_rows[one.name] >= one.num_rows for one in tiered)
        on_device = on_device and sum(one.num_rows for one in tables) <= MAX_ROWS
        make_tier = mapped_tiers(streams) if on_device else make_tier
    return CachedStorage(
        tables, optimizer, device, seed, num_slots=slots, make_tier=make_tier, streams=streams, plan_on_device=on_device
    )


def transfer_streams(device: torch.device) -> TransferStreams | None:
    """Return what copies rows between host memory and a device; None for the CPU, which reads the tiers itself."""
    return DeviceStreams(device) if device.type == "cuda" else None


def mapped_tiers(streams: TransferStreams) -> MakeTier:
    """Return what opens host memory for each table that kernels of a device reach."""

    def make(table: TableConfig, layout: RowLayout) -> Tier:
        memory = streams.mapped_memory(table.num_rows * layout.row_bytes)
        return ArrayTier(layout, table.num_rows, memory=memory)

    return make


def host_tiers(folder: Path | None, host_rows: Mapping[str, int]) -> MakeTier:
    """Return what opens host memory for each table, over a working file where not all of its rows fit.

    Args:
        folder: around the files; see `file_tiers`.
        host_rows: rows of each table that host memory holds.
    """
    below = file_tiers(folder)

    def make(table: TableConfig, layout: RowLayout) -> Tier:
        rows = host_rows[table.name]
        if rows >= table.num_rows:
            return ArrayTier(layout, table.num_rows)
        return HostCacheTier(below(table, layout), table.num_rows, max_rows=rows)

    return make


def file_tiers(folder: Path | None) -> MakeTier:
    """Return what opens a working file for each table; its disk is given back when the process ends.

    Args:
        folder: around it; None: that of temporary files.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)

    def make(table: TableConfig, layout: RowLayout) -> Tier:
        place = Path(tempfile.mkdtemp(prefix="viviane-rows-", dir=folder))
        return FileTier(place, layout, table.num_rows, durable=False, name="file")

    return make


def by_name(kind: str, items: Sequence[Any]) -> dict[str, Any]:
    """Return items by name.

    Raises:
        ConfigError: two have one name.
    """
    result: dict[str, Any] = {}
    for item in items:
        if item.name in result:
            raise ConfigError(f"two {kind}s of one name", value=item.name)
        result[item.name] = item
    return result


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a type that an output can be of.

    Raises:
        ConfigError: it can't.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError("no such output type", value=str(dtype), allowed="float32, float16, bfloat16")
    return dtype

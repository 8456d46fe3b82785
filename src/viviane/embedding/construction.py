"""What a collection is made of: its storages, and what its settings are checked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding.config import TableConfig
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.storage import Storage


def make_storages(
    tables: Sequence[TableConfig | DynamicTableConfig], optimizer: AnyOptimizer, device: torch.device, seed: int
) -> Iterator[Storage | DynamicStorage]:
    """Make the storages: one for each width and type, one for each dynamic table."""
    plain = [table for table in tables if isinstance(table, TableConfig)]
    for kind in dict.fromkeys((table.dim, table.dtype) for table in plain):
        yield Storage([table for table in plain if (table.dim, table.dtype) == kind], optimizer, device, seed)
    for table in tables:
        if isinstance(table, DynamicTableConfig):
            yield DynamicStorage(table, optimizer, device, seed)


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

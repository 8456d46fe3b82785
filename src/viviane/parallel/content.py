"""Gather whole tables from their shards, and scatter them."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding import EmbeddingCollection, TableConfig, TableState
from viviane.parallel.plan import Shard
from viviane.parallel.sharded_tables import ShardedTables


def local_part(sharded: ShardedTables, shard: Shard) -> EmbeddingCollection:
    """Return the collection of this rank that holds a shard."""
    part = sharded.replicas if shard.rank is None else sharded.own
    assert part is not None
    return part


def gather_table(sharded: ShardedTables, name: str) -> TableState:
    """Gather a whole table from the shards of all ranks, on every rank."""
    table = sharded.tables[name]
    if not isinstance(table, TableConfig):
        raise ConfigError("the rows of a dynamic table come with their keys", value=name)
    whole: dict[str, Tensor] = {}
    step = 0
    for shard in sharded.shards[name]:
        here = shard.rank is None or shard.rank == sharded.group.rank
        content = local_part(sharded, shard).export_table(name, copy=False) if here else None
        meta = sharded.state_shapes(name)
        step = max(step, content.step) if content is not None else step
        for part, (width, dtype) in meta.items():
            rows = len(shard.keys)
            shape = (rows, shard.dim) if width else (rows,)
            block = torch.empty(shape, dtype=dtype, device=sharded.device)
            if content is not None:
                block.copy_(content.weight if part == "weight" else content.state[part])
            if shard.rank is not None:
                sharded.group.broadcast(block, shard.rank)
            if part not in whole:
                size = (table.num_rows, table.dim) if width else (table.num_rows,)
                whole[part] = torch.empty(size, dtype=dtype, device=sharded.device)
            where = slice(shard.low + shard.offset, shard.high, shard.stride)
            if width:
                whole[part][where, shard.start : shard.stop] = block
            else:
                whole[part][where] = block
    steps = sharded.group.gather_numbers([step])
    return TableState(whole.pop("weight"), whole, max(one[0] for one in steps))


def scatter_table(sharded: ShardedTables, name: str, content: TableState) -> None:
    """Copy the rows and state of a whole table into this rank's shards."""
    table = sharded.tables[name]
    if not isinstance(table, TableConfig):
        raise ConfigError("the rows of a dynamic table come with their keys", value=name)
    if content.weight.shape != (table.num_rows, table.dim):
        raise CheckpointError(
            "the shape differs", where=f"table {name!r}, weight", value=tuple(content.weight.shape),
            allowed=str((table.num_rows, table.dim)),
        )  # fmt: skip
    for shard in sharded.shards[name]:
        if shard.rank is not None and shard.rank != sharded.group.rank:
            continue
        keys, columns = slice(shard.low + shard.offset, shard.high, shard.stride), slice(shard.start, shard.stop)
        state = {n: part[keys, columns] if part.dim() == 2 else part[keys] for n, part in content.state.items()}
        weight = content.weight[keys, columns]
        if table.padding_id is not None and table.padding_id in shard.keys:
            weight = weight.clone()
            weight[shard.keys.index(table.padding_id)] = 0.0
        local_part(sharded, shard).import_table(name, TableState(weight, state, content.step))


def scatter_rows(sharded: ShardedTables, name: str, rows: Tensor) -> None:
    """Copy the rows of a whole table into this rank's shards."""
    for shard in sharded.shards[name]:
        if shard.rank is None or shard.rank == sharded.group.rank:
            keys, columns = slice(shard.low + shard.offset, shard.high, shard.stride), slice(shard.start, shard.stop)
            local_part(sharded, shard).copy_rows(name, rows[keys, columns])

"""The parts of an embedding table on each process, for every kind of collection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.embedding import TableCollection, TableStorage
from viviane.embedding.module_parts import collections_of
from viviane.parallel import Group, ShardedCollection


@dataclass(frozen=True)
class TablePart:
    """A range of keys and columns of a table on one process, or on every process.

    Args:
        table: its name.
        keys: the keys of its rows; empty for a dynamic table, which always has one part.
        start, stop: range of columns.
        rank: the process that holds it; None: every process holds it.
        storage: its storage on this process; None: it is on another process.
    """

    table: str
    keys: range
    start: int
    stop: int
    rank: int | None = None
    storage: TableStorage | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements of its weight."""
        return len(self.keys) * (self.stop - self.start)

    def tensors(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return what a checkpoint has of it on this process: see `TableStorage.checkpoint_tensors`.

        Args:
            rows: only these of a table in memory, see `TableStorage.changed_tensors`; None: all.
        """
        assert self.storage is not None
        if rows is None or self.storage.in_tiers:
            return self.storage.checkpoint_tensors(self.table)
        return self.storage.changed_tensors(self.table, rows)

    @property
    def mean(self) -> Tensor | None:
        """An up-to-date view of the running mean of its rows; None if there is none."""
        return None if self.storage is None else self.storage.mean_rows(self.table)


class TieredRows:
    """One column of a table in tiers, read when it is written: a piece at a time, never the complete table.

    Args:
        storage, table: the table and its storage.
        name: of the tensor in a checkpoint: "weight", or "state.<name>".
        rows: only these, rising; None: all.
    """

    def __init__(self, storage: TableStorage, table: str, name: str, rows: NDArray[np.int64] | None = None) -> None:
        self._storage, self._table, self._name, self._rows = storage, table, name, rows
        like = storage.checkpoint_tensors(table)[name]
        self.shape, self.dtype = (len(like if rows is None else rows), *like.shape[1:]), like.dtype

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes in order."""
        yield from self._storage.column_pieces(self._table, self._name, self._rows)


def parts_of(collection: TableCollection, table: str) -> list[TablePart]:
    """Return the parts of a table, in order; they cover it.

    Raises:
        CheckpointError: no feature looks the table up, so no process holds it.
    """
    settings = collection.tables[table]
    if isinstance(collection, ShardedCollection):
        parts = []
        for shard in collection.shards[table]:
            here = shard.rank is None or shard.rank == collection.group.rank
            storage = _storage(collection.replicas if shard.rank is None else collection.own, table) if here else None
            parts.append(TablePart(table, shard.keys, shard.start, shard.stop, shard.rank, storage))
        return parts
    num_rows = getattr(settings, "num_rows", 0)
    return [TablePart(table, range(num_rows), 0, settings.dim, None, _storage(collection, table))]


def _storage(collection: TableCollection | None, table: str) -> TableStorage:
    for part in [] if collection is None else collection.parts():
        for storage in part.all_storages():
            if table in storage.tables:
                return storage
    raise CheckpointError("no feature looks the table up, so no process holds it", where=f"table {table!r}",
                          fix="remove the table")  # fmt: skip


def group_of(module: nn.Module) -> Group:
    """Return the processes that hold the tables of a module; only this one if no table is sharded."""
    for collection in collections_of(module).values():
        if isinstance(collection, ShardedCollection):
            return collection.group
    return Group()


def choose_writers(parts: Mapping[str, Sequence[TablePart]], size: int) -> dict[tuple[str, int], int]:
    """Return the rank that writes each (table, index of part): its owner; for replicated parts, the least loaded rank.

    Example:
        >>> have = {"a": [TablePart("a", range(9), 0, 2, rank=0)], "b": [TablePart("b", range(5), 0, 2)]}
        >>> choose_writers(have, 2)
        {('a', 0): 0, ('b', 0): 1}
    """
    load = [0] * size
    writers: dict[tuple[str, int], int] = {}
    shared = []
    for full, own in parts.items():
        for i, part in enumerate(own):
            if part.rank is None:
                shared.append((part.num_elements, full, i))
            else:
                writers[full, i] = part.rank
                load[part.rank] += part.num_elements
    for elements, full, i in sorted(shared, reverse=True):
        writers[full, i] = load.index(min(load))
        load[writers[full, i]] += elements
    return writers

"""The tables of a sharded collection: which shards each rank holds, and the settings that its exchanges share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError
from viviane.embedding import (
    CacheSettings,
    EmbeddingCollection,
    FeatureConfig,
    TableCollection,
    TableConfig,
)
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.initializers import fill_keys
from viviane.embedding.keys import Violations
from viviane.embedding.lookup import place_features
from viviane.ops.row_update import initial_state, state_shape
from viviane.parallel.exchange import assemble
from viviane.parallel.feature_shards import FeatureShard, check_features, part_table, pieces_of
from viviane.parallel.group import Group
from viviane.parallel.plan import Shard, ShardingPlan, shards_of

_FILL_ELEMENTS = 1 << 22  # of a table, initialized at a time


class ShardedTables(TableCollection):
    """The shards of a rank, without lookups; arguments as of `ShardedCollection`."""

    def __init__(
        self,
        tables: Sequence[AnyTable],
        features: Sequence[FeatureConfig],
        optimizer: AnyOptimizer,
        *,
        plan: ShardingPlan,
        group: Group | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        hotness: Mapping[str, int] | None = None,
        deduplicate_ids: bool = False,
        cache: CacheSettings | None = None,
    ) -> None:
        super().__init__()
        self.own = self.replicas = None
        self.deduplicate_ids = deduplicate_ids
        self.group = group or Group.world()
        self.tables: dict[str, AnyTable] = {table.name: table for table in tables}
        self.features = {feature.name: feature for feature in features}
        self.plan, self.optimizer, self.seed = plan, optimizer, seed
        plan.check(self.tables, self.group.size)
        check_features(features, self.tables, plan, optimizer, deduplicate_ids)
        self._device = resolve_device(str(device))
        self.frozen = frozenset(table.name for table in tables if not table.trainable)
        self.wire_dtype, self.output_dtype = wire_dtype, output_dtype
        self.places = place_features(features, self.tables)
        self.pieces = pieces_of(self.features, self.tables, self.places, plan)
        self.shards = {name: shards_of(plan.table(name), table) for name, table in self.tables.items()}
        mine = [one for shards in self.shards.values() for one in shards if one.rank == self.group.rank]
        copies = [one for shards in self.shards.values() for one in shards if one.rank is None]
        if cache is not None and (cache.tables or cache.memory is not None) and deduplicate_ids:
            fix = "leave out deduplicate_ids or embedding_memory"
            raise ConfigError("tables in tiers cannot send distinct rows", where="deduplicate_ids", fix=fix)
        self.own = self._part(mine, [p for p in self.pieces if p.shard.rank == self.group.rank], wire_dtype, cache)
        self.replicas = self._part(copies, [p for p in self.pieces if p.shard.rank is None], output_dtype)
        self.fix_sizes(batch_size, hotness)
        width = max(place.stop for place in self.places.values())
        self.assembly = assemble(self.pieces, self.group.size, width, wire_dtype)
        wide = any(not isinstance(table, TableConfig) or table.num_rows >= 2**31 for table in tables)
        self.row_dtype = torch.int64 if wide else torch.int32
        """Type of row numbers in jagged exchanges."""
        self.violations = Violations()
        self.uses_peers = False
        """Whether a capture in progress uses peer memory."""
        self.own_waiting: list[Callable[[], None]] = []
        self.replicas_waiting: list[Callable[[], None]] = []

    def _part(
        self,
        shards: Sequence[Shard],
        pieces: Sequence[FeatureShard],
        output_dtype: torch.dtype,
        cache: CacheSettings | None = None,
    ) -> EmbeddingCollection | None:
        """Build the collection of some shards, with one feature for each feature shard."""
        used = {piece.shard for piece in pieces}
        tables = [part_table(shard, self.tables[shard.table]) for shard in shards if shard in used]
        if not tables:
            return None
        features = [
            FeatureConfig(name=piece.name, table=piece.shard.table, combiner="sum") for piece in pieces
        ]  # fmt: skip
        if cache is not None:
            names = {table.name for table in tables}
            cache = replace(cache, tables={name: size for name, size in cache.tables.items() if name in names})
        part = EmbeddingCollection(
            tables, features, self.optimizer, device=self.device, seed=self.seed, output_dtype=output_dtype, cache=cache
        )
        for shard in shards:
            if shard in used:
                _start_shard(part, shard, self.tables[shard.table], self.seed)
        return part

    @property
    def device(self) -> torch.device:
        """The device of this rank's shards."""
        return self._device

    @property
    def width(self) -> int:
        """Columns of the flat output."""
        return self.assembly.width

    def parts(self) -> list[EmbeddingCollection]:
        """Return the collections of this rank: its shards, and the replicated tables."""
        return [part for part in (self.own, self.replicas) if part is not None]

    def fix_sizes(self, batch_size: int | None, hotness: Mapping[str, int] | None = None) -> None:
        """Declare static shapes for training batches, equally on all ranks; `None` makes shapes dynamic again.

        With static shapes nothing in forward, backward and step waits for a GPU, and a CUDA graph can capture them, if
        every feature is one-hot or has a `hotness`, no bag has weights, and no table is dynamic. Evaluation still
        exchanges sizes. Keys out of range are raised by `check`, not by `step`.

        Args:
            batch_size: rows of every rank's local batch; None: any.
            hotness: number of ids in every row, by feature with bags.
        """
        if batch_size is not None and any(part.has_tiers for part in self.parts()):
            fix = "leave out fixed_sizes or embedding_memory"
            raise ConfigError("tables in tiers need batches with dynamic shapes", where="fixed sizes", fix=fix)
        self.batch_size, self.hotness = batch_size, dict(hotness or {})

    @property
    def fixed_batch_size(self) -> int | None:
        """Rows of every rank's local batch, where they are declared and hold: in training, not in evaluation."""
        return self.batch_size if self.training else None

    def check(self) -> None:
        """Raise what a GPU found since the last check: a key out of range in a table with "raise"."""
        self.violations.check()
        for part in self.parts():
            part.check()

    def wait_for(self, own: Callable[[], None], replicas: Sequence[Callable[[], None]]) -> None:
        """Keep what a step has to wait for: gradients on their way to this process's shards, and sums in progress."""
        self.own_waiting.append(own)
        self.replicas_waiting += replicas

    def state_shapes(self, table: str) -> dict[str, tuple[bool, torch.dtype]]:
        """Return the tensors of a table, whether each has a number for every column, and their types."""
        settings = self.tables[table]
        rule = (settings.optimizer or self.optimizer) if settings.trainable else None
        shapes = {"weight": (True, settings.torch_dtype)}
        one = torch.empty(1, settings.dim, device="meta")
        if rule is not None:
            shapes |= {n: (len(state_shape(n, one, rule)) == 2, torch.float32) for n in initial_state(rule)}
        return shapes


def _start_shard(part: EmbeddingCollection, shard: Shard, table: AnyTable, seed: int) -> None:
    """Initialize the rows of a shard as in the whole table."""
    if not isinstance(table, TableConfig):
        return  # rows of a dynamic table begin when their keys come
    storage = next(one for one in part.fixed_storages() if shard.table in one.tables)
    storage.begin_as(shard.table, partial(_fill_shard, shard=shard, table=table, seed=seed))


def _fill_shard(weight: Tensor, rows: Tensor, *, shard: Shard, table: TableConfig, seed: int) -> None:
    """Fill rows of a shard as in the whole table."""
    whole = torch.empty(len(rows), table.dim, dtype=weight.dtype, device=weight.device)
    fill_keys(whole, shard.keys.start + rows * shard.keys.step, table, seed)
    weight.copy_(whole[:, shard.start : shard.stop])

"""How a kind of batch is looked up: worked out once per layout, reused for each batch.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.embedding.bags import BagPlan, PooledPlan
from viviane.embedding.batch_keys import Keys
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.keys import BagRowMap, RowMap, Violations, check_key_type
from viviane.embedding.lookup import admitted
from viviane.embedding.output import OutputColumns
from viviane.embedding.storage import Storage
from viviane.embedding.table_storage import StorageLookup, TableStorage
from viviane.ops.key_rows import MOST_BAGS


def place_features(features: Sequence[FeatureConfig], tables: Mapping[str, AnyTable]) -> dict[str, OutputColumns]:
    """Lay features side by side in their order."""
    places: dict[str, OutputColumns] = {}
    start = 0
    for feature in features:
        dim = tables[feature.table].dim
        places[feature.name] = OutputColumns(start, dim, feature.num_places, feature.combiner == "concat")
        start = places[feature.name].stop
    return places


@dataclass(frozen=True)
class OneHotPlan:
    """All features of one storage with one id a row: columns of the batch's ids, looked up at once."""

    storage: Storage
    tables: tuple[str, ...]
    row_map: RowMap
    places: tuple[int, ...]
    """Column of the output where each feature begins."""

    def part(self, one_hot: Tensor, frozen: frozenset[str], origin: str, out: Tensor | None = None) -> StorageLookup:
        """Resolve a batch's ids (B, F); their rows go to `out`, or to a new tensor."""
        rows = self.row_map(one_hot, origin=origin, out=out)
        return StorageLookup(self.storage, rows, None, None, self.places, frozenset(self.tables) - frozen)


@dataclass(frozen=True)
class DynamicPlan:
    """All features of one dynamic table: their keys are resolved together, once a batch.

    Args:
        one_hot: names of the features with one id a row.
        columns: of the batch's ids, theirs.
        places: columns of the output where they begin.
        bags: names of the others.
    """

    storage: DynamicStorage
    one_hot: tuple[str, ...]
    columns: tuple[int, ...]
    places: tuple[int, ...]
    bags: tuple[str, ...]

    def resolve(self, keys: Keys, training: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the rows of one-hot features, (B, F), and of each bag, (N,).

        Raises:
            TableFullError: no row is left for a new key.
        """
        parts = [keys.bags[name].values for name in self.bags]
        if self.columns:
            every = self.columns == tuple(range(keys.one_hot.shape[1]))
            parts.append((keys.one_hot if every else keys.one_hot[:, list(self.columns)]).reshape(-1))
        for name, part in zip([*self.bags, *self.one_hot[:1]], parts, strict=True):
            check_key_type(part, name)
        rows = self.storage.rows(parts, training)
        singles = rows.pop().view(-1, len(self.columns)) if self.columns else None
        return singles, dict(zip(self.bags, rows, strict=True))


@dataclass(frozen=True)
class LookupPlan:
    """Everything that a kind of batch looks up.

    Args:
        one_hot: features with one id a row, by storage.
        pooled: summed bags, by storage.
        concat: "concat" bags.
        dynamic: how the keys of dynamic tables become rows.
    """

    one_hot: tuple[OneHotPlan, ...]
    pooled: tuple[PooledPlan, ...]
    concat: tuple[BagPlan, ...]
    dynamic: tuple[DynamicPlan, ...]

    def parts(
        self, keys: Keys, frozen: frozenset[str], training: bool
    ) -> tuple[list[StorageLookup], dict[str, Tensor]]:
        """Resolve a batch: its parts, and the masks of "concat" features.

        Args:
            frozen: tables that do not move.
            training: whether dynamic tables that move may take new keys in.
        """
        row_buffers = self._row_buffers(keys)
        parts = [
            one.part(keys.one_hot, frozen, keys.origin, row_buffers.get(id(one.storage), _NO_BUFFERS)[0])
            for one in self.one_hot
        ]
        found: dict[str, Tensor] = {}
        for table in self.dynamic:
            moving = frozenset(table.storage.tables) - frozen
            singles, bags = table.resolve(keys, training and bool(moving))
            found |= bags
            if singles is not None:
                parts.append(StorageLookup(table.storage, singles, None, None, table.places, moving))
        parts += [
            group.part(keys, found, frozen, row_buffers.get(id(group.group[0].storage), _NO_BUFFERS)[1])
            for group in self.pooled
        ]
        masks = {}
        for one in self.concat:
            bag = keys.bags[one.feature.name]
            part, masks[one.feature.name] = one.concat(bag, one.rows(keys, found), frozen, keys.origin)
            parts.append(part)
        return admitted(parts, training), masks

    def _row_buffers(self, keys: Keys) -> dict[int, tuple[Tensor, Tensor]]:
        """Return by storage where its rows go, those of bags right behind the others: a sort wants them as one list."""
        row_buffers: dict[int, tuple[Tensor, Tensor]] = {}
        for one in self.one_hot:
            group = next((group for group in self.pooled if group.group[0].storage is one.storage), None)
            count = None if group is None else group.num_rows(keys)
            if count is not None:
                size, features = len(keys.one_hot), len(one.places)
                whole = torch.empty(size * features + count, dtype=one.row_map.row_dtype, device=keys.one_hot.device)
                row_buffers[id(one.storage)] = whole[: size * features].view(size, features), whole[size * features :]
        return row_buffers


_NO_BUFFERS: tuple[None, None] = (None, None)


@dataclass(frozen=True)
class LookupPlanner:
    """Makes the plan of a kind of batch from a collection's parts."""

    features: Mapping[str, FeatureConfig]
    tables: Mapping[str, AnyTable]
    storages: Sequence[TableStorage]
    places: Mapping[str, OutputColumns]
    violations: Violations
    device: torch.device

    def plan(self, one_hot: Sequence[str]) -> LookupPlan:
        """Plan batches whose columns `one_hot` have one id a row; a "concat" is laid out as a bag anyway."""
        index = {name: i for i, name in enumerate(one_hot)}
        features = self.features.values()
        concat = tuple(self._bag(f) for f in features if f.combiner == "concat")
        singles, pooled, dynamic = [], [], []
        for storage in self.storages:
            summed = [f for f in features if f.table in storage.tables and f.combiner != "concat"]
            own = [f for f in summed if f.name in index]
            bags = [f for f in summed if f.name not in index]
            if bags:
                pooled.append(self._pooled(storage, bags))
            if isinstance(storage, DynamicStorage):
                names = {one.name for one in own}
                others = tuple(f.name for f in features if f.table in storage.tables and f.name not in names)
                dynamic.append(self._dynamic(storage, own, others, index))
            elif own and isinstance(storage, Storage):
                singles.append(self._one_hot(storage, own, index))
        return LookupPlan(tuple(singles), tuple(pooled), concat, tuple(dynamic))

    def _dynamic(
        self, storage: DynamicStorage, own: Sequence[FeatureConfig], bags: tuple[str, ...], index: Mapping[str, int]
    ) -> DynamicPlan:
        names = tuple(feature.name for feature in own)
        places = tuple(self.places[name].start for name in names)
        return DynamicPlan(storage, names, tuple(index[name] for name in names), places, bags)

    def _one_hot(self, storage: Storage, features: Sequence[FeatureConfig], index: Mapping[str, int]) -> OneHotPlan:
        columns = [index[feature.name] for feature in features]
        picked = None if columns == list(range(len(index))) else columns
        places = tuple(self.places[feature.name].start for feature in features)
        tables = tuple(feature.table for feature in features)
        return OneHotPlan(storage, tables, self._row_map(storage, features, picked), places)

    def _pooled(self, storage: TableStorage, features: Sequence[FeatureConfig]) -> PooledPlan:
        row_maps = []
        if isinstance(storage, Storage) and len(features) > 1:
            parts = [features[i : i + MOST_BAGS] for i in range(0, len(features), MOST_BAGS)]
            row_maps = [BagRowMap(*self._tables(storage, own)) for own in parts]
        return PooledPlan(tuple(self._bag(feature) for feature in features), tuple(row_maps))

    def _bag(self, feature: FeatureConfig) -> BagPlan:
        storage = next(one for one in self.storages if feature.table in one.tables)
        row_map = self._row_map(storage, [feature]) if isinstance(storage, Storage) else None
        table, place = self.tables[feature.table], self.places[feature.name]
        return BagPlan(storage, feature, table, row_map, self.violations, place)

    def _row_map(
        self, storage: Storage, features: Sequence[FeatureConfig], columns: Sequence[int] | None = None
    ) -> RowMap:
        return RowMap(*self._tables(storage, features), columns)

    def _tables(
        self, storage: Storage, features: Sequence[FeatureConfig]
    ) -> tuple[list[str], list[TableConfig], list[int], int, Violations, torch.device]:
        """Return what a map of features' keys to rows is made of."""
        tables = [storage.tables[feature.table] for feature in features]
        bases = [storage.key_bases[table.name] for table in tables]
        return [f.name for f in features], tables, bases, storage.key_null, self.violations, self.device

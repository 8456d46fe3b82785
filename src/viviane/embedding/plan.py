"""How a kind of batch is looked up: worked out once per layout, reused for each batch.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import DataError, suggest
from viviane.embedding.bag_checks import check_given, checked_bag, checked_ids
from viviane.embedding.bags import AnyTable, BagPlan, PooledPlan
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.jagged import Jagged, is_keyed_jagged, read_keyed_jagged
from viviane.embedding.keys import BagRowMap, RowMap, Violations, check_key_type
from viviane.embedding.lookup import Part
from viviane.embedding.output import Place
from viviane.embedding.storage import Storage
from viviane.ops.key_rows import MOST_BAGS


def place_features(features: Sequence[FeatureConfig], tables: Mapping[str, AnyTable]) -> dict[str, Place]:
    """Lay features side by side in their order."""
    places: dict[str, Place] = {}
    start = 0
    for feature in features:
        dim = tables[feature.table].dim
        places[feature.name] = Place(start, dim, feature.num_places, feature.combiner == "concat")
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

    def part(self, one_hot: Tensor, frozen: frozenset[str], origin: str, out: Tensor | None = None) -> Part:
        """Resolve a batch's ids (B, F); their rows go to `out`, or to a new tensor."""
        rows = self.row_map(one_hot, origin=origin, out=out)
        return Part(self.storage, rows, None, None, self.places, frozenset(self.tables) - frozen)


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
class Plan:
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

    def parts(self, keys: Keys, frozen: frozenset[str], training: bool) -> tuple[list[Part], dict[str, Tensor]]:
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
                parts.append(Part(table.storage, singles, None, None, table.places, moving))
        parts += [
            group.part(keys, found, frozen, row_buffers.get(id(group.group[0].storage), _NO_BUFFERS)[1])
            for group in self.pooled
        ]
        masks = {}
        for one in self.concat:
            bag = keys.bags[one.feature.name]
            part, masks[one.feature.name] = one.concat(bag, one.rows(keys, found), frozen, keys.origin)
            parts.append(part)
        return parts, masks

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
class Planner:
    """Makes the plan of a kind of batch from a collection's parts."""

    features: Mapping[str, FeatureConfig]
    tables: Mapping[str, AnyTable]
    storages: Sequence[Storage | DynamicStorage]
    places: Mapping[str, Place]
    violations: Violations
    device: torch.device

    def plan(self, one_hot: Sequence[str]) -> Plan:
        """Plan batches whose columns `one_hot` have one id a row; a "concat" is laid out as a bag all the same."""
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
            elif own:
                singles.append(self._one_hot(storage, own, index))
        return Plan(tuple(singles), tuple(pooled), concat, tuple(dynamic))

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

    def _pooled(self, storage: Storage | DynamicStorage, features: Sequence[FeatureConfig]) -> PooledPlan:
        row_maps = []
        if isinstance(storage, Storage) and len(features) > 1:
            parts = [features[i : i + MOST_BAGS] for i in range(0, len(features), MOST_BAGS)]
            row_maps = [BagRowMap(*self._tables(storage, own)) for own in parts]
        return PooledPlan(tuple(self._bag(feature) for feature in features), tuple(row_maps))

    def _bag(self, feature: FeatureConfig) -> BagPlan:
        storage = next(one for one in self.storages if feature.table in one.tables)
        row_map = None if isinstance(storage, DynamicStorage) else self._row_map(storage, [feature])
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
        bases = [storage.bases[table.name] for table in tables]
        return [f.name for f in features], tables, bases, storage.null_row, self.violations, self.device


@dataclass(frozen=True)
class Keys:
    """The keys of a batch: one-hot columns side by side, (B, F), and bags by feature."""

    one_hot_names: tuple[str, ...]
    one_hot: Tensor
    bags: Mapping[str, Bag]
    size: int
    origin: str


AnyKeys: TypeAlias = Batch | Mapping[str, Bag | Tensor] | Jagged | Any
"""What a collection can be called with; Any stands for a KeyedJaggedTensor, whose library is not imported."""


def read_keys(
    batch: AnyKeys, features: Mapping[str, FeatureConfig], device: torch.device, violations: Violations
) -> Keys:
    """Take the features' keys out of what a collection is called with, and check all that kernels go by but the keys.

    Raises:
        DataError: a feature is missing, features differ in their number of rows, a tensor is of another type, shape or
            device than it should be; on the CPU: offsets or weights of a bag are wrong.
    """
    if not isinstance(batch, Batch | Mapping):
        batch = _from_jagged(batch, features)
    known = batch.layout.one_hot_index.keys() | batch.bags.keys() if isinstance(batch, Batch) else batch.keys()
    for name in features:
        if name not in known:
            raise DataError("the batch lacks a feature", value=name, fix=suggest(name, known))
    if isinstance(batch, Batch):
        return _keys_of_batch(batch, features, device, violations)
    singles: dict[str, Tensor] = {}
    bags: dict[str, Bag] = {}
    given: dict[str, Bag] = {}
    for name, feature in features.items():
        keys = batch[name]
        if isinstance(keys, Tensor) and keys.dim() == 1 and feature.combiner != "concat":
            singles[name] = checked_ids(keys, name, device)
        elif isinstance(keys, Bag):
            given[name] = bags[name] = checked_bag(keys, name, device)
        else:
            bags[name] = as_bag(checked_ids(keys, name, device), name)
    sizes = {name: len(keys) for name, keys in singles.items()}
    sizes |= {name: len(bag.offsets) - 1 for name, bag in bags.items()}
    if len(set(sizes.values())) > 1:
        raise DataError("features differ in their number of rows", value=sizes)
    check_given(given, "", violations)
    none = torch.empty(0, 0, dtype=torch.int64, device=device)
    ids = torch.stack(list(singles.values()), 1) if singles else none
    return Keys(tuple(singles), ids, bags, next(iter(sizes.values())), "")


def _keys_of_batch(
    batch: Batch, features: Mapping[str, FeatureConfig], device: torch.device, violations: Violations
) -> Keys:
    one_hot, names, size = batch.one_hot, batch.layout.one_hot, batch.size
    bags: dict[str, Bag] = {}
    given: dict[str, Bag] = {}
    for name, feature in features.items():
        if name in batch.bags:
            given[name] = bags[name] = checked_bag(batch.bags[name], name, device)
            if len(bags[name].offsets) != size + 1:
                raise DataError(
                    "the bags of a feature are not as many as the batch has rows", where=f"feature {name!r}",
                    value=len(bags[name].offsets) - 1, allowed=str(size),
                )  # fmt: skip
        elif feature.combiner == "concat":
            bags[name] = batch.bag(name)
    if len(bags) < len(features):
        if one_hot.dim() != 2 or one_hot.shape[1] != len(names):
            raise DataError("ids are (B, F), a column for each one-hot feature", value=tuple(one_hot.shape))
        checked_ids(one_hot, names[0], device)
    check_given(given, batch.origin, violations)
    return Keys(names, one_hot, bags, size, batch.origin)


def _from_jagged(batch: Any, features: Mapping[str, FeatureConfig]) -> dict[str, Bag]:
    if not isinstance(batch, Jagged):
        if not is_keyed_jagged(batch):
            allowed = "a Batch, a mapping from features to keys, or a KeyedJaggedTensor"
            raise DataError("a collection cannot read this", value=type(batch).__name__, allowed=allowed)
        return read_keyed_jagged(batch, starts=True).bags(features)
    return batch.bags(features)


def as_bag(keys: Tensor, feature: str) -> Bag:
    """See ids (B,) as bags of one, a matrix of ids (B, H) as bags of H each."""
    if keys.dim() == 1:
        keys = keys.unsqueeze(1)
    if keys.dim() != 2:
        raise DataError("keys must be a Bag, (B,) or (B, H)", where=f"feature {feature!r}", value=tuple(keys.shape))
    offsets = torch.arange(keys.shape[0] + 1, device=keys.device) * keys.shape[1]
    return Bag(keys.reshape(-1), offsets)

"""How a kind of batch is looked up: worked out once per layout, reused for each batch.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag, L places of a "concat".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import DataError, suggest
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.jagged import Jagged, is_keyed_jagged, read_keyed_jagged
from viviane.embedding.keys import BagTooLong, RowMap, Violations, check_key_type, report
from viviane.embedding.lookup import Part
from viviane.embedding.output import Place
from viviane.embedding.storage import Storage
from viviane.ops.embedding_bag import entry_bags, mean_weights

AnyTable: TypeAlias = TableConfig | DynamicTableConfig


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

    def part(self, one_hot: Tensor, frozen: frozenset[str], origin: str) -> Part:
        """Resolve a batch's ids (B, F)."""
        rows = self.row_map(one_hot, origin=origin)
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
class BagPlan:
    """A feature with any number of ids a row; `row_map` is None where its table is dynamic."""

    storage: Storage | DynamicStorage
    feature: FeatureConfig
    table: AnyTable
    row_map: RowMap | None
    violations: Violations
    place: Place

    def rows(self, bag: Bag, origin: str) -> Tensor:
        """Resolve a bag's ids, (N,)."""
        assert self.row_map is not None
        return self.row_map(bag.values.unsqueeze(1), bag.offsets, origin).view(-1)

    def weights(self, bag: Bag, rows: Tensor) -> Tensor | None:
        """Return what the vectors of a bag that is summed are multiplied by, (N,)."""
        if self.feature.combiner != "mean":
            return bag.weights
        return mean_weights(bag.offsets, self._counted(rows), bag.weights, len(rows))

    def concat(self, bag: Bag, rows: Tensor, frozen: frozenset[str], origin: str) -> tuple[Part, Tensor]:
        """Lay out a bag whose vectors stand side by side, and its mask (B, L)."""
        laid, weights, mask = self._spread(rows, bag.offsets, bag.weights, origin)
        columns = tuple(self.place.start + i * self.place.dim for i in range(self.place.num_places))
        return Part(self.storage, laid, None, weights, columns, frozenset([self.feature.table]) - frozen), mask

    def _counted(self, rows: Tensor) -> Tensor | None:
        """Which entries count in a mean or mask, (N,), bool; None where all do."""
        skips = isinstance(self.table, TableConfig) and self.table.out_of_range in ("ignore", "raise")
        return rows != self.storage.null_row if skips or self.table.padding_id is not None else None

    def _spread(
        self, rows: Tensor, offsets: Tensor, weights: Tensor | None, origin: str
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Lay bags out as (B, L) rows, weights and mask, with the zero row in empty places."""
        null_row, length = self.storage.null_row, self.place.num_places
        laid, weights, record = spread_bags(rows, offsets, weights, length, null_row)
        if record is not None:
            found = BagTooLong(record, origin, self.feature.name, length)
            report(found, self.violations, ("length", self.feature.name))
        return laid, weights, laid != null_row


def spread_bags(
    rows: Tensor, offsets: Tensor, weights: Tensor | None, length: int, null_row: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Lay bags out side by side: rows and weights, (B, L), and the record of the longest bag, see `Violation`.

    Args:
        rows: (N,).
        offsets: (B + 1,).
        weights: (N,) or None.
        length: L.
        null_row: of empty places.
    """
    size, record = len(offsets) - 1, None
    if size:
        lengths = offsets.diff()
        longest = lengths.argmax().view(1)
        excess = lengths.index_select(0, longest)  # indexing by a 0-dim tensor would wait for a GPU
        record = torch.cat([(excess > length).to(torch.int64), longest, excess])
    bags = entry_bags(offsets, len(rows))
    position = torch.arange(len(rows), device=rows.device) - offsets[bags]
    target = torch.where(position < length, bags * length + position, size * length)
    laid = rows.new_full((size * length + 1,), null_row).index_copy_(0, target, rows)[:-1].view(size, length)
    if weights is None:
        return laid, None, record
    return laid, weights.new_zeros(size * length + 1).index_copy_(0, target, weights)[:-1].view(size, length), record


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
    pooled: tuple[tuple[BagPlan, ...], ...]
    concat: tuple[BagPlan, ...]
    dynamic: tuple[DynamicPlan, ...]

    def parts(self, keys: Keys, frozen: frozenset[str], training: bool) -> tuple[list[Part], dict[str, Tensor]]:
        """Resolve a batch: its parts, and the masks of "concat" features.

        Args:
            frozen: tables that do not move.
            training: whether dynamic tables that move may take new keys in.
        """
        parts = [one.part(keys.one_hot, frozen, keys.origin) for one in self.one_hot]
        found: dict[str, Tensor] = {}
        for table in self.dynamic:
            moving = frozenset(table.storage.tables) - frozen
            singles, bags = table.resolve(keys, training and bool(moving))
            found |= bags
            if singles is not None:
                parts.append(Part(table.storage, singles, None, None, table.places, moving))
        parts += [_pooled(group, keys, found, frozen) for group in self.pooled]
        masks = {}
        for one in self.concat:
            bag = keys.bags[one.feature.name]
            part, masks[one.feature.name] = one.concat(bag, _rows(one, keys, found), frozen, keys.origin)
            parts.append(part)
        return parts, masks


def _rows(one: BagPlan, keys: Keys, found: Mapping[str, Tensor]) -> Tensor:
    name = one.feature.name
    return found[name] if name in found else one.rows(keys.bags[name], keys.origin)


def _pooled(group: Sequence[BagPlan], keys: Keys, found: Mapping[str, Tensor], frozen: frozenset[str]) -> Part:
    """Put the bags of one storage behind one another, so that one lookup serves them all."""
    bags = [keys.bags[one.feature.name] for one in group]
    rows = [_rows(one, keys, found) for one in group]
    weights = [one.weights(bag, own) for one, bag, own in zip(group, bags, rows, strict=True)]
    columns = tuple(one.place.start for one in group)
    tables = frozenset(one.feature.table for one in group) - frozen
    if len(group) == 1:
        return Part(group[0].storage, rows[0], bags[0].offsets, weights[0], columns, tables)
    offsets, start = [bags[0].offsets[:1]], 0
    for bag in bags:
        offsets.append(bag.offsets[1:] + start)
        start += len(bag.values)
    joined = None
    if any(one is not None for one in weights):
        pairs = zip(rows, weights, strict=True)
        joined = torch.cat([torch.ones(len(r), device=r.device) if w is None else w for r, w in pairs])
    return Part(group[0].storage, torch.cat(rows), torch.cat(offsets), joined, columns, tables)


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
            group = tuple(self._bag(f) for f in summed if f.name not in index)
            if group:
                pooled.append(group)
            if isinstance(storage, DynamicStorage):
                names = {one.name for one in own}
                bags = tuple(f.name for f in features if f.table in storage.tables and f.name not in names)
                dynamic.append(self._dynamic(storage, own, bags, index))
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

    def _bag(self, feature: FeatureConfig) -> BagPlan:
        storage = next(one for one in self.storages if feature.table in one.tables)
        row_map = None if isinstance(storage, DynamicStorage) else self._row_map(storage, [feature])
        table, place = self.tables[feature.table], self.places[feature.name]
        return BagPlan(storage, feature, table, row_map, self.violations, place)

    def _row_map(
        self, storage: Storage, features: Sequence[FeatureConfig], columns: Sequence[int] | None = None
    ) -> RowMap:
        tables = [storage.tables[feature.table] for feature in features]
        names = [feature.name for feature in features]
        bases = [storage.bases[table.name] for table in tables]
        return RowMap(names, tables, bases, storage.null_row, self.violations, self.device, columns)


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


def read_keys(batch: AnyKeys, features: Mapping[str, FeatureConfig], device: torch.device) -> Keys:
    """Take the features' keys out of what a collection is called with.

    Raises:
        DataError: a feature is missing, or features differ in their number of rows.
    """
    if not isinstance(batch, Batch | Mapping):
        batch = _from_jagged(batch, features)
    known = batch.layout.one_hot_index.keys() | batch.bags.keys() if isinstance(batch, Batch) else batch.keys()
    for name in features:
        if name not in known:
            raise DataError("the batch lacks a feature", value=name, fix=suggest(name, known))
    if isinstance(batch, Batch):
        bags = {n: batch.bag(n) for n, f in features.items() if n in batch.bags or f.combiner == "concat"}
        return Keys(batch.layout.one_hot, batch.one_hot, bags, batch.size, batch.origin)
    singles: dict[str, Tensor] = {}
    bags = {}
    for name, feature in features.items():
        keys = batch[name]
        if isinstance(keys, Tensor) and keys.dim() == 1 and feature.combiner != "concat":
            check_key_type(keys, name)  # stacked with others, numbers of another type would not be theirs any more
            singles[name] = keys
        else:
            bags[name] = keys if isinstance(keys, Bag) else as_bag(keys, name)
    sizes = {name: len(keys) for name, keys in singles.items()}
    sizes |= {name: len(bag.offsets) - 1 for name, bag in bags.items()}
    if len(set(sizes.values())) > 1:
        raise DataError("features differ in their number of rows", value=sizes)
    none = torch.empty(0, 0, dtype=torch.int64, device=device)
    ids = torch.stack(list(singles.values()), 1) if singles else none
    return Keys(tuple(singles), ids, bags, next(iter(sizes.values())), "")


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

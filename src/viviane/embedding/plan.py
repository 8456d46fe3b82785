"""How a kind of batch is looked up: worked out once per layout, reused for each batch.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag, L places of a "concat".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import DataError, suggest
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.keys import BagTooLong, RowMap, Violations, report
from viviane.embedding.lookup import Part
from viviane.embedding.output import Place
from viviane.embedding.storage import Storage
from viviane.ops.embedding_bag import entry_bags, mean_weights


def place_features(features: Sequence[FeatureConfig], tables: Mapping[str, TableConfig]) -> dict[str, Place]:
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
class BagPlan:
    """A feature with any number of ids a row."""

    storage: Storage
    feature: FeatureConfig
    row_map: RowMap
    place: Place

    def entries(self, bag: Bag, origin: str) -> tuple[Tensor, Tensor | None]:
        """Resolve a bag that is summed: rows and weights, (N,) each."""
        rows = self.row_map(bag.values.unsqueeze(1), bag.offsets, origin).view(-1)
        if self.feature.combiner != "mean":
            return rows, bag.weights
        return rows, mean_weights(bag.offsets, self._counted(rows), bag.weights, len(rows))

    def concat(self, bag: Bag, frozen: frozenset[str], origin: str) -> tuple[Part, Tensor]:
        """Resolve a bag whose vectors stand side by side, and its mask (B, L)."""
        rows = self.row_map(bag.values.unsqueeze(1), bag.offsets, origin).view(-1)
        laid, weights, mask = self._spread(rows, bag.offsets, bag.weights, origin)
        columns = tuple(self.place.start + i * self.place.dim for i in range(self.place.num_places))
        return Part(self.storage, laid, None, weights, columns, frozenset([self.feature.table]) - frozen), mask

    def _counted(self, rows: Tensor) -> Tensor | None:
        """Which entries count in a mean or mask, (N,), bool; None where all do."""
        (table,) = self.row_map.tables
        leaves_out = table.padding_id is not None or table.out_of_range in ("ignore", "raise")
        return rows != self.row_map.null_row if leaves_out else None

    def _spread(
        self, rows: Tensor, offsets: Tensor, weights: Tensor | None, origin: str
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Lay bags out as (B, L) rows, weights and mask, with the zero row in empty places."""
        size, length = len(offsets) - 1, self.place.num_places
        lengths = offsets.diff()
        if size:
            longest = lengths.argmax().view(1)
            excess = lengths.index_select(0, longest)  # indexing by a 0-dim tensor would wait for a GPU
            record = torch.cat([(excess > length).to(torch.int64), longest, excess])
            found = BagTooLong(record, origin, self.feature.name, length)
            report(found, self.row_map.violations, ("length", self.feature.name))
        bags = entry_bags(offsets, len(rows))
        position = torch.arange(len(rows), device=rows.device) - offsets[bags]
        target = torch.where(position < length, bags * length + position, size * length)
        spread = rows.new_full((size * length + 1,), self.storage.null_row).index_copy_(0, target, rows)[:-1]
        laid = None
        if weights is not None:
            laid = weights.new_zeros(size * length + 1).index_copy_(0, target, weights)[:-1].view(size, length)
        return spread.view(size, length), laid, (spread != self.storage.null_row).view(size, length)


@dataclass(frozen=True)
class Plan:
    """Everything that a kind of batch looks up: one-hot features and summed bags by storage, and "concat" bags."""

    one_hot: tuple[OneHotPlan, ...]
    pooled: tuple[tuple[BagPlan, ...], ...]
    concat: tuple[BagPlan, ...]

    def parts(self, keys: Keys, frozen: frozenset[str]) -> tuple[list[Part], dict[str, Tensor]]:
        """Resolve a batch: its parts, and the masks of "concat" features."""
        parts = [one.part(keys.one_hot, frozen, keys.origin) for one in self.one_hot]
        parts += [_pooled(group, keys, frozen) for group in self.pooled]
        masks = {}
        for one in self.concat:
            part, masks[one.feature.name] = one.concat(keys.bags[one.feature.name], frozen, keys.origin)
            parts.append(part)
        return parts, masks


def _pooled(group: Sequence[BagPlan], keys: Keys, frozen: frozenset[str]) -> Part:
    """Put the bags of one storage behind one another, so that one lookup serves them all."""
    bags = [keys.bags[one.feature.name] for one in group]
    resolved = [one.entries(bag, keys.origin) for one, bag in zip(group, bags, strict=True)]
    columns = tuple(one.place.start for one in group)
    tables = frozenset(one.feature.table for one in group) - frozen
    if len(group) == 1:
        rows, weights = resolved[0]
        return Part(group[0].storage, rows, bags[0].offsets, weights, columns, tables)
    offsets, start = [bags[0].offsets[:1]], 0
    for bag in bags:
        offsets.append(bag.offsets[1:] + start)
        start += len(bag.values)
    weights = None
    if any(one is not None for _, one in resolved):
        weights = torch.cat([torch.ones(len(r), device=r.device) if w is None else w for r, w in resolved])
    rows = torch.cat([rows for rows, _ in resolved])
    return Part(group[0].storage, rows, torch.cat(offsets), weights, columns, tables)


@dataclass(frozen=True)
class Planner:
    """Makes the plan of a kind of batch from a collection's parts."""

    features: Mapping[str, FeatureConfig]
    tables: Mapping[str, TableConfig]
    storages: Sequence[Storage]
    places: Mapping[str, Place]
    violations: Violations
    device: torch.device

    def plan(self, one_hot: Sequence[str]) -> Plan:
        """Plan batches whose columns `one_hot` have one id a row; a "concat" is laid out as a bag all the same."""
        index = {name: i for i, name in enumerate(one_hot)}
        features = self.features.values()
        concat = tuple(self._bag(f) for f in features if f.combiner == "concat")
        singles, pooled = [], []
        for storage in self.storages:
            summed = [f for f in features if f.table in storage.tables and f.combiner != "concat"]
            own = [f for f in summed if f.name in index]
            if own:
                singles.append(self._one_hot(storage, own, index))
            group = tuple(self._bag(f) for f in summed if f.name not in index)
            if group:
                pooled.append(group)
        return Plan(tuple(singles), tuple(pooled), concat)

    def _one_hot(self, storage: Storage, features: Sequence[FeatureConfig], index: Mapping[str, int]) -> OneHotPlan:
        columns = [index[feature.name] for feature in features]
        picked = None if columns == list(range(len(index))) else columns
        places = tuple(self.places[feature.name].start for feature in features)
        tables = tuple(feature.table for feature in features)
        return OneHotPlan(storage, tables, self._row_map(storage, features, picked), places)

    def _bag(self, feature: FeatureConfig) -> BagPlan:
        storage = next(one for one in self.storages if feature.table in one.tables)
        return BagPlan(storage, feature, self._row_map(storage, [feature]), self.places[feature.name])

    def _row_map(
        self, storage: Storage, features: Sequence[FeatureConfig], columns: Sequence[int] | None = None
    ) -> RowMap:
        tables = [self.tables[feature.table] for feature in features]
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


def read_keys(
    batch: Batch | Mapping[str, Bag | Tensor], features: Mapping[str, FeatureConfig], device: torch.device
) -> Keys:
    """Take the features' keys out of what a collection is called with.

    Raises:
        DataError: a feature is missing, or features differ in their number of rows.
    """
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


def as_bag(keys: Tensor, feature: str) -> Bag:
    """See ids (B,) as bags of one, a matrix of ids (B, H) as bags of H each."""
    if keys.dim() == 1:
        keys = keys.unsqueeze(1)
    if keys.dim() != 2:
        raise DataError("keys must be a Bag, (B,) or (B, H)", where=f"feature {feature!r}", value=tuple(keys.shape))
    offsets = torch.arange(keys.shape[0] + 1, device=keys.device) * keys.shape[1]
    return Bag(keys.reshape(-1), offsets)

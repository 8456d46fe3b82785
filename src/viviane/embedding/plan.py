"""How a kind of batch is looked up: worked out once per layout, reused for each batch.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag, L places of a "concat".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import DataError, suggest
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.keys import BagTooLong, RowMap, Violation, report
from viviane.embedding.lookup import Part, Run
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
    features: tuple[FeatureConfig, ...]
    columns: Tensor | None
    """Columns of the batch's ids; None where they are all of them, in order."""
    row_map: RowMap
    runs: tuple[Run, ...]

    def part(self, one_hot: Tensor, frozen: frozenset[str], origin: str) -> Part:
        """Resolve a batch's ids (B, F)."""
        keys = one_hot if self.columns is None else one_hot.index_select(1, self.columns)
        rows, _ = self.row_map(keys, origin=origin)
        tables = [feature.table for feature in self.features]
        live = [i for i, table in enumerate(tables) if table not in frozen]
        places = None if len(live) == len(tables) else tuple(live)
        return Part(self.storage, rows, None, None, self.runs, places, frozenset(tables[i] for i in live))


@dataclass(frozen=True)
class BagPlan:
    """A feature with any number of ids a row."""

    storage: Storage
    feature: FeatureConfig
    row_map: RowMap
    place: Place

    def part(self, bag: Bag, frozen: frozenset[str], origin: str) -> tuple[Part, Tensor | None]:
        """Resolve a bag; a "concat" gives its mask (B, L) too."""
        keys, offsets = bag.values, bag.offsets
        rows, bad = self.row_map(keys.unsqueeze(1), offsets, origin)
        rows = rows.view(-1)
        counted = self.row_map.counted(keys, bad)
        tables = frozenset([self.feature.table]) - frozen
        runs = (Run(0, self.place.num_places, self.place.start),)
        weights = bag.weights
        if self.feature.combiner == "concat":
            rows, weights, mask = self._spread(rows, offsets, weights, counted, origin)
            return Part(self.storage, rows, None, weights, runs, None, tables), mask
        if self.feature.combiner == "mean":
            weights = mean_weights(offsets, counted, weights, len(keys))
        return Part(self.storage, rows, offsets, weights, runs, None, tables), None

    def _spread(
        self, rows: Tensor, offsets: Tensor, weights: Tensor | None, counted: Tensor | None, origin: str
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Lay bags out as (B, L) rows, weights and mask, with the zero row in empty places."""
        size, length = len(offsets) - 1, self.place.num_places
        lengths = offsets.diff()
        if size:
            longest = lengths.argmax().view(1)
            excess = lengths.index_select(0, longest)  # indexing by a 0-dim tensor would wait for a GPU
            record = torch.cat([(excess > length).to(torch.int64), longest, excess])
            report(BagTooLong(record, origin, self.feature.name, length), self.row_map.violations)
        bags = entry_bags(offsets, len(rows))
        position = torch.arange(len(rows), device=rows.device) - offsets[bags]
        target = torch.where(position < length, bags * length + position, size * length)
        spread = rows.new_full((size * length + 1,), self.storage.null_row).index_copy_(0, target, rows)
        mask = torch.zeros(size * length + 1, dtype=torch.bool, device=rows.device)
        mask.index_copy_(0, target, torch.ones_like(target, dtype=torch.bool) if counted is None else counted)
        laid = None
        if weights is not None:
            laid = weights.new_zeros(size * length + 1).index_copy_(0, target, weights)[:-1].view(size, length)
        return spread[:-1].view(size, length), laid, mask[:-1].view(size, length)


@dataclass(frozen=True)
class Plan:
    """Everything that a kind of batch looks up."""

    one_hot: tuple[OneHotPlan, ...]
    bags: tuple[BagPlan, ...]


@dataclass(frozen=True)
class Planner:
    """Makes the plan of a kind of batch from a collection's parts."""

    features: Mapping[str, FeatureConfig]
    tables: Mapping[str, TableConfig]
    storages: Sequence[Storage]
    places: Mapping[str, Place]
    violations: deque[Violation]
    device: torch.device

    def plan(self, one_hot: Sequence[str]) -> Plan:
        """Plan batches whose columns `one_hot` have one id a row; a "concat" is laid out as a bag all the same."""
        index = {name: i for i, name in enumerate(one_hot)}
        features = self.features.values()
        singles = [f for f in features if f.name in index and f.combiner != "concat"]
        bags = [f for f in features if f.name not in index or f.combiner == "concat"]
        plans = []
        for storage in self.storages:
            own = [f for f in singles if f.table in storage.tables]
            if own:
                plans.append(self._one_hot(storage, own, index))
        return Plan(tuple(plans), tuple(self._bag(feature) for feature in bags))

    def _one_hot(self, storage: Storage, features: Sequence[FeatureConfig], index: Mapping[str, int]) -> OneHotPlan:
        columns = [index[feature.name] for feature in features]
        picked = None if columns == list(range(len(index))) else torch.tensor(columns, device=self.device)
        runs: list[Run] = []
        for i, feature in enumerate(features):
            start = self.places[feature.name].start
            last = runs[-1] if runs else None
            if last is not None and last.start + (last.last - last.first) * storage.dim == start:
                runs[-1] = Run(last.first, i + 1, last.start)
            else:
                runs.append(Run(i, i + 1, start))
        return OneHotPlan(storage, tuple(features), picked, self._row_map(storage, features), tuple(runs))

    def _bag(self, feature: FeatureConfig) -> BagPlan:
        storage = next(one for one in self.storages if feature.table in one.tables)
        return BagPlan(storage, feature, self._row_map(storage, [feature]), self.places[feature.name])

    def _row_map(self, storage: Storage, features: Sequence[FeatureConfig]) -> RowMap:
        tables = [self.tables[feature.table] for feature in features]
        names = [feature.name for feature in features]
        bases = [storage.bases[table.name] for table in tables]
        return RowMap(names, tables, bases, storage.null_row, self.violations, self.device)


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

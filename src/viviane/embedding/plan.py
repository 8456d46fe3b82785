"""How a kind of batch is looked up: worked out once per layout, reused for each batch.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag, L places of a "concat".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Bag
from viviane.core.errors import DataError
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.keys import RowMap
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

    def part(self, one_hot: Tensor, frozen: frozenset[str] | set[str], origin: str) -> Part:
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

    def part(self, bag: Bag, frozen: frozenset[str] | set[str], origin: str) -> tuple[Part, Tensor | None]:
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
        if rows.device.type == "cpu" and size and int(lengths.max()) > length:
            row = int(lengths.argmax())
            raise DataError(
                "a bag is longer than its feature's max_length",
                where=f"feature {self.feature.name!r}, row {row} of the batch" + (f", {origin}" if origin else ""),
                value=int(lengths[row]),
                allowed=f"at most {length} ids",
                fix="raise the feature's max_length, or cut the bags when the data is prepared",
            )
        bags = entry_bags(offsets, len(rows))
        position = torch.arange(len(rows), device=rows.device) - offsets[bags]
        target = torch.where(position < length, bags * length + position, size * length)
        spread = rows.new_full((size * length + 1,), self.storage.null_row).index_copy_(0, target, rows)
        mask = torch.zeros(size * length + 1, dtype=torch.bool, device=rows.device)
        mask[target] = True if counted is None else counted
        laid = None
        if weights is not None:
            laid = weights.new_zeros(size * length + 1).index_copy_(0, target, weights)[:-1].view(size, length)
        return spread[:-1].view(size, length), laid, mask[:-1].view(size, length)


def as_bag(keys: Tensor, feature: str) -> Bag:
    """See ids (B,) as bags of one, a matrix of ids (B, H) as bags of H each."""
    if keys.dim() == 1:
        keys = keys.unsqueeze(1)
    if keys.dim() != 2:
        raise DataError("keys must be a Bag, (B,) or (B, H)", where=f"feature {feature!r}", value=tuple(keys.shape))
    offsets = torch.arange(keys.shape[0] + 1, device=keys.device) * keys.shape[1]
    return Bag(keys.reshape(-1), offsets)

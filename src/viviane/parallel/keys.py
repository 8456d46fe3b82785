"""Resolves the keys of a batch to rows of whole tables, and these to rows of shards.

Shapes: B rows of the local batch, P feature shards with one id in each row, N entries of a bag, L positions of a
"concat".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from viviane.batch import Bag
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableConfig
from viviane.embedding.bags import spread_bags
from viviane.embedding.batch_keys import Keys
from viviane.embedding.keys import BagTooLong, RowMap, Violations, check_key_type, report
from viviane.ops.embedding_bag import mean_weights
from viviane.parallel.feature_shards import FeatureShard
from viviane.parallel.plan import AnyTable

ABSENT = -1  # a row that the shard does not hold


@dataclass(frozen=True)
class Resolved:
    """The keys of a batch as rows of whole tables.

    Args:
        singles: (B, S): one column for each one-hot feature and each position of a "concat".
        bags: rows and weights of the other features.
        masks: (B, L), bool, of "concat" features.
        scales: (B, L), of "concat" features with weights.
    """

    singles: Tensor
    bags: Mapping[str, Bag]
    masks: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]


class KeyResolver:
    """Applies the tables' policies for keys out of range to one kind of batch.

    Args:
        features, tables: of the collection.
        one_hot: names of the one-hot columns.
        violations: see `viviane.embedding.keys`.
        device: of the keys.
        dtype: of rows, int32 or int64.
    """

    def __init__(
        self,
        features: Mapping[str, FeatureConfig],
        tables: Mapping[str, AnyTable],
        one_hot: Sequence[str],
        violations: Violations,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.features = features
        self.tables = tables
        self.violations = violations
        self.device = device
        self.dtype = dtype
        self.null_row = max([t.num_rows for t in tables.values() if isinstance(t, TableConfig)], default=0)
        self.columns = {name: i for i, name in enumerate(one_hot)}
        self.singles: dict[tuple[str, int], int] = {}
        """Column of `Resolved.singles` of each (feature, place)."""
        for feature in features.values():
            if feature.combiner == "concat" or feature.name in self.columns:
                for i in range(feature.num_places):
                    self.singles[feature.name, i] = len(self.singles)
        self._map = self._row_map([f for f in features.values() if self._is_one_hot(f)])
        self._bag_maps = {
            f.name: self._row_map([f], pick=False) for f in features.values() if not self._is_one_hot(f)
        }  # fmt: skip

    def _is_one_hot(self, feature: FeatureConfig) -> bool:
        return feature.name in self.columns and feature.combiner != "concat"

    def _row_map(self, features: Sequence[FeatureConfig], *, pick: bool = True) -> RowMap | None:
        """Map the keys of fixed tables; those of dynamic tables are unchanged."""
        own = [f for f in features if isinstance(self.tables[f.table], TableConfig)]
        if not own:
            return None
        names = [f.name for f in own]
        tables = [table for f in own if isinstance(table := self.tables[f.table], TableConfig)]
        columns = [self.columns[name] for name in names] if pick else None
        return RowMap(names, tables, [0] * len(own), self.null_row, self.violations, self.device, columns)

    def __call__(self, keys: Keys) -> Resolved:
        """Resolve a batch."""
        columns: dict[tuple[str, int], Tensor] = {}
        if self._map is not None:
            rows = self._map(keys.one_hot, origin=keys.origin)
            columns |= {(name, 0): rows[:, i] for i, name in enumerate(self._map.features)}
        for name, column in self.columns.items():
            if name in self.features and (name, 0) in self.singles and (name, 0) not in columns:
                columns[name, 0] = keys.one_hot[:, column]
        bags, masks, scales = {}, {}, {}
        for name in self._bag_maps:
            feature, bag = self.features[name], keys.bags[name]
            rows = self._rows(feature, bag, keys.origin)
            if feature.combiner != "concat":
                bags[name] = Bag(rows, bag.offsets, self._weights(feature, bag, rows))
                continue
            laid, weights, masks[name] = self._spread(feature, bag, rows, keys.origin)
            columns |= {(name, i): laid[:, i] for i in range(feature.num_places)}
            if weights is not None:
                scales[name] = weights
        ordered = [columns[key].to(self.dtype) for key in self.singles]
        empty = torch.empty(keys.size, 0, dtype=self.dtype, device=self.device)
        return Resolved(torch.stack(ordered, 1) if ordered else empty, bags, masks, scales)

    def _rows(self, feature: FeatureConfig, bag: Bag, origin: str) -> Tensor:
        mapping = self._bag_maps[feature.name]
        if mapping is None:
            check_key_type(bag.values, feature.name)
            return bag.values.to(torch.int64)
        return mapping(bag.values.unsqueeze(1), bag.offsets, origin).view(-1)

    def _nothing(self, feature: FeatureConfig) -> int | None:
        """Return the row, or raw key, of padding; None: there is none."""
        table = self.tables[feature.table]
        return table.padding_id if isinstance(table, DynamicTableConfig) else self.null_row

    def _weights(self, feature: FeatureConfig, bag: Bag, rows: Tensor) -> Tensor | None:
        if feature.combiner != "mean":
            return bag.weights
        nothing = self._nothing(feature)
        counted = None if nothing is None else rows != nothing
        return mean_weights(bag.offsets, counted, bag.weights, len(rows))

    def _spread(
        self, feature: FeatureConfig, bag: Bag, rows: Tensor, origin: str
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        laid, weights, record = spread_bags(rows, bag.offsets, bag.weights, feature.num_places, self.null_row)
        if record is not None:
            found = BagTooLong(record, origin, feature.name, feature.num_places)
            report(found, self.violations, ("length", feature.name))
        return laid, weights, laid != self.null_row


class ShardRows:
    """Converts rows of whole tables to rows of shards; ABSENT if the shard does not hold the row.

    Args:
        pieces: feature shards, in order.
        device: of the rows.
    """

    def __init__(self, pieces: Sequence[FeatureShard], device: torch.device) -> None:
        shards = [piece.shard for piece in pieces]
        self._whole = all(one.low == 0 and one.stride == 1 for one in shards)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.low, self.high = column([one.low for one in shards]), column([one.high for one in shards])
        self.stride, self.offset = column([one.stride for one in shards]), column([one.offset for one in shards])
        raw = [not one.high for one in shards]  # of dynamic tables: keys, not rows
        self.raw = torch.tensor(raw, dtype=torch.bool, device=device) if any(raw) else None

    def __call__(self, rows: Tensor, piece: int | None = None) -> Tensor:
        """Return the rows of the shards.

        Args:
            rows: (B, P), or (N,) of one feature shard.
            piece: its index.
        """
        at = slice(None) if piece is None else slice(piece, piece + 1)
        low, high, stride, offset = self.low[at], self.high[at], self.stride[at], self.offset[at]
        own = rows.to(torch.int64) - low
        inside = (own >= 0) & (rows < high)
        if not self._whole:
            inside &= own.remainder(stride) == offset
            own = own // stride
        found = own.masked_fill(~inside, ABSENT).to(rows.dtype)  # torch.where with a number would synchronize
        return found if self.raw is None else torch.where(self.raw[at], rows, found)


T = TypeVar("T")


class KeptKeys(Generic[T]):
    """Keys that were resolved ahead for one batch object, until its lookup takes them.

    Example:
        >>> kept, batch = KeptKeys[str](), object()
        >>> kept.keep(batch, "rows")
        >>> kept.take(object()) is None, kept.take(batch), kept.take(batch), kept.end()
        (True, 'rows', None, True)
    """

    def __init__(self) -> None:
        self._batch: object = None
        self._found: T | None = None
        self._was_taken = False

    def keep(self, batch: object, found: T) -> None:
        """Keep the resolved keys of a batch."""
        self._batch, self._found, self._was_taken = batch, found, False

    def take(self, batch: object) -> T | None:
        """Return the kept keys of this batch object once; None if there are none."""
        if self._found is None or self._batch is not batch:
            return None
        found = self._found
        self._batch, self._found, self._was_taken = None, None, True
        return found

    def end(self) -> bool:
        """Drop keys that were not taken; return whether the last ones were taken."""
        was_taken = self._was_taken
        self._batch, self._found, self._was_taken = None, None, False
        return was_taken

"""Features with any number of ids a row: how their keys become rows, and the lookups of a storage for all of them.

Shapes: B rows of the batch, N entries of a bag, L places of a "concat".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Bag
from viviane.embedding.batch_keys import Keys
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.keys import BagRowMap, BagTooLong, RowMap, Violations, report
from viviane.embedding.output import OutputColumns
from viviane.embedding.table_storage import StorageLookup, TableStorage, join_weights
from viviane.ops.dispatch import kernels_serve
from viviane.ops.embedding_bag import entry_bags, mean_weights


@dataclass(frozen=True)
class BagPlan:
    """A feature with any number of ids a row; `row_map` is None where its table is dynamic."""

    storage: TableStorage
    feature: FeatureConfig
    table: AnyTable
    row_map: RowMap | None
    violations: Violations
    place: OutputColumns

    def rows(self, keys: Keys, found: Mapping[str, Tensor]) -> Tensor:
        """Resolve a batch's ids, (N,).

        Args:
            keys: of the batch.
            found: rows of dynamic tables, by feature.
        """
        if self.row_map is None:
            return found[self.feature.name]
        bag = keys.bags[self.feature.name]
        return self.row_map(bag.values.unsqueeze(1), bag.offsets, keys.origin).view(-1)

    def weights(self, bag: Bag, rows: Tensor) -> Tensor | None:
        """Return what the vectors of a bag that is summed are multiplied by, (N,)."""
        if self.feature.combiner != "mean":
            return bag.weights
        return mean_weights(bag.offsets, self._counted(rows), bag.weights, len(rows))

    def concat(self, bag: Bag, rows: Tensor, frozen: frozenset[str], origin: str) -> tuple[StorageLookup, Tensor]:
        """Lay out a bag whose vectors are side by side, and its mask (B, L)."""
        laid, weights, mask = self._spread(rows, bag.offsets, bag.weights, origin)
        columns = tuple(self.place.start + i * self.place.dim for i in range(self.place.num_places))
        return StorageLookup(self.storage, laid, None, weights, columns, frozenset([self.feature.table]) - frozen), mask

    def _counted(self, rows: Tensor) -> Tensor | None:
        """Which entries count in a mean or mask, (N,), bool; None where all do."""
        skips = isinstance(self.table, TableConfig) and self.table.out_of_range in ("ignore", "raise")
        return rows != self.storage.key_null if skips or self.table.padding_id is not None else None

    def _spread(
        self, rows: Tensor, offsets: Tensor, weights: Tensor | None, origin: str
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Lay bags out as (B, L) rows, weights and mask, with the zero row in empty places."""
        null_row, length = self.storage.key_null, self.place.num_places
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
    here = (position >= 0) & (position < length)
    target = torch.where(here, bags * length + position, size * length)
    laid = rows.new_full((size * length + 1,), null_row).index_copy_(0, target, rows)[:-1].view(size, length)
    if weights is None:
        return laid, None, record
    return laid, weights.new_zeros(size * length + 1).index_copy_(0, target, weights)[:-1].view(size, length), record


@dataclass(frozen=True)
class PooledPlan:
    """The summed bags of one storage, put behind one another, so that one lookup serves them all.

    Args:
        group: the features.
        row_maps: of `MOST_BAGS` features each, for a GPU; empty where the table is dynamic or one feature is alone.
    """

    group: tuple[BagPlan, ...]
    row_maps: tuple[BagRowMap, ...]

    def num_rows(self, keys: Keys) -> int | None:
        """Return how many rows `part` can write into a given output; None if it allocates its own."""
        if len(self.row_maps) != 1 or not kernels_serve(keys.bags[self.group[0].feature.name].offsets.device):
            return None
        return sum(len(keys.bags[one.feature.name].values) for one in self.group)

    def part(
        self, keys: Keys, found: Mapping[str, Tensor], frozen: frozenset[str], out: Tensor | None = None
    ) -> StorageLookup:
        """Resolve a batch's bags.

        Args:
            keys: of the batch.
            found: rows of dynamic tables, by feature.
            frozen: tables that do not move.
            out: where the rows go, as many as `num_rows` returns; None: a new tensor.
        """
        group = self.group
        bags = [keys.bags[one.feature.name] for one in group]
        if self.row_maps and kernels_serve(bags[0].offsets.device):
            joined, offsets = self._map(bags, keys.origin) if out is None else self.row_maps[0](bags, keys.origin, out)
            rows = list(torch.split(joined, [len(bag.values) for bag in bags]))
        else:
            rows = [one.rows(keys, found) for one in group]
            joined = rows[0] if len(rows) == 1 else torch.cat(rows)
            offsets = _join_offsets([bag.offsets for bag in bags], rows)
        weights = [one.weights(bag, own) for one, bag, own in zip(group, bags, rows, strict=True)]
        columns = tuple(one.place.start for one in group)
        tables = frozenset(one.feature.table for one in group) - frozen
        return StorageLookup(group[0].storage, joined, offsets, join_weights(weights, rows), columns, tables)

    def _map(self, bags: Sequence[Bag], origin: str) -> tuple[Tensor, Tensor]:
        """Return the rows of all bags, and all offsets, of one launch; of one for each map, where there are more."""
        found, first = [], 0
        for one in self.row_maps:
            found.append(one(bags[first : first + len(one.features)], origin))
            first += len(one.features)
        if len(found) == 1:
            return found[0]
        rows = [own for own, _ in found]
        return torch.cat(rows), _join_offsets([own for _, own in found], rows)


def _join_offsets(offsets: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Return the offsets of lists of bags that follow one another."""
    if len(offsets) == 1:
        return offsets[0]
    joined, start = [offsets[0][:1]], 0
    for own, entries in zip(offsets, rows, strict=True):
        joined.append(own[1:] + start)
        start += len(entries)
    return torch.cat(joined)

"""A global row address space for tables of one width, and the lookups of a batch as addresses in it.

Address 0 is no row; rows of all ranks' storages follow from 1, ordered by rank. Shapes: B rows of the batch, S one-hot
lookups in a row, N entries of bags, L vectors in a row of the output, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.embedding import EmbeddingCollection
from viviane.parallel.feature_shards import FeatureShard
from viviane.parallel.group import Group
from viviane.parallel.keys import KeyResolver, Resolved, ShardRows
from viviane.parallel.static_layout import RowLocation, row_locations


@dataclass(frozen=True)
class Slot:
    """A storage of a rank: its rows have the addresses start <= a < start + num_rows."""

    rank: int
    storage: int
    start: int
    num_rows: int


@dataclass(frozen=True)
class Lookups:
    """The lookups of one batch, as indices from 1 into its U distinct rows; 0 is no row.

    Args:
        singles: (B, S).
        single_columns: S columns of the output.
        bags: (N,), the bags of one output vector after those of another.
        offsets: (number of bag columns * B + 1,).
        weights: (N,), or None.
        bag_columns: columns of the output.
    """

    singles: Tensor
    single_columns: tuple[int, ...]
    bags: Tensor
    offsets: Tensor
    weights: Tensor | None
    bag_columns: tuple[int, ...]

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        weights = [] if self.weights is None else [self.weights]
        return [self.singles, self.bags, self.offsets, *weights]


@dataclass(frozen=True)
class DedupRows:
    """The distinct rows of a batch: addresses (U,), their number in each slot, and the lookups as indices."""

    addresses: Tensor
    counts: Tensor
    lookups: Lookups


class Width:
    """The lookups of one kind of batch in tables, or shards of tables, of one width.

    Args:
        dim: D.
        pieces: feature shards of that width that are not replicated.
        places: storage and first row of each.
        slots: the storages of that width, ordered by rank.
        resolver: of the batch's keys.
        device: of the keys.
    """

    def __init__(
        self,
        dim: int,
        pieces: Sequence[FeatureShard],
        places: Sequence[RowLocation],
        slots: Sequence[Slot],
        resolver: KeyResolver,
        device: torch.device,
    ) -> None:
        self.dim, self.slots = dim, tuple(slots)
        self.tables = frozenset(piece.shard.table for piece in pieces)
        start = {(slot.rank, slot.storage): slot.start for slot in slots}
        firsts = {
            piece: start[piece.shard.rank or 0, home.storage] + home.base
            for piece, home in zip(pieces, places, strict=True)
        }
        single = [piece for piece in pieces if (piece.feature.name, piece.place) in resolver.singles]
        columns = [resolver.singles[piece.feature.name, piece.place] for piece in single]
        self._single_columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._singles = _Addresses(single, firsts, device) if single else None
        features = dict.fromkeys(piece.feature.name for piece in pieces if piece not in set(single))
        self._bags = {
            name: _Addresses([piece for piece in pieces if piece.feature.name == name], firsts, device)
            for name in features
        }
        self.columns = {piece.column for piece in pieces}
        self._starts = torch.tensor([slot.start for slot in slots], dtype=torch.int64, device=device)
        end = slots[-1].start + slots[-1].num_rows
        self._bounds = torch.tensor([*(slot.start for slot in slots), end], dtype=torch.int64, device=device)

    def dedup(self, found: Resolved) -> DedupRows:
        """Return the distinct rows of a batch."""
        size = found.singles.shape[0]
        singles = found.singles.new_empty(size, 0, dtype=torch.int64)
        if self._singles is not None:
            singles = self._singles(found.singles.index_select(1, self._single_columns))
        bags, weights, columns = [], [], []
        offsets, end = [torch.zeros(1, dtype=torch.int64, device=singles.device)], 0
        weighted = any(found.bags[name].weights is not None for name in self._bags)
        for name, addresses in self._bags.items():
            bag = found.bags[name]
            rows = addresses(bag.values.unsqueeze(1).expand(-1, addresses.num_pieces))
            own = bag.weights
            if weighted and own is None:
                own = torch.ones(len(bag.values), dtype=torch.float32, device=singles.device)
            for i, column in enumerate(addresses.columns):
                bags.append(rows[:, i])
                offsets.append(bag.offsets[1:].to(torch.int64) + end)
                columns.append(column)
                end += len(bag.values)
                if own is not None:
                    weights.append(own)
        every = torch.cat([singles.new_zeros(1), singles.view(-1), *bags])
        distinct, places = torch.unique(every, return_inverse=True)
        counts = torch.searchsorted(distinct, self._bounds).diff()
        lookups = Lookups(
            places[1 : 1 + singles.numel()].view_as(singles), () if self._singles is None else self._singles.columns,
            places[1 + singles.numel() :], torch.cat(offsets), torch.cat(weights) if weights else None, tuple(columns),
        )  # fmt: skip
        return DedupRows(distinct[1:], counts, lookups)

    def rows_of(self, distinct: DedupRows) -> Tensor:
        """Convert addresses to row numbers of their storages."""
        count = len(distinct.addresses)
        return distinct.addresses - torch.repeat_interleave(self._starts, distinct.counts, output_size=count)


class _Addresses:
    """Converts rows of whole tables to addresses; feature shards with the same output column give one address.

    Args:
        pieces: feature shards in the order of their id columns.
        firsts: the address of row 0 of each feature shard.
        device: of the rows.
    """

    def __init__(self, pieces: Sequence[FeatureShard], firsts: dict[FeatureShard, int], device: torch.device) -> None:
        self.num_pieces = len(pieces)
        self.columns = tuple(dict.fromkeys(piece.column for piece in pieces))
        self._rows = ShardRows(pieces, device)
        self._firsts = torch.tensor([firsts[piece] for piece in pieces], dtype=torch.int64, device=device)
        lanes = [self.columns.index(piece.column) for piece in pieces]
        self._lanes = None
        if lanes != list(range(len(lanes))):
            self._lanes = torch.tensor(lanes, dtype=torch.int64, device=device)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return (N, L) of (N, P)."""
        own = self._rows(rows).to(torch.int64)
        found = (own + self._firsts).masked_fill(own < 0, 0)
        if self._lanes is None:
            return found
        # One shard of a column holds the row; the others contribute 0.
        return found.new_zeros(len(found), len(self.columns)).index_add_(1, self._lanes, found)


def lay_out_widths(
    group: Group,
    pieces: Sequence[FeatureShard],
    resolver: KeyResolver,
    own: EmbeddingCollection | None,
    device: torch.device,
) -> tuple[Width, ...]:
    """Work a kind of batch out; all processes call it together.

    Args:
        pieces: of all features.
        resolver: of the batch's keys.
        own: the collection of this process's shards.
        device: of the keys.
    """
    by_rank = [[piece for piece in pieces if piece.shard.rank == rank] for rank in range(group.size)]
    storages = [] if own is None else own.fixed_storages()
    sizes = [[i, one.null_row, one.dim] for i, one in enumerate(storages)]
    told = group.gather_data(
        [[[h.storage, h.base, h.null_row] for h in row_locations(by_rank[group.rank], own)], sizes]
    )
    places = {
        piece: RowLocation(*one) for own, told_of in zip(by_rank, told, strict=True)
        for piece, one in zip(own, told_of[0], strict=True)
    }  # fmt: skip
    widths = []
    for dim in sorted({piece.shard.dim for piece in places}):
        slots: list[Slot] = []
        for rank, (_, every) in enumerate(told):
            for storage, num_rows, width in every:
                if width == dim:
                    start = slots[-1].start + slots[-1].num_rows if slots else 1
                    slots.append(Slot(rank, storage, start, num_rows))
        some = [piece for piece in places if piece.shard.dim == dim]
        widths.append(Width(dim, some, [places[piece] for piece in some], slots, resolver, device))
    return tuple(widths)

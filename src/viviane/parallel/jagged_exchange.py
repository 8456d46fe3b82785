"""The exchange of batches with dynamic shapes: sizes are exchanged before the ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import DataError
from viviane.embedding import EmbeddingCollection
from viviane.embedding.batch_keys import Keys
from viviane.parallel.distributed_input import DistributedInput, batch_tensors, scaled
from viviane.parallel.exchange import OutputDist, exchange_bags, exchange_singles
from viviane.parallel.feature_shards import FeatureShard
from viviane.parallel.group import Group
from viviane.parallel.keys import KeyResolver, Resolved, ShardRows
from viviane.parallel.sharded_tables import ShardedTables


@dataclass(kw_only=True)
class JaggedInput(DistributedInput):
    """The result of a jagged input_dist.

    Args:
        route: the exchange.
        inputs: ids for this rank's shards, of all local batches one after another.
        local: ids of the local batch for replicated tables.
        sizes: rows of every rank's local batch.
        scales: of "concat" features.
    """

    route: JaggedExchange
    inputs: Batch
    local: Batch
    sizes: list[int]
    scales: Mapping[str, Tensor]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that input_dist made."""
        return [*batch_tensors(self.inputs), *batch_tensors(self.local), *self.scales.values(), *self.masks.values()]

    def lookup(self, *, training: bool) -> Tensor:
        """Return the output (B, W)."""
        return self.route.lookup(self, training=training)


def exchange_sizes(group: Group, features: Sequence[str], size: int, found: Resolved) -> list[int]:
    """Return the local batch size of every rank, after a check that all batches have the same columns.

    Args:
        features: their names, in order.
        size: rows of the local batch.
        found: its resolved keys.

    Raises:
        DataError: the local batches differ in which columns are bags or have weights.
    """
    numbers = _size_and_kinds(features, size, found)
    every = group.gather_numbers(numbers)
    if any(one[1:] != numbers[1:] for one in every):
        raise DataError(
            "the local batches of the processes have different columns",
            fix="give every process the same columns: ids, bags, and weights or none",
        )
    return [one[0] for one in every]


def exchange_sizes_ahead(group: Group, features: Sequence[str], size: int, found: Resolved | None) -> list[int] | None:
    """Do what `exchange_sizes` does for a batch whose lookup comes later, and will raise what is wrong.

    Args:
        found: None: this rank has no such batch.

    Returns:
        None where a rank has no such batch, or the local batches differ.
    """
    numbers = _size_and_kinds(features, -1 if found is None else size, found)
    every = group.gather_numbers(numbers)
    sizes = [one[0] for one in every]
    return None if min(sizes) < 0 or any(one[1:] != every[0][1:] for one in every) else sizes


def _size_and_kinds(features: Sequence[str], size: int, found: Resolved | None) -> list[int]:
    """Return a local batch's size, and which of its columns are bags or have weights: two bits each."""
    kind = 0
    for i, name in enumerate(features):
        bag = None if found is None else found.bags.get(name)
        kind |= (0 if bag is None else 1 if bag.weights is None else 2) << (2 * i)
    return [size] + [kind >> (62 * i) & ((1 << 62) - 1) for i in range(2 * len(features) // 62 + 1)]


class JaggedExchange:
    """The exchange of one kind of batch: its feature shards with one-hot ids and with bags, by rank.

    Args:
        sharded: the collection.
        one_hot: names of the one-hot columns.
    """

    def __init__(self, sharded: ShardedTables, one_hot: tuple[str, ...]) -> None:
        self._sharded, self._group = sharded, sharded.group
        pieces, group, device = sharded.pieces, sharded.group, sharded.device
        resolver = KeyResolver(sharded.features, sharded.tables, one_hot, sharded.violations, device, sharded.row_dtype)
        self.resolve = resolver

        def is_single(piece: FeatureShard) -> bool:
            return (piece.feature.name, piece.place) in resolver.singles

        by_rank = [[p for p in pieces if p.shard.rank == rank] for rank in range(group.size)]
        self._singles = Singles([[p for p in own if is_single(p)] for own in by_rank], resolver, device)
        self._bags = [[p for p in own if not is_single(p)] for own in by_rank]
        here = [p for p in pieces if p.shard.rank is None]
        self._local_singles = Singles([[p for p in here if is_single(p)]], resolver, device)
        self._local_bags = [p for p in here if not is_single(p)]
        self._rows = {p: ShardRows([p], device) for own in [*self._bags, self._local_bags] for p in own}

    def input_dist(self, keys: Keys, *, ahead: bool = False) -> JaggedInput:
        """Exchange ids, and sizes before them where the batch size is not fixed; `ahead` makes no difference."""
        own, found = self._sharded, self.resolve(keys)
        if own.fixed_batch_size is not None:
            return self.exchanged(found, [own.fixed_batch_size] * self._group.size, own.hotness)
        return self.exchanged(found, exchange_sizes(self._group, list(own.features), keys.size, found), {})

    def exchanged(self, found: Resolved, sizes: list[int], hotness: Mapping[str, int]) -> JaggedInput:
        """Exchange the ids of local batches of known sizes.

        Args:
            found: the resolved keys of the local batch.
            sizes: rows of every rank's local batch.
            hotness: number of ids of every bag, by feature, if constant.
        """
        inputs = self._exchange(found, sizes, hotness)
        return JaggedInput(
            route=self, inputs=inputs, local=self.local(found), sizes=sizes, scales=found.scales, masks=found.masks
        )

    def lookup(self, inputs: JaggedInput, *, training: bool) -> Tensor:
        """Return the output (B, W); in training its gradient updates the tables."""
        own, sizes = self._sharded, inputs.sizes
        local = look_up(own, own.replicas, inputs.local, sizes[self._group.rank], training)
        looked_up = look_up(own, own.own, inputs.inputs, sum(sizes), training)
        flat = OutputDist.apply(looked_up, local, self._group, own.assembly, sizes)  # type: ignore[no-untyped-call]
        return scaled(flat, inputs.scales, own.places)

    def _exchange(self, found: Resolved, sizes: Sequence[int], hotness: Mapping[str, int]) -> Batch:
        """Return the ids of all local batches for this rank's shards, as one batch."""
        group = self._group
        rows = exchange_singles(group, self._singles.rows(found.singles), self._singles.counts, sizes)
        pieces = [piece for own in self._bags for piece in own]
        bags = [self._bag(piece, found) for piece in pieces]
        weighted = [bag.weights is not None for bag in bags]
        fixed = [hotness.get(piece.feature.name) for piece in pieces]
        counts = [len(own) for own in self._bags]
        taken = exchange_bags(group, bags, counts, sizes, weighted, fixed) if pieces else []
        return _batch(self._singles.pieces[group.rank], rows, self._bags[group.rank], taken)

    def local(self, found: Resolved) -> Batch:
        """Return the ids of the local batch for replicated tables."""
        bags = [self._bag(piece, found) for piece in self._local_bags]
        return _batch(self._local_singles.pieces[0], self._local_singles.rows(found.singles), self._local_bags, bags)

    def _bag(self, piece: FeatureShard, found: Resolved) -> Bag:
        bag = found.bags[piece.feature.name]
        return Bag(self._rows[piece](bag.values, 0), bag.offsets, bag.weights)


def look_up(
    sharded: ShardedTables, part: EmbeddingCollection | None, batch: Batch, size: int, training: bool
) -> Tensor:
    """Return the vectors of a collection's part for a batch of `size` rows; (size, 0) where a rank has no such part."""
    if part is None:
        # Backward exchanges gradients on every rank, so every rank's output requires a gradient.
        empty = torch.empty(size, 0, dtype=sharded.output_dtype, device=sharded.device)
        return empty.requires_grad_(training)
    flat: Tensor = part(batch).flat
    return flat if flat.requires_grad or not training else flat.detach().requires_grad_()


class Singles:
    """Feature shards with one id in each row, by rank."""

    def __init__(self, pieces: Sequence[Sequence[FeatureShard]], resolver: KeyResolver, device: torch.device) -> None:
        self.pieces = pieces
        self.counts = [len(own) for own in pieces]
        every = [piece for own in pieces for piece in own]
        columns = [resolver.singles[piece.feature.name, piece.place] for piece in every]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._rows = ShardRows(every, device) if every else None

    def rows(self, singles: Tensor) -> Tensor:
        """Return the row numbers of a batch for each feature shard, (B, P)."""
        if self._rows is None:
            return singles[:, :0]
        return self._rows(singles.index_select(1, self._columns))


def _batch(
    singles: Sequence[FeatureShard], rows: Tensor, bag_pieces: Sequence[FeatureShard], bags: Sequence[Bag]
) -> Batch:
    names, bag_names = tuple(p.name for p in singles), tuple(p.name for p in bag_pieces)
    nothing = torch.empty(rows.shape[0], 0, device=rows.device)
    return Batch(
        Layout((), (), names, bag_names), nothing, nothing, rows, dict(zip(bag_names, bags, strict=True))
    )  # fmt: skip

"""The exchange of batches with dynamic shapes: sizes are exchanged before the ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import DataError
from viviane.parallel.exchange import exchange_bags, exchange_singles
from viviane.parallel.feature_shards import FeatureShard
from viviane.parallel.group import Group
from viviane.parallel.keys import KeyResolver, Resolved, ShardRows


@dataclass
class JaggedInput:
    """The result of input_dist: the lookups of this rank's shards, and the rest of its local batch.

    Args:
        inputs: ids for this rank's shards, of all local batches one after another.
        local: ids of the local batch for replicated tables.
        sizes: rows of every rank's local batch.
        scales, masks: of "concat" features.
        ready: an event on the stream that computed it; None: the current stream.
    """

    inputs: Batch
    local: Batch
    sizes: list[int]
    scales: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    ready: torch.cuda.Event | None = None

    def take(self, device: torch.device) -> None:
        """Let the current stream wait for the stream that computed it, and keep its memory for the current stream."""
        batches = (self.inputs, self.local)
        tensors = [one for batch in batches for bag in batch.bags.values() for one in (bag.values, bag.offsets)]
        tensors += [bag.weights for batch in batches for bag in batch.bags.values() if bag.weights is not None]
        tensors += [batch.one_hot for batch in batches] + [*self.scales.values(), *self.masks.values()]
        take_over(self.ready, tensors, device)
        self.ready = None


def take_over(ready: torch.cuda.Event | None, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Let the current stream wait for an event, and keep tensors alive until it has finished with them."""
    if ready is None:
        return
    stream = torch.cuda.current_stream(device)
    stream.wait_event(ready)
    for one in tensors:
        one.record_stream(stream)


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
    """The exchange of one kind of batch: its feature shards with one-hot ids and with bags, by rank."""

    def __init__(
        self, resolver: KeyResolver, pieces: Sequence[FeatureShard], group: Group, device: torch.device
    ) -> None:
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
        self._rank = group.rank

    def exchange(self, group: Group, found: Resolved, sizes: Sequence[int], hotness: Mapping[str, int]) -> Batch:
        """Return the ids of all local batches for this rank's shards, as one batch."""
        rows = exchange_singles(group, self._singles.rows(found.singles), self._singles.counts, sizes)
        pieces = [piece for own in self._bags for piece in own]
        bags = [self._bag(piece, found) for piece in pieces]
        weighted = [bag.weights is not None for bag in bags]
        fixed = [hotness.get(piece.feature.name) for piece in pieces]
        counts = [len(own) for own in self._bags]
        taken = exchange_bags(group, bags, counts, sizes, weighted, fixed) if pieces else []
        return _batch(self._singles.pieces[self._rank], rows, self._bags[self._rank], taken)

    def local(self, found: Resolved) -> Batch:
        """Return the ids of the local batch for replicated tables."""
        bags = [self._bag(piece, found) for piece in self._local_bags]
        return _batch(self._local_singles.pieces[0], self._local_singles.rows(found.singles), self._local_bags, bags)

    def _bag(self, piece: FeatureShard, found: Resolved) -> Bag:
        bag = found.bags[piece.feature.name]
        return Bag(self._rows[piece](bag.values, 0), bag.offsets, bag.weights)


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

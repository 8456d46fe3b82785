"""The way of one kind of batch whose sizes may vary: what is asked of which process, and what of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import DataError
from viviane.parallel.exchange import exchange_bags, exchange_singles
from viviane.parallel.group import Group
from viviane.parallel.keys import KeyResolver, PieceRows, Resolved
from viviane.parallel.layout import Piece


@dataclass
class Asked:
    """What was asked of this process, and what its own batch still needs.

    Args:
        asked: of all batches, one after another, of this process's shards.
        local: of its own batch, of replicated tables.
        sizes: rows of every process's batch.
        scales, masks: of "concat" features.
        ready: of the stream that made it; None: the current one.
    """

    asked: Batch
    local: Batch
    sizes: list[int]
    scales: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    ready: torch.cuda.Event | None = None

    def take(self, device: torch.device) -> None:
        """Let the current stream wait for what another one made, and hold it for this one."""
        batches = (self.asked, self.local)
        tensors = [one for batch in batches for bag in batch.bags.values() for one in (bag.values, bag.offsets)]
        tensors += [bag.weights for batch in batches for bag in batch.bags.values() if bag.weights is not None]
        tensors += [batch.one_hot for batch in batches] + [*self.scales.values(), *self.masks.values()]
        take_over(self.ready, tensors, device)
        self.ready = None


def take_over(ready: torch.cuda.Event | None, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Let the current stream wait for an event, and tensors live until it is done with them."""
    if ready is None:
        return
    stream = torch.cuda.current_stream(device)
    stream.wait_event(ready)
    for one in tensors:
        one.record_stream(stream)


def exchange_sizes(group: Group, features: Sequence[str], size: int, found: Resolved) -> list[int]:
    """Return the rows of every process's batch, after all agreed on the kind of batch.

    Args:
        features: their names, in order.
        size: rows of this process's batch.
        found: its keys.

    Raises:
        DataError: the processes' batches differ in which columns are bags or have weights.
    """
    kind = 0
    for i, name in enumerate(features):
        bag = found.bags.get(name)
        kind |= (0 if bag is None else 1 if bag.weights is None else 2) << (2 * i)
    numbers = [size] + [kind >> (62 * i) & ((1 << 62) - 1) for i in range(2 * len(features) // 62 + 1)]
    every = group.gather_numbers(numbers)
    if any(one[1:] != numbers[1:] for one in every):
        raise DataError(
            "the processes' batches are of different kinds",
            fix="give every process the same columns: ids, bags, and weights or none",
        )
    return [one[0] for one in every]


class Route:
    """The way of one kind of batch: which pieces look up single ids, which bags, and on which process."""

    def __init__(self, resolver: KeyResolver, pieces: Sequence[Piece], group: Group, device: torch.device) -> None:
        self.resolve = resolver

        def is_single(piece: Piece) -> bool:
            return (piece.feature.name, piece.place) in resolver.singles

        by_rank = [[p for p in pieces if p.shard.rank == rank] for rank in range(group.size)]
        self._singles = Singles([[p for p in own if is_single(p)] for own in by_rank], resolver, device)
        self._bags = [[p for p in own if not is_single(p)] for own in by_rank]
        here = [p for p in pieces if p.shard.rank is None]
        self._local_singles = Singles([[p for p in here if is_single(p)]], resolver, device)
        self._local_bags = [p for p in here if not is_single(p)]
        self._rows = {p: PieceRows([p], device) for own in [*self._bags, self._local_bags] for p in own}
        self._rank = group.rank

    def exchange(self, group: Group, found: Resolved, sizes: Sequence[int], hotness: Mapping[str, int]) -> Batch:
        """Return what all batches ask of this process, as one batch of its pieces; hotness where it is fixed."""
        rows = exchange_singles(group, self._singles.rows(found.singles), self._singles.counts, sizes)
        pieces = [piece for own in self._bags for piece in own]
        bags = [self._bag(piece, found) for piece in pieces]
        weighted = [bag.weights is not None for bag in bags]
        fixed = [hotness.get(piece.feature.name) for piece in pieces]
        counts = [len(own) for own in self._bags]
        taken = exchange_bags(group, bags, counts, sizes, weighted, fixed) if pieces else []
        return _batch(self._singles.pieces[self._rank], rows, self._bags[self._rank], taken)

    def local(self, found: Resolved) -> Batch:
        """Return what this batch asks of replicated tables."""
        bags = [self._bag(piece, found) for piece in self._local_bags]
        return _batch(self._local_singles.pieces[0], self._local_singles.rows(found.singles), self._local_bags, bags)

    def _bag(self, piece: Piece, found: Resolved) -> Bag:
        bag = found.bags[piece.feature.name]
        return Bag(self._rows[piece](bag.values, 0), bag.offsets, bag.weights)


class Singles:
    """Pieces that look one id a row up, by process."""

    def __init__(self, pieces: Sequence[Sequence[Piece]], resolver: KeyResolver, device: torch.device) -> None:
        self.pieces = pieces
        self.counts = [len(own) for own in pieces]
        every = [piece for own in pieces for piece in own]
        columns = [resolver.singles[piece.feature.name, piece.place] for piece in every]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._rows = PieceRows(every, device) if every else None

    def rows(self, singles: Tensor) -> Tensor:
        """Return the pieces' rows of a batch, (B, P)."""
        if self._rows is None:
            return singles[:, :0]
        return self._rows(singles.index_select(1, self._columns))


def _batch(singles: Sequence[Piece], rows: Tensor, bag_pieces: Sequence[Piece], bags: Sequence[Bag]) -> Batch:
    names, bag_names = tuple(p.name for p in singles), tuple(p.name for p in bag_pieces)
    nothing = torch.empty(rows.shape[0], 0, device=rows.device)
    return Batch(
        Layout((), (), names, bag_names), nothing, nothing, rows, dict(zip(bag_names, bags, strict=True))
    )  # fmt: skip

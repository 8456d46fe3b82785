"""The exchange in which a row crosses the wire once for each process that needs it, however often its batch does.

Each process finds the distinct rows of its batch, asks their owners for them and pools the vectors itself; in backward
it sums the gradients of equal rows before they go. Shapes: n processes, B rows of this process's batch, D the width of
tables or of their parts, W columns of the output, U distinct rows of the batch, N rows that all ask of this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.batch import Batch
from viviane.embedding import Storage
from viviane.embedding.gradients import RowGradients
from viviane.embedding.lookup import Part, entries_at
from viviane.embedding.plan import Keys
from viviane.ops.embedding_bag import gather_rows, pool_rows
from viviane.ops.row_update import Entries, sum_rows
from viviane.parallel.distinct_layout import Lookups, Width, lay_out_widths
from viviane.parallel.keys import KeyResolver
from viviane.parallel.route import Route, take_over

if TYPE_CHECKING:
    from viviane.parallel.collection import ShardedCollection


@dataclass(frozen=True)
class WidthAsked:
    """What is asked of tables of one width.

    Args:
        lookups: of this batch, among the rows that come.
        given: how many rows this process asks of each.
        taken: how many rows each process asks of each of this one's storages.
        rows: those rows by storage, (N,), process by process.
    """

    lookups: Lookups
    given: tuple[int, ...]
    taken: tuple[tuple[int, ...], ...]
    rows: tuple[Tensor, ...]


@dataclass
class DistinctAsked:
    """What was asked of this process, and what its own batch still needs.

    Args:
        route: the way of this kind of batch.
        size: B.
        widths: what is asked, by width.
        local: of its own batch, of replicated tables.
        scales, masks: of "concat" features.
        ready: of the stream that made it; None: the current one.
    """

    route: DistinctRoute
    size: int
    widths: tuple[WidthAsked, ...]
    local: Batch
    scales: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    ready: torch.cuda.Event | None = None

    def take(self, device: torch.device) -> None:
        """Let the current stream wait for what another one made, and hold it for this one."""
        some = [one for width in self.widths for one in (*width.rows, *width.lookups.tensors())]
        for bag in self.local.bags.values():
            some += [bag.values, bag.offsets] + ([] if bag.weights is None else [bag.weights])
        take_over(self.ready, [*some, self.local.one_hot, *self.scales.values(), *self.masks.values()], device)
        self.ready = None


class DistinctRoute:
    """The way of one kind of batch whose rows travel once.

    Args:
        sharded: whose batches they are.
        resolver: of the batch's keys.
        route: the ordinary way of such batches, which serves replicated tables.
    """

    def __init__(self, sharded: ShardedCollection, resolver: KeyResolver, route: Route) -> None:
        self.group, self._sharded, self._route, self._resolve = sharded.group, sharded, route, resolver
        self.widths = lay_out_widths(self.group, sharded.pieces, resolver, sharded.own, sharded.device)
        storages = [] if sharded.own is None else sharded.own.all_storages()
        rank, n = self.group.rank, self.group.size
        # Storages of this process by width, and how many slots of each width every process has.
        self._own = [[storages[s.storage] for s in width.slots if s.rank == rank] for width in self.widths]
        self._num_slots = [[sum(s.rank == r for s in width.slots) for width in self.widths] for r in range(n)]
        far = {column for width in self.widths for column in width.columns}
        # Columns of vectors of replicated tables, where they go, and whether they are added to those from afar.
        self._local_moves: list[tuple[slice, slice, bool]] = []
        start = 0
        for piece in sharded.pieces:
            if piece.shard.rank is None:
                stop, column = start + piece.shard.dim, piece.column
                to = slice(column, column + piece.shard.dim)
                self._local_moves.append((slice(start, stop), to, column in far))
                start = stop
        self._local_width = start

    # Ids ----------------------------------------------------------------------------------------------------

    def ask(self, keys: Keys) -> DistinctAsked:
        """Resolve this process's keys, and ask the others for the distinct rows among them."""
        found = self._resolve(keys)
        looked = [width.distinct(found) for width in self.widths]
        # The one wait for a GPU: how many rows of each slot, in order of rank.
        counts = torch.cat([one.counts for one in looked]).tolist() if looked else []
        asked: list[list[list[int]]] = [[] for _ in range(self.group.size)]  # by rank and width
        at = 0
        for i, _ in enumerate(self.widths):
            for rank, numbers in enumerate(self._num_slots):
                asked[rank].append(counts[at : at + numbers[i]])
                at += numbers[i]
        taken = self._tell(asked)
        widths = []
        for i, (width, one) in enumerate(zip(self.widths, looked, strict=True)):
            given, came = tuple(sum(own[i]) for own in asked), tuple(tuple(own[i]) for own in taken)
            rows = self.group.all_to_all(width.rows_of(one), given, [sum(own) for own in came])
            widths.append(WidthAsked(one.lookups, given, came, tuple(_by_storage(rows, came))))
        return DistinctAsked(self, keys.size, tuple(widths), self._route.local(found), found.scales, found.masks)

    def _tell(self, asked: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
        """Tell every process how many rows are asked of its slots, and return what is asked of this one's."""
        mine = self._num_slots[self.group.rank]
        numbers = torch.tensor([n for own in asked for width in own for n in width], dtype=torch.int64)
        splits = [sum(numbers) for numbers in self._num_slots]
        told = iter(self.group.all_to_all(numbers, splits, [sum(mine)] * self.group.size).tolist())
        return [[[next(told) for _ in range(count)] for count in mine] for _ in range(self.group.size)]

    # Vectors ------------------------------------------------------------------------------------------------

    def look_up(self, asked: DistinctAsked, local: Tensor, *, training: bool) -> Tensor:
        """Return the output, (B, W); in training one whose gradient moves the tables.

        Args:
            asked: of this route.
            local: vectors of replicated tables, (B, their columns).
            training: whether a backward pass may follow.
        """
        anchor = torch.empty(0, device=local.device, requires_grad=training)
        out: Tensor = DistinctLookup.apply(local, anchor, self, asked)  # type: ignore[no-untyped-call]
        return out

    def join(self, asked: DistinctAsked, local: Tensor, *, training: bool) -> Tensor:
        """Send the rows that are asked, and pool those that come."""
        out = torch.empty(asked.size, self._sharded.width, dtype=self._sharded.output_dtype, device=local.device)
        coming = [self._send(i, one, training) for i, one in enumerate(asked.widths)]
        for width, one, wait in zip(self.widths, asked.widths, coming, strict=True):
            vectors = wait().view(-1, width.dim)
            vectors = torch.cat([vectors.new_zeros(1, width.dim), vectors])
            lookups = one.lookups
            if lookups.single_columns:
                gather_rows(vectors, lookups.singles, out, lookups.single_columns)
            if lookups.bag_columns:
                pool_rows(vectors, lookups.bags, lookups.offsets, out, lookups.bag_columns, lookups.weights)
        for source, target, adds in self._local_moves:
            if adds:
                out[:, target] += local[:, source]
            else:
                out[:, target] = local[:, source]
        return out

    def _send(self, i: int, one: WidthAsked, training: bool) -> Callable[[], Tensor]:
        dim, found = self.widths[i].dim, []
        for storage, rows in zip(self._own[i], one.rows, strict=True):
            vectors = torch.empty(len(rows), dim, dtype=self._sharded.wire_dtype, device=rows.device)
            gather_rows(storage.weight, rows.unsqueeze(1), vectors, (0,))
            found.append(vectors)
            if training and isinstance(storage, Storage) and self._tables(storage):
                part = Part(storage, rows.unsqueeze(1), None, None, (0,), frozenset())
                storage.prepare([part], len(rows), dim)
        vectors = _by_process(found, one.taken, self._empty(dim))
        given, taken = [sum(own) * dim for own in one.taken], [count * dim for count in one.given]
        return self.group.start_all_to_all(vectors.view(-1), given, taken)

    def give_back(self, asked: DistinctAsked, gradient: Tensor) -> Tensor:
        """Begin to send the summed gradients to the rows' owners; returns those of vectors of replicated tables."""
        flat = gradient.contiguous().view(-1)
        waits = [
            self._return(width, one, flat, gradient.shape[0])
            for width, one in zip(self.widths, asked.widths, strict=True)
        ]

        def finish() -> None:
            for i, (one, wait) in enumerate(zip(asked.widths, waits, strict=True)):
                self._hand_over(i, one, wait())

        self._sharded.wait_for(finish, [])
        local = torch.empty(gradient.shape[0], self._local_width, dtype=gradient.dtype, device=gradient.device)
        for source, target, _ in self._local_moves:
            local[:, source] = gradient[:, target]
        return local

    def _return(self, width: Width, one: WidthAsked, flat: Tensor, size: int) -> Callable[[], Tensor]:
        entries = _entries(one.lookups, flat, size, self._sharded.width)
        # Every row from 1 to U is looked up at least once, so that the sums stand in the order of the rows asked for.
        _, sums = sum_rows(entries, width.dim, first_row=1, num_rows=sum(one.given))
        sent = sums.to(self._sharded.wire_dtype).view(-1)
        given, taken = [count * width.dim for count in one.given], [sum(own) * width.dim for own in one.taken]
        return self.group.start_all_to_all(sent, given, taken)

    def _hand_over(self, i: int, one: WidthAsked, came: Tensor) -> None:
        dim = self.widths[i].dim
        gradients = _by_storage(came.view(-1, dim), one.taken)
        for storage, rows, own in zip(self._own[i], one.rows, gradients, strict=True):
            if tables := self._tables(storage):
                entries = Entries(rows, own.contiguous().view(-1), None, None, math.gcd(16, dim))
                storage.add_gradients(RowGradients(entries, tables))

    def _tables(self, storage: Any) -> frozenset[str]:
        """Return the tables of a storage that this kind of batch moves."""
        assert isinstance(storage, Storage)
        return frozenset(storage.bases) - self._sharded.frozen

    def _empty(self, dim: int) -> Tensor:
        return torch.empty(0, dim, dtype=self._sharded.wire_dtype, device=self._sharded.device)


class DistinctLookup(torch.autograd.Function):
    """The exchange as autograd sees it; `anchor` is an empty tensor that requires grad."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, anchor: Tensor, route: DistinctRoute, asked: DistinctAsked) -> Tensor:
        """Return the output, and keep what was asked."""
        ctx.what = (route, asked)
        return route.join(asked, local, training=anchor.requires_grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send gradients to the processes that have the rows."""
        route, asked = ctx.what
        return route.give_back(asked, gradients[0]), None, None, None


def _entries(lookups: Lookups, flat: Tensor, size: int, width: int) -> Entries:
    """Return all lookups as one list, and where in the flat gradient theirs stand."""
    singles = entries_at(lookups.singles, None, None, lookups.single_columns, flat, size, width)
    if not lookups.bag_columns:
        return singles
    bags = entries_at(lookups.bags, lookups.offsets, lookups.weights, lookups.bag_columns, flat, size, width)
    if not lookups.single_columns:
        return bags
    assert singles.sources is not None
    assert bags.sources is not None
    weights = bags.weights
    if weights is not None:
        weights = torch.cat([weights.new_ones(len(singles.rows)), weights])
    return Entries(
        torch.cat([singles.rows, bags.rows]), flat, torch.cat([singles.sources, bags.sources]), weights,
        min(singles.aligned, bags.aligned),
    )  # fmt: skip


def _by_storage(came: Tensor, taken: Sequence[Sequence[int]]) -> list[Tensor]:
    """Put what came for one storage behind one another, process by process."""
    if len(taken[0]) < 2:
        return [came] * len(taken[0])
    parts = torch.split(came, [count for own in taken for count in own])
    return [torch.cat(parts[i :: len(taken[0])]) for i in range(len(taken[0]))]


def _by_process(found: Sequence[Tensor], taken: Sequence[Sequence[int]], nothing: Tensor) -> Tensor:
    """Put what goes to one process behind one another, storage by storage."""
    if len(found) < 2:
        return found[0] if found else nothing
    parts = [torch.split(one, [own[i] for own in taken]) for i, one in enumerate(found)]
    return torch.cat([one[rank] for rank in range(len(taken)) for one in parts])

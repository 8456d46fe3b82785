"""The exchange with a dedup stage: each distinct row of a local batch is sent once, and pooled where it is needed.

Each rank deduplicates the rows of its batch, requests them from the ranks that hold them, and pools the vectors itself.
In backward it sums the gradients of equal rows before they are sent. Shapes: n ranks, B rows of the local batch, D the
width of tables or of their shards, W columns of the output, U distinct rows of the batch, N rows that all ranks request
from this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.batch import Batch
from viviane.embedding import Storage
from viviane.embedding.batch_keys import Keys
from viviane.embedding.lookup import entries_at
from viviane.embedding.table_storage import RowGradients, StorageLookup
from viviane.ops.embedding_bag import gather_rows, pool_rows
from viviane.ops.row_update import Entries, sum_rows
from viviane.parallel.dedup_layout import Lookups, Width, lay_out_widths
from viviane.parallel.distributed_input import DistributedInput, batch_tensors, scaled
from viviane.parallel.jagged_exchange import JaggedExchange, look_up
from viviane.parallel.sharded_tables import ShardedTables


@dataclass(frozen=True)
class DedupWidthInput:
    """The result of input_dist for tables of one width.

    Args:
        lookups: of the local batch, as indices into the rows it receives.
        given: number of rows that this rank requests from each rank.
        taken: number of rows that each rank requests from each storage of this one.
        rows: those rows by storage, (N,), ordered by rank.
    """

    lookups: Lookups
    given: tuple[int, ...]
    taken: tuple[tuple[int, ...], ...]
    rows: tuple[Tensor, ...]


@dataclass(kw_only=True)
class DedupInput(DistributedInput):
    """The result of an input_dist with a dedup stage.

    Args:
        route: the exchange.
        size: B.
        widths: requested rows, by width of the tables.
        local: ids of the local batch for replicated tables.
        scales: of "concat" features.
    """

    route: DedupExchange
    size: int
    widths: tuple[DedupWidthInput, ...]
    local: Batch
    scales: Mapping[str, Tensor]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that input_dist made."""
        some = [one for width in self.widths for one in (*width.rows, *width.lookups.tensors())]
        return [*some, *batch_tensors(self.local), *self.scales.values(), *self.masks.values()]

    def lookup(self, *, training: bool) -> Tensor:
        """Return the output (B, W)."""
        return self.route.lookup(self, training=training)


class DedupExchange:
    """The exchange of one kind of batch with deduplicated rows.

    Args:
        sharded: the collection.
        route: the jagged exchange of such batches, which resolves keys and serves replicated tables.
    """

    def __init__(self, sharded: ShardedTables, route: JaggedExchange) -> None:
        self.group, self._sharded, self._route = sharded.group, sharded, route
        self.widths = lay_out_widths(self.group, sharded.pieces, route.resolve, sharded.own, sharded.device)
        storages = [] if sharded.own is None else sharded.own.fixed_storages()
        rank, n = self.group.rank, self.group.size
        # Storages of this rank by width, and the number of slots of each width on every rank.
        self._own = [[storages[s.storage] for s in width.slots if s.rank == rank] for width in self.widths]
        self._num_slots = [[sum(s.rank == r for s in width.slots) for width in self.widths] for r in range(n)]
        far = {column for width in self.widths for column in width.columns}
        # Columns of replicated tables' vectors, their output columns, and whether they are added to received ones.
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

    def input_dist(self, keys: Keys, *, ahead: bool = False) -> DedupInput:
        """Request the distinct rows of the local batch from the ranks that hold them; `ahead` makes no difference."""
        found = self._route.resolve(keys)
        looked = [width.dedup(found) for width in self.widths]
        # The only wait for a GPU: the number of rows of each slot, in the order of ranks.
        counts = torch.cat([one.counts for one in looked]).tolist() if looked else []
        inputs: list[list[list[int]]] = [[] for _ in range(self.group.size)]  # by rank and width
        at = 0
        for i, _ in enumerate(self.widths):
            for rank, numbers in enumerate(self._num_slots):
                inputs[rank].append(counts[at : at + numbers[i]])
                at += numbers[i]
        taken = self._exchange_counts(inputs)
        widths = []
        for i, (width, one) in enumerate(zip(self.widths, looked, strict=True)):
            given, came = tuple(sum(own[i]) for own in inputs), tuple(tuple(own[i]) for own in taken)
            rows = self.group.all_to_all(width.rows_of(one), given, [sum(own) for own in came])
            widths.append(DedupWidthInput(one.lookups, given, came, tuple(_by_storage(rows, came))))
        return DedupInput(
            route=self, size=keys.size, widths=tuple(widths), local=self._route.local(found), scales=found.scales,
            masks=found.masks,
        )  # fmt: skip

    def _exchange_counts(self, inputs: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
        """Exchange how many rows are requested from each slot; return the counts for this rank's slots."""
        mine = self._num_slots[self.group.rank]
        numbers = torch.tensor([n for own in inputs for width in own for n in width], dtype=torch.int64)
        splits = [sum(numbers) for numbers in self._num_slots]
        received = iter(self.group.all_to_all(numbers, splits, [sum(mine)] * self.group.size).tolist())
        return [[[next(received) for _ in range(count)] for count in mine] for _ in range(self.group.size)]

    # Vectors ------------------------------------------------------------------------------------------------

    def lookup(self, inputs: DedupInput, *, training: bool) -> Tensor:
        """Return the output (B, W); in training its gradient updates the tables."""
        own = self._sharded
        local = look_up(own, own.replicas, inputs.local, inputs.size, training)
        anchor = torch.empty(0, device=local.device, requires_grad=training)
        out: Tensor = DedupLookup.apply(local, anchor, self, inputs)  # type: ignore[no-untyped-call]
        return scaled(out, inputs.scales, own.places)

    def output_dist(self, inputs: DedupInput, local: Tensor, *, training: bool) -> Tensor:
        """Send the requested rows, and pool the received ones."""
        out = torch.empty(inputs.size, self._sharded.width, dtype=self._sharded.output_dtype, device=local.device)
        coming = [self._send(i, one, training) for i, one in enumerate(inputs.widths)]
        for width, one, wait in zip(self.widths, inputs.widths, coming, strict=True):
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

    def _send(self, i: int, one: DedupWidthInput, training: bool) -> Callable[[], Tensor]:
        dim, found = self.widths[i].dim, []
        for storage, rows in zip(self._own[i], one.rows, strict=True):
            vectors = torch.empty(len(rows), dim, dtype=self._sharded.wire_dtype, device=rows.device)
            gather_rows(storage.weight, rows.unsqueeze(1), vectors, (0,))
            found.append(vectors)
            if training and self._tables(storage):
                part = StorageLookup(storage, rows.unsqueeze(1), None, None, (0,), frozenset())
                storage.prepare([part], len(rows), dim)
        vectors = _by_process(found, one.taken, self._empty(dim))
        given, taken = [sum(own) * dim for own in one.taken], [count * dim for count in one.given]
        return self.group.start_all_to_all(vectors.view(-1), given, taken)

    def grad_dist(self, inputs: DedupInput, gradient: Tensor) -> Tensor:
        """Start to send summed gradients to the ranks that hold the rows; return those for replicated tables."""
        flat = gradient.contiguous().view(-1)
        waits = [
            self._return(width, one, flat, gradient.shape[0])
            for width, one in zip(self.widths, inputs.widths, strict=True)
        ]

        def finish() -> None:
            for i, (one, wait) in enumerate(zip(inputs.widths, waits, strict=True)):
                self._hand_over(i, one, wait())

        self._sharded.wait_for(finish, [])
        local = torch.empty(gradient.shape[0], self._local_width, dtype=gradient.dtype, device=gradient.device)
        for source, target, _ in self._local_moves:
            local[:, source] = gradient[:, target]
        return local

    def _return(self, width: Width, one: DedupWidthInput, flat: Tensor, size: int) -> Callable[[], Tensor]:
        entries = _entries(one.lookups, flat, size, self._sharded.width)
        # Every row from 1 to U is looked up at least once, so that the sums are in the order of the requested rows.
        _, sums = sum_rows(entries, width.dim, first_row=1, num_rows=sum(one.given))
        sent = sums.to(self._sharded.wire_dtype).view(-1)
        given, taken = [count * width.dim for count in one.given], [sum(own) * width.dim for own in one.taken]
        return self.group.start_all_to_all(sent, given, taken)

    def _hand_over(self, i: int, one: DedupWidthInput, came: Tensor) -> None:
        dim = self.widths[i].dim
        gradients = _by_storage(came.view(-1, dim), one.taken)
        for storage, rows, own in zip(self._own[i], one.rows, gradients, strict=True):
            if tables := self._tables(storage):
                entries = Entries(rows, own.contiguous().view(-1), None, None, math.gcd(16, dim))
                storage.add_gradients(RowGradients(entries, tables))

    def _tables(self, storage: Storage) -> frozenset[str]:
        """Return the tables of a storage that are trained."""
        return frozenset(storage.bases) - self._sharded.frozen

    def _empty(self, dim: int) -> Tensor:
        return torch.empty(0, dim, dtype=self._sharded.wire_dtype, device=self._sharded.device)


class DedupLookup(torch.autograd.Function):
    """The exchange as autograd sees it; `anchor` is an empty tensor that requires grad."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, anchor: Tensor, route: DedupExchange, inputs: DedupInput) -> Tensor:
        """Return the output and keep what backward needs."""
        ctx.what = (route, inputs)
        return route.output_dist(inputs, local, training=anchor.requires_grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send gradients to the ranks that hold the rows."""
        route, inputs = ctx.what
        return route.grad_dist(inputs, gradients[0]), None, None, None


def _entries(lookups: Lookups, flat: Tensor, size: int, width: int) -> Entries:
    """Return all lookups as one list of entries, with the offsets of their gradients in the flat gradient."""
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
    """Concatenate the received rows of each storage, in the order of ranks."""
    if len(taken[0]) < 2:
        return [came] * len(taken[0])
    parts = torch.split(came, [count for own in taken for count in own])
    return [torch.cat(parts[i :: len(taken[0])]) for i in range(len(taken[0]))]


def _by_process(found: Sequence[Tensor], taken: Sequence[Sequence[int]], nothing: Tensor) -> Tensor:
    """Concatenate what each rank is sent, in the order of storages."""
    if len(found) < 2:
        return found[0] if found else nothing
    parts = [torch.split(one, [own[i] for own in taken]) for i, one in enumerate(found)]
    return torch.cat([one[rank] for rank in range(len(taken)) for one in parts])

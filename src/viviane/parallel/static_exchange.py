"""The exchange of batches with static shapes: nothing waits for the GPU, and a CUDA graph can capture it.

One kernel packs ids into send buffers, as row numbers of the storages that hold them. The lookup writes the vectors to
send, in the type of the exchange, and one kernel assembles received blocks into the output. Backward is the reverse.
Shapes as in `viviane.parallel.static_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.embedding.batch_keys import Keys
from viviane.embedding.buffers import Buffers, WideRows, output_memory
from viviane.embedding.lookup import hand_over, prepare
from viviane.embedding.table_storage import StorageLookup
from viviane.ops.capture import URGENT, branch, refuse_capture
from viviane.ops.embedding_bag import gather_rows
from viviane.ops.wire_blocks import cut_blocks, has_whole_rows, join_blocks, pack_rows, pool_columns
from viviane.parallel.distributed_input import DistributedInput
from viviane.parallel.group import Group
from viviane.parallel.peer_exchange import PeerExchange, Regions
from viviane.parallel.peers import open_peer_memory
from viviane.parallel.replicas import ReplicaSum
from viviane.parallel.sharded_tables import ShardedTables
from viviane.parallel.static_keys import StaticKeyResolver
from viviane.parallel.static_layout import StaticLayout, StoragePart, lay_out


@dataclass(frozen=True)
class LookupInFlight:
    """A lookup in flight.

    Args:
        own, local: the lookups of this rank's shards and of replicated tables.
        taken: waits for the vectors of other ranks and returns them; None: they are in the output already.
        out: the output, incomplete until then.
        wide: the wider rows that the output is columns of, if it has margins.
    """

    own: list[StorageLookup]
    local: list[StorageLookup]
    taken: Callable[[], Tensor | None]
    out: Tensor
    wide: WideRows | None


@dataclass(kw_only=True)
class StaticInput(DistributedInput):
    """The result of an input_dist with static shapes.

    Args:
        route: the exchange.
        inputs: row numbers for this rank's storages, (G, C) for each.
        local: row numbers for replicated tables, (B, C) for each storage.
        factors: (B, S), or None: factors of the output's segments.
        weights: for each local storage, (B, C), or None.
        begun: the lookup in flight.
        peers: the peer-memory exchange that sent it; None: collectives.
        unsorted: lookups whose rows are sorted during grad_dist.
    """

    joins_replicas: ClassVar[bool] = True

    route: StaticExchange
    inputs: tuple[Tensor, ...]
    local: tuple[Tensor, ...]
    factors: Tensor | None
    weights: tuple[Tensor | None, ...]
    begun: LookupInFlight | None = None
    peers: PeerExchange | None = None
    unsorted: list[StorageLookup] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that input_dist made."""
        some = [*self.inputs, *self.local, self.factors, *self.weights, *self.masks.values()]
        return [one for one in some if one is not None]

    def begin(self, *, training: bool) -> None:
        """Look up the ids that all ranks sent to this one, and start output_dist."""
        self.route.begin(self, training=training)

    @property
    def wide_in_flight(self) -> WideRows | None:
        """The wider rows that the lookup in flight writes columns of, if the output has margins."""
        return None if self.begun is None else self.begun.wide

    def lookup(self, *, training: bool) -> Tensor:
        """Return the output (B, W)."""
        return self.route.lookup(self, training=training)


class StaticExchange:
    """The exchange of one kind of batch with static shapes.

    Args:
        sharded: the collection.
        one_hot: names of the one-hot columns.
        hotness: number of ids in each row, by feature.
        size: B.
    """

    def __init__(self, sharded: ShardedTables, one_hot: Sequence[str], hotness: Sequence[int], size: int) -> None:
        refuse_capture(sharded.device, "a new kind of batch", fix="run an iteration with such a batch before")
        self.group: Group = sharded.group
        self.size, self.wire, self.output_dtype = size, sharded.wire_dtype, sharded.output_dtype
        self.resolve = StaticKeyResolver(
            sharded.features, sharded.tables, one_hot, hotness, sharded.violations, sharded.device
        )
        self.layout: StaticLayout = lay_out(
            self.group, sharded.pieces, self.resolve.columns, size, sharded.own, sharded.replicas, sharded.device
        )
        self._sums = [ReplicaSum(one.storage, self.group, self.wire) for one in self.layout.local]
        self._sharded = sharded
        self._kind = torch.int32
        self.peers: PeerExchange | None = None
        """The peer-memory exchange of captured batches; see `open_peers`."""

    def open_peers(self) -> str | None:
        """Use peer memory for captured batches; return the reason if that is impossible.

        Collective; call it after a batch.
        """
        if self.peers is not None:
            return None
        group, device, width = self.group, self._sharded.device, self._sharded.width
        margins = self._sharded.margins
        if margins is not None and not margins.applies(width, self.wire, device):
            margins = None
        regions = Regions.of(self.layout, group.size, self.size, width, self.wire, margins)
        memory, reason = open_peer_memory(regions.size, group, device)
        if memory is None:
            return reason
        has_means = any(map(self.resolve.is_mean, self.layout.owners))
        peers = PeerExchange(
            memory, regions, self.layout, group.rank, self.size, width, self.wire, margins, is_multiplied=has_means
        )
        columns = sum(len(span) for span in self.resolve.columns.values())
        factors = torch.ones(self.size, len(self.layout.owners), device=device) if has_means else None
        peers.rehearse(columns, self._kind, factors)
        for one in self._sums:
            one.open_peers()
        self.peers = peers
        return None

    # Ids ----------------------------------------------------------------------------------------------------

    def input_dist(self, keys: Keys, *, ahead: bool = False) -> StaticInput:
        """Resolve the keys of the local batch and exchange ids; `ahead`: captured in a graph of its own."""
        peers = self._take_peers()
        if peers is not None:
            device = self._sharded.device
            with nullcontext() if ahead else branch(device, "exchange", _tensors_of(keys), priority=URGENT):
                found = self.resolve(keys)
                factors, weights = self._factors(found.shares)
                peers.send_ids(found.rows)
            return StaticInput(
                route=self, inputs=peers.ids, local=peers.local_ids, factors=factors, weights=weights,
                masks=found.masks, peers=peers,
            )  # fmt: skip
        layout, size, n = self.layout, self.size, self.group.size
        found = self.resolve(keys)
        factors, weights = self._factors(found.shares)
        self._kind = found.rows.dtype
        blocks = torch.empty(size * sum(layout.counts), dtype=layout.dtype, device=found.rows.device)
        pack_rows(found.rows, layout.columns, blocks)
        sent = size * sum(layout.counts[:n])
        mine = layout.counts[self.group.rank]
        taken = self.group.start_all_to_all(
            blocks[:sent], [size * count for count in layout.counts[:n]], [size * mine] * n
        )
        local = torch.split(blocks[sent:], [size * count for count in layout.counts[n:]])
        inputs = self._split(taken().view(n * size, mine))
        return StaticInput(
            route=self, inputs=inputs, local=tuple(one.view(size, -1) for one in local), factors=factors,
            weights=weights, masks=found.masks,
        )  # fmt: skip

    def _take_peers(self) -> PeerExchange | None:
        """Return the peer-memory exchange for a capture: its memory exists once, so one batch can use it."""
        peers = self.peers
        if peers is None or peers.is_taken or not self._sharded.uses_peers:
            return None
        peers.is_taken = True
        return peers

    def _factors(self, shares: Mapping[str, Tensor]) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """Return the factors that turn sums into means."""
        layout = self.layout
        if not shares:
            return None, (None,) * len(layout.local)
        one = torch.ones_like(next(iter(shares.values())))

        def side_by_side(owners: Sequence[str]) -> Tensor | None:
            if not any(name in shares for name in owners):
                return None
            return torch.cat([shares.get(name, one) for name in owners], 1)

        return side_by_side(layout.owners), tuple(side_by_side(part.owners) for part in layout.local)

    # Vectors ------------------------------------------------------------------------------------------------

    def begin(self, inputs: StaticInput, *, training: bool) -> None:
        """Look up the ids that all ranks sent to this one, and start to send the vectors (output_dist)."""
        if inputs.begun is not None:
            return
        if inputs.peers is None:
            inputs.begun = self._begin(*self._all_parts(inputs), inputs, training)
            return
        with branch(self._sharded.device, "exchange", priority=URGENT) as join:
            inputs.begun = self._begin_peers(inputs, *self._all_parts(inputs), training, join)

    def lookup(self, inputs: StaticInput, *, training: bool) -> Tensor:
        """Return the output (B, W); in training its gradient updates the tables."""
        self.begin(inputs, training=training)
        if not training:
            return self.output_dist(inputs)
        anchor = torch.empty(0, device=self._sharded.device, requires_grad=True)
        out: Tensor = StaticLookup.apply(anchor, self, inputs)  # type: ignore[no-untyped-call]
        return out

    def _all_parts(self, inputs: StaticInput) -> tuple[list[StorageLookup], list[StorageLookup]]:
        """Return the lookups in this rank's shards and in replicated tables."""
        own = self._parts(self.layout.own, inputs.inputs, [None] * len(self.layout.own))
        return own, self._parts(self.layout.local, inputs.local, inputs.weights)

    def _split(self, inputs: Tensor) -> tuple[Tensor, ...]:
        if len(self.layout.own) == 1:
            return (inputs,)
        return tuple(inputs[:, part.first : part.stop].contiguous() for part in self.layout.own)

    def _parts(
        self, parts: Sequence[StoragePart], rows: Sequence[Tensor], weights: Sequence[Tensor | None]
    ) -> list[StorageLookup]:
        frozen = self._sharded.frozen
        return [
            StorageLookup(part.storage, own, None, weight, part.targets, part.tables - frozen)
            for part, own, weight in zip(parts, rows, weights, strict=True)
        ]

    @torch.no_grad()
    def _begin(
        self, own: list[StorageLookup], local: list[StorageLookup], inputs: StaticInput, training: bool
    ) -> LookupInFlight:
        group, layout, size = self.group, self.layout, self.size
        width, n = layout.widths[group.rank], group.size
        device = self._sharded.device
        vectors = torch.empty(n * size, width, dtype=self.wire, device=device)
        for part, shape in zip(own, layout.own, strict=True):
            _gather(part, shape, vectors)
        splits = [size * one for one in layout.widths]
        taken = group.start_all_to_all(vectors.view(-1), [size * width] * n, splits)
        if training:
            self._prepare(own, local)
        out, wide = self._output(self._dtype(device))
        for part, shape in zip(local, layout.local, strict=True):
            _gather(part, shape, out)
        return LookupInFlight(own, local, taken, out, wide)

    def _output(self, dtype: torch.dtype) -> tuple[Tensor, WideRows | None]:
        """Return memory for the output (B, W), and the wider rows that it is columns of, if it has margins."""
        memory, wide = output_memory(Buffers(dtype), self._sharded.margins, self._sharded.width, self._sharded.device)
        return memory.take(self.size, self._sharded.width, self._sharded.device), wide

    def _prepare(self, own: list[StorageLookup], local: Sequence[StorageLookup] | None = None) -> None:
        """Start the part of the update that needs no gradients."""
        prepare(own, self.group.size * self.size, self.layout.widths[self.group.rank])
        if local is not None:
            for part, one in zip(local, self._sums, strict=True):
                one.prepare(part)

    @torch.no_grad()
    def _begin_peers(
        self,
        inputs: StaticInput,
        own: list[StorageLookup],
        local: list[StorageLookup],
        training: bool,
        join: Callable[[], None],
    ) -> LookupInFlight:
        """Start a lookup that writes vectors to the memory of the ranks that need them."""
        peers, device = inputs.peers, self._sharded.device
        assert peers is not None
        dtype = self._dtype(device)
        direct = peers.is_direct and dtype == self.wire
        rows = [part.rows for part in own]
        out, wide = peers.output() if direct else self._output(dtype)
        # Writes to other GPUs are bound by the link; local lookups and sorts overlap with them.
        with branch(device, "local") as done:
            peers.keep_vectors(rows, direct=direct)
            for part, shape in zip(local, self.layout.local, strict=True):
                _gather(part, shape, out)
        with branch(device, "vectors", is_open=True, priority=URGENT) as arrived:
            peers.send_vectors(rows, direct=direct)
        if training:
            # The rows of one storage are sorted during the lookups, the others during grad_dist: a sort that is still
            # running when the lookups finish delays the matrix products that follow.
            inputs.unsorted = own[1:]
            self._prepare(own[:1], local)

        def taken() -> Tensor | None:
            for wait in (join, done, arrived):
                wait()
            return None if direct else peers.blocks

        return LookupInFlight(own, local, taken, out, wide)

    @torch.no_grad()
    def output_dist(self, inputs: StaticInput) -> Tensor:
        """Wait for the vectors of other ranks and assemble the output."""
        assert inputs.begun is not None
        begun = inputs.begun
        taken = begun.taken()
        if taken is not None:
            join_blocks(taken, self.layout.segments, begun.out, inputs.factors)
        inputs.begun, inputs.wide = None, begun.wide
        return begun.out

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Return the output's type: under autocast on a GPU the type of matrix products."""
        fits = self.output_dtype == torch.float32 and not self._sharded.width % 8
        if fits and device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            return torch.get_autocast_dtype("cuda")
        return self.output_dtype

    @torch.no_grad()
    def grad_dist(
        self, own: Sequence[StorageLookup], local: Sequence[StorageLookup], inputs: StaticInput, gradient: Tensor
    ) -> None:
        """Start to send gradients to the shards and to sum those of replicated tables; the step waits for both.

        Args:
            own, local, inputs: of the lookup.
            gradient: of the output, (B, W), rows contiguous.
        """
        start = self._grad_dist_collective if inputs.peers is None else self._grad_dist_peers
        finish = start(own, inputs, gradient)
        # Autograd continues with the layers that produced the other inputs: they do not wait for these sums.
        with branch(self._sharded.device, "replicas", [gradient]):
            through = inputs.peers is not None
            sums = [
                one.start(part, gradient, through_peers=through) for part, one in zip(local, self._sums, strict=True)
            ]
        self._sharded.wait_for(finish, sums)

    def _grad_dist_collective(
        self, own: Sequence[StorageLookup], inputs: StaticInput, gradient: Tensor
    ) -> Callable[[], None]:
        """Start to send gradients to the shards; the returned function waits for the received ones."""
        group, layout, size = self.group, self.layout, self.size
        width, n = layout.widths[group.rank], group.size
        sent = torch.empty(size * sum(layout.widths), dtype=self.wire, device=gradient.device)
        cut_blocks(gradient, layout.segments, sent, inputs.factors)
        splits = [size * one for one in layout.widths]
        taken = group.start_all_to_all(sent, splits, [size * width] * n)

        def finish() -> None:
            found = taken()
            if own:
                hand_over(own, found.view(n * size, width))

        return finish

    def _grad_dist_peers(
        self, own: Sequence[StorageLookup], inputs: StaticInput, gradient: Tensor
    ) -> Callable[[], None]:
        """The same by writing to the memory of the ranks that hold the shards."""
        peers, reads = inputs.peers, [gradient, inputs.factors]
        assert peers is not None
        self._prepare(inputs.unsorted)
        with branch(gradient.device, "gradients", is_open=True, priority=URGENT) as join:
            peers.send_gradients(gradient, inputs.factors)

        def finish() -> None:
            join()
            reads.clear()
            if own:
                hand_over(own, peers.gradients)

        return finish


class StaticLookup(torch.autograd.Function):
    """The exchange as autograd sees it; `anchor` is an empty tensor that requires grad."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, route: StaticExchange, inputs: StaticInput) -> Tensor:
        """Return the output and keep what backward needs."""
        assert inputs.begun is not None
        ctx.what = (route, inputs.begun.own, inputs.begun.local, inputs)
        return route.output_dist(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hand gradients to the storages that have the rows."""
        route, own, local, inputs = ctx.what
        [gradient] = gradients  # of a concatenation: columns of wider rows, which need no copy
        route.grad_dist(own, local, inputs, gradient if has_whole_rows(gradient) else gradient.contiguous())
        return None, None, None


def _tensors_of(keys: Keys) -> list[Tensor]:
    return [keys.one_hot, *(one for bag in keys.bags.values() for one in (bag.values, bag.offsets))]


def _gather(part: StorageLookup, shape: StoragePart, out: Tensor) -> None:
    if not part.rows.numel():
        return
    if shape.is_single:
        gather_rows(part.storage.weight, part.rows, out, part.columns, part.weights)
    else:
        num_rows = part.storage.null_row  # those behind are zeros
        pool_columns(part.storage.weight, part.rows, shape.pieces, out, part.weights, num_rows=num_rows)

"""The exchange of batches whose shapes are known: nothing waits for a GPU, and a CUDA graph can record it.

Ids go into their blocks in one pass, as rows of the storages they are for; the lookup writes what is sent, in the
type of the wire; blocks of vectors become the output in one pass. Backward goes the same way. Shapes as in
`viviane.parallel.fixed_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.embedding.buffers import Buffers
from viviane.embedding.lookup import Part, hand_over, prepare
from viviane.embedding.plan import Keys
from viviane.embedding.wide_rows import WideRows, output_memory
from viviane.ops.capture import URGENT, branch, refuse_capture
from viviane.ops.embedding_bag import gather_rows
from viviane.ops.wire_blocks import cut_blocks, has_whole_rows, join_blocks, pack_rows, pool_columns
from viviane.parallel.fixed_keys import FixedResolver
from viviane.parallel.fixed_layout import FixedLayout, StoragePart, lay_out
from viviane.parallel.fixed_peers import PeerExchange, Regions
from viviane.parallel.group import Group
from viviane.parallel.peers import open_peer_memory
from viviane.parallel.replicas import ReplicaSum
from viviane.parallel.route import take_over

if TYPE_CHECKING:
    from viviane.parallel.collection import ShardedCollection


@dataclass(frozen=True)
class Begun:
    """A lookup under way.

    Args:
        own, local: its parts.
        taken: waits for the vectors of the others and returns them; None: they are in the output.
        out: the output, not yet whole.
        wide: the rows that it is columns of, where it has room beside it.
    """

    own: list[Part]
    local: list[Part]
    taken: Callable[[], Tensor | None]
    out: Tensor
    wide: WideRows | None


@dataclass
class FixedAsked:
    """What was asked of this process, and what its own batch still needs.

    Args:
        route: the way of this kind of batch.
        asked: rows of this process's storages, (G, C) for each.
        local: rows of replicated tables, (B, C) for each storage.
        factors: (B, S), or None: what segments of the output are multiplied by.
        weights: for each local storage, (B, C), or None.
        masks: of "concat" features.
        ready: of the stream that made it; None: the current one.
        begun: a lookup that is under way.
        peers: what it was sent through; None: the group.
        wide: what the output of its lookup is columns of; see `Begun`.
        unsorted: lookups whose rows are sorted when gradients are on their way.
    """

    route: FixedRoute
    asked: tuple[Tensor, ...]
    local: tuple[Tensor, ...]
    factors: Tensor | None
    weights: tuple[Tensor | None, ...]
    masks: Mapping[str, Tensor]

    ready: torch.cuda.Event | None = None
    begun: Begun | None = None
    peers: PeerExchange | None = None
    wide: WideRows | None = None
    unsorted: list[Part] = field(default_factory=list)

    def take(self, device: torch.device) -> None:
        """Let the current stream wait for what another one made, and hold it for this one."""
        some = [*self.asked, *self.local, self.factors, *self.weights, *self.masks.values()]
        take_over(self.ready, [one for one in some if one is not None], device)
        self.ready = None


class FixedRoute:
    """The way of one kind of batch of fixed shapes.

    Args:
        sharded: whose batches they are.
        one_hot: names of the batch's columns with one id a row.
        hotness: ids of a row of each feature.
        size: B.
    """

    def __init__(self, sharded: ShardedCollection, one_hot: Sequence[str], hotness: Sequence[int], size: int) -> None:
        refuse_capture(sharded.device, "a new kind of batch", fix="run an iteration with such a batch before")
        self.group: Group = sharded.group
        self.size, self.wire, self.output_dtype = size, sharded.wire_dtype, sharded.output_dtype
        self.resolve = FixedResolver(
            sharded.features, sharded.tables, one_hot, hotness, sharded.violations, sharded.device
        )
        self.layout: FixedLayout = lay_out(
            self.group, sharded.pieces, self.resolve.columns, size, sharded.own, sharded.replicas, sharded.device
        )
        self._sums = [ReplicaSum(one.storage, self.group, self.wire) for one in self.layout.local]
        self._sharded = sharded
        self._kind = torch.int32
        self.peers: PeerExchange | None = None
        """Through which recorded batches are exchanged; see `open_peers`."""

    def open_peers(self) -> str | None:
        """Let recorded batches be exchanged through memory that all processes write to; returns why not.

        All processes call it together, after a batch.
        """
        if self.peers is not None:
            return None
        group, device, width = self.group, self._sharded.device, self._sharded.width
        margins = self._sharded.margins
        if margins is not None and not margins.suit(width, self.wire, device):
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
        self.peers = peers
        return None

    # Ids ----------------------------------------------------------------------------------------------------

    def ask(self, keys: Keys, *, ahead: bool = False) -> FixedAsked:
        """Resolve this process's keys, and exchange ids; `ahead`: nothing but this is recorded, and needs no branch."""
        peers = self._take_peers()
        if peers is not None:
            device = self._sharded.device
            with nullcontext() if ahead else branch(device, "exchange", _tensors_of(keys), priority=URGENT):
                found = self.resolve(keys)
                factors, weights = self._factors(found.shares)
                peers.send_ids(found.rows)
            return FixedAsked(self, peers.ids, peers.local_ids, factors, weights, found.masks, peers=peers)
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
        asked = self._split(taken().view(n * size, mine))
        return FixedAsked(self, asked, tuple(one.view(size, -1) for one in local), factors, weights, found.masks)

    def _take_peers(self) -> PeerExchange | None:
        """Return what a batch that is recorded is sent through: one of a recording, since its memory is there once."""
        peers = self.peers
        if peers is None or peers.is_taken or not self._sharded.routes.uses_peers:
            return None
        peers.is_taken = True
        return peers

    def _factors(self, shares: Mapping[str, Tensor]) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """Return what sums are multiplied by to become means."""
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

    def begin(self, asked: FixedAsked, *, training: bool) -> None:
        """Look up what all processes ask, and begin to send it back; what this batch asks of its own process too."""
        if asked.begun is not None:
            return
        if asked.peers is None:
            asked.begun = self._begin(*self._all_parts(asked), asked, training)
            return
        with branch(self._sharded.device, "exchange", priority=URGENT) as join:
            asked.begun = self._begin_through(asked, *self._all_parts(asked), training, join)

    def look_up(self, asked: FixedAsked, *, training: bool) -> Tensor:
        """Return the output, (B, W); in training one whose gradient moves the tables."""
        self.begin(asked, training=training)
        if not training:
            return self.join(asked)
        anchor = torch.empty(0, device=self._sharded.device, requires_grad=True)
        out: Tensor = FixedLookup.apply(anchor, self, asked)  # type: ignore[no-untyped-call]
        return out

    def _all_parts(self, asked: FixedAsked) -> tuple[list[Part], list[Part]]:
        """Return what is looked up in this process's shards, and in replicated tables."""
        own = self._parts(self.layout.own, asked.asked, [None] * len(self.layout.own))
        return own, self._parts(self.layout.local, asked.local, asked.weights)

    def _split(self, asked: Tensor) -> tuple[Tensor, ...]:
        if len(self.layout.own) == 1:
            return (asked,)
        return tuple(asked[:, part.first : part.stop].contiguous() for part in self.layout.own)

    def _parts(
        self, parts: Sequence[StoragePart], rows: Sequence[Tensor], weights: Sequence[Tensor | None]
    ) -> list[Part]:
        frozen = self._sharded.frozen
        return [
            Part(part.storage, own, None, weight, part.targets, part.tables - frozen)
            for part, own, weight in zip(parts, rows, weights, strict=True)
        ]

    @torch.no_grad()
    def _begin(self, own: list[Part], local: list[Part], asked: FixedAsked, training: bool) -> Begun:
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
        return Begun(own, local, taken, out, wide)

    def _output(self, dtype: torch.dtype) -> tuple[Tensor, WideRows | None]:
        """Return memory for the output, (B, W), and the rows that it is columns of, where it has room beside it."""
        memory, wide = output_memory(Buffers(dtype), self._sharded.margins, self._sharded.width, self._sharded.device)
        return memory.take(self.size, self._sharded.width, self._sharded.device), wide

    def _prepare(self, own: list[Part], local: Sequence[Part] | None = None) -> None:
        """Begin the part of the update that needs no gradients."""
        prepare(own, self.group.size * self.size, self.layout.widths[self.group.rank])
        if local is not None:
            for part, one in zip(local, self._sums, strict=True):
                one.prepare(part)

    @torch.no_grad()
    def _begin_through(
        self, asked: FixedAsked, own: list[Part], local: list[Part], training: bool, join: Callable[[], None]
    ) -> Begun:
        """Begin a lookup whose vectors are written to the processes that asked."""
        peers, device = asked.peers, self._sharded.device
        assert peers is not None
        dtype = self._dtype(device)
        direct = peers.is_direct and dtype == self.wire
        rows = [part.rows for part in own]
        out, wide = peers.output() if direct else self._output(dtype)
        # The link holds up what goes to the others; this process's own lookups run beside it, and the sorts, too.
        with branch(device, "at home") as done:
            peers.keep_vectors(rows, direct=direct)
            for part, shape in zip(local, self.layout.local, strict=True):
                _gather(part, shape, out)
        with branch(device, "vectors", is_open=True, priority=URGENT) as arrived:
            peers.send_vectors(rows, direct=direct)
        if training:
            # One storage's rows are sorted beside the lookups, the others' where GPUs wait for each other's gradients:
            # a sort that is still running when the lookups are through keeps the products behind them out.
            asked.unsorted = own[1:]
            self._prepare(own[:1], local)

        def taken() -> Tensor | None:
            for wait in (join, done, arrived):
                wait()
            return None if direct else peers.blocks

        return Begun(own, local, taken, out, wide)

    @torch.no_grad()
    def join(self, asked: FixedAsked) -> Tensor:
        """Put the output together."""
        assert asked.begun is not None
        begun = asked.begun
        taken = begun.taken()
        if taken is not None:
            join_blocks(taken, self.layout.segments, begun.out, asked.factors)
        asked.begun, asked.wide = None, begun.wide
        return begun.out

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Return the output's type: under autocast on a GPU that of matrix products, which would round it to that."""
        fits = self.output_dtype == torch.float32 and not self._sharded.width % 8
        if fits and device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            return torch.get_autocast_dtype("cuda")
        return self.output_dtype

    @torch.no_grad()
    def give_back(self, own: Sequence[Part], local: Sequence[Part], asked: FixedAsked, gradient: Tensor) -> None:
        """Begin to send gradients to the shards and to sum those of replicated tables; a step waits for them.

        Args:
            own, local, asked: of the lookup.
            gradient: of the output, (B, W), of whole rows.
        """
        give = self._give if asked.peers is None else self._give_through
        finish = give(own, asked, gradient)
        # Autograd goes on with the layers whose outputs stand beside the embeddings: they need not wait for these sums.
        with branch(self._sharded.device, "replicas", [gradient]):
            sums = [one.start(part, gradient) for part, one in zip(local, self._sums, strict=True)]
        self._sharded.wait_for(finish, sums)

    def _give(self, own: Sequence[Part], asked: FixedAsked, gradient: Tensor) -> Callable[[], None]:
        """Begin to send gradients to the shards; the function that is returned waits for those that come."""
        group, layout, size = self.group, self.layout, self.size
        width, n = layout.widths[group.rank], group.size
        sent = torch.empty(size * sum(layout.widths), dtype=self.wire, device=gradient.device)
        cut_blocks(gradient, layout.segments, sent, asked.factors)
        splits = [size * one for one in layout.widths]
        taken = group.start_all_to_all(sent, splits, [size * width] * n)

        def finish() -> None:
            found = taken()
            if own:
                hand_over(own, found.view(n * size, width))

        return finish

    def _give_through(self, own: Sequence[Part], asked: FixedAsked, gradient: Tensor) -> Callable[[], None]:
        """Do so by writing to the memory of the shards' processes."""
        peers, reads = asked.peers, [gradient, asked.factors]
        assert peers is not None
        self._prepare(asked.unsorted)
        with branch(gradient.device, "gradients", is_open=True, priority=URGENT) as join:
            peers.send_gradients(gradient, asked.factors)

        def finish() -> None:
            join()
            reads.clear()
            if own:
                hand_over(own, peers.gradients)

        return finish


class FixedLookup(torch.autograd.Function):
    """The exchange as autograd sees it; `anchor` is an empty tensor that requires grad."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, route: FixedRoute, asked: FixedAsked) -> Tensor:
        """Return the output, and keep what was asked."""
        assert asked.begun is not None
        ctx.what = (route, asked.begun.own, asked.begun.local, asked)
        return route.join(asked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hand gradients to the storages that have the rows."""
        route, own, local, asked = ctx.what
        [gradient] = gradients  # of a concatenation it is columns of the whole, which need no copy
        route.give_back(own, local, asked, gradient if has_whole_rows(gradient) else gradient.contiguous())
        return None, None, None


def _tensors_of(keys: Keys) -> list[Tensor]:
    return [keys.one_hot, *(one for bag in keys.bags.values() for one in (bag.values, bag.offsets))]


def _gather(part: Part, shape: StoragePart, out: Tensor) -> None:
    if not part.rows.numel():
        return
    if shape.is_single:
        gather_rows(part.storage.weight, part.rows, out, part.columns, part.weights)
    else:
        pool_columns(part.storage.weight, part.rows, shape.pieces, out, part.weights)

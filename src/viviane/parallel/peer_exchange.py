"""The exchange of static batches through peer memory: kernels write directly where another rank reads.

Ids are written to the memory of the ranks that hold the rows, vectors to the memory of the ranks whose batches need
them, gradients to the ranks that hold the rows. If every output column comes from one rank and needs no factor, vectors
are written directly into the output.

No rank overwrites memory that another may still read. Ids of a step may be written during the update of the step
before: a barrier comes first, at which every rank has run that step's backward and sorted its ids. Vectors are written
when all ids have arrived; tensors that layers keep for backward, such as a concatenation in the margins of the output,
are in this memory too, and that backward has finished. Gradients are written after the barrier of vectors, which a rank
reaches only after its update has read the gradients of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from viviane.embedding.buffers import Margins, WideRows
from viviane.ops.embedding_bag import gather_rows
from viviane.ops.wire_blocks import Columns, Segment, Segments, Source, cut_blocks, pack_rows, pool_columns
from viviane.parallel.peers import SymmetricMemory, rounded
from viviane.parallel.static_layout import StaticLayout

_THROUGH, _IDS, _VECTORS, _GRADIENTS = range(4)  # channels of barriers


@dataclass(frozen=True)
class Regions:
    """Byte offsets of ids, vectors and gradients in every rank's block of symmetric memory, and the size of a block."""

    ids: int
    vectors: int
    gradients: int
    size: int

    @classmethod
    def of(
        cls, layout: StaticLayout, num_ranks: int, size: int, width: int, wire: torch.dtype, margins: Margins | None
    ) -> Regions:
        """Lay out the memory for one kind of batch.

        Args:
            layout: of the batch.
            num_ranks: n.
            size: B.
            width: W.
            wire: type of vectors and gradients.
            margins: of the output.
        """
        width += 0 if margins is None else margins.front + margins.behind
        ids = size * (num_ranks * max(layout.counts[:num_ranks]) + sum(layout.counts[num_ranks:]))
        vectors = rounded(ids * layout.dtype.itemsize)
        gradients = vectors + rounded(size * max(width, sum(layout.widths)) * wire.itemsize)
        end = gradients + rounded(num_ranks * size * max(layout.widths) * wire.itemsize)
        return cls(0, vectors, gradients, end)


@dataclass(frozen=True)
class _OutputBlock:
    """A rank's block from byte `start` on, as memory of the output."""

    memory: SymmetricMemory
    rank: int
    start: int
    dtype: torch.dtype

    def take(self, size: int, width: int, _: torch.device) -> Tensor:
        """Return the same matrix in every call."""
        return self.memory.view(self.rank, self.start, (size, width), self.dtype)


class PeerExchange:
    """Writes ids, vectors and gradients of one kind of batch into the memory of the ranks that read them.

    Args:
        memory: symmetric memory of at least `regions.size` bytes.
        regions: its layout.
        layout: of the batch.
        rank: of this process.
        size: B.
        width: W.
        wire: type of vectors and gradients.
        margins: columns next to the output; None: there are none.
        is_multiplied: whether factors turn sums into means.

    Attributes:
        is_direct: whether vectors can be written directly into the output.
        is_taken: whether a lookup of the current capture uses it.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        regions: Regions,
        layout: StaticLayout,
        rank: int,
        size: int,
        width: int,
        wire: torch.dtype,
        margins: Margins | None,
        *,
        is_multiplied: bool,
    ) -> None:
        self.memory, self.layout, self.size, self.wire = memory, layout, size, wire
        self.rank, self.num_ranks = rank, len(layout.widths)
        self.is_direct = not is_multiplied and all(
            len(one.sources) == 1 and not one.adds for one in layout.segments.items
        )
        self.is_taken = False
        n, counts, widths = self.num_ranks, layout.counts, layout.widths
        self.device = memory.base(wire).device
        self._columns = Columns(self._lines(regions), self.device)
        self._segments = Segments(self._cuts(regions), self.device)
        self.ids = self._matrices(regions.ids, n * size, layout.parts[rank])
        after = regions.ids + n * size * max(counts[:n]) * layout.dtype.itemsize
        self.local_ids = self._matrices(after, size, counts[n:])
        self.blocks = memory.view(rank, regions.vectors, (size * sum(widths),), wire)
        self.gradients = memory.view(rank, regions.gradients, (n * size, widths[rank]), wire)
        before = size * sum(widths[:rank]) * wire.itemsize
        ranks = range(n)
        self._start, self._width, self._margins = regions.vectors, width, margins
        self._outputs = [self._output(q)[0] for q in ranks]
        self._theirs = [memory.view(q, regions.vectors + before, (size, widths[rank]), wire) for q in ranks]

    def _matrices(self, start: int, size: int, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Return consecutive matrices (size, C) of ids in this rank's block."""
        kind, found = self.layout.dtype, []
        for count in counts:
            found.append(self.memory.view(self.rank, start, (size, count), kind))
            start += size * count * kind.itemsize
        return tuple(found)

    def output(self) -> tuple[Tensor, WideRows | None]:
        """Return the output (B, W) if `is_direct`, and the wider rows that it is columns of, if it has margins.

        Tensors are new in every call, since autograd modifies their metadata.
        """
        return self._output(self.rank)

    def _output(self, rank: int) -> tuple[Tensor, WideRows | None]:
        memory = _OutputBlock(self.memory, rank, self._start, self.wire)
        wide = None if self._margins is None else WideRows(memory, self._margins)
        return (wide or memory).take(self.size, self._width, self.device), wide

    def _lines(self, regions: Regions) -> list[list[int]]:
        """Return the target of each id column in the memory of the rank that holds its rows, or here for replicas."""
        layout, n, size, kind = self.layout, self.num_ranks, self.size, self.layout.dtype
        lines: list[list[int]] = []

        def add(start: int, count: int) -> None:
            for i, line in enumerate(layout.columns.lines[len(lines) : len(lines) + count]):
                lines.append([line[0], start + i, count, *line[3:]])

        for owner, counts in enumerate(layout.parts):
            at = self.memory.offset(owner, regions.ids, kind)
            for count in counts:
                add(at + self.rank * size * count, count)
                at += n * size * count
        at = self.memory.offset(self.rank, regions.ids, kind) + n * size * max(layout.counts[:n])
        for count in layout.counts[n:]:
            add(at, count)
            at += size * count
        return lines

    def _cuts(self, regions: Regions) -> list[Segment]:
        """Return the target of each segment of the output's gradient in the memory of the rank that holds its rows."""
        widths = self.layout.widths
        starts = list(accumulate((self.size * width for width in widths), initial=0))

        def moved(source: Source) -> Source:
            owner = next(q for q in range(self.num_ranks) if starts[q] <= source.start < starts[q + 1])
            at = self.memory.offset(owner, regions.gradients, self.wire) + self.rank * self.size * widths[owner]
            return Source(source.start - starts[owner] + at, source.width)

        return [replace(one, sources=tuple(map(moved, one.sources))) for one in self.layout.segments.items]

    def send_ids(self, rows: Tensor) -> None:
        """Write row numbers of the local batch (B, C) to the ranks that hold the rows, and wait for all ranks."""
        self.memory.barrier(_THROUGH)
        pack_rows(rows, self._columns, self.memory.base(self.layout.dtype))
        self.memory.barrier(_IDS)

    def send_vectors(self, inputs: Sequence[Tensor], *, direct: bool) -> None:
        """Look up the ids of the other ranks and write the vectors to them; the stream waits for their vectors.

        Args:
            inputs: (G, C) of each storage.
            direct: whether vectors are written directly into the output.
        """
        for step in range(
            1, self.num_ranks
        ):  # ranks start with different targets, so that no link carries all writes at once
            self._lookup(inputs, (self.rank + step) % self.num_ranks, direct)
        self.memory.barrier(_VECTORS)

    def keep_vectors(self, inputs: Sequence[Tensor], *, direct: bool) -> None:
        """Look up the ids that this rank sent to itself."""
        self._lookup(inputs, self.rank, direct)

    def _lookup(self, inputs: Sequence[Tensor], rank: int, direct: bool) -> None:
        out = self._outputs[rank] if direct else self._theirs[rank]
        for shape, rows in zip(self.layout.direct if direct else self.layout.own, inputs, strict=True):
            some = rows[rank * self.size : (rank + 1) * self.size]
            if not some.numel():
                continue
            if shape.is_single:
                gather_rows(shape.storage.weight, some, out, shape.targets, aside=rank != self.rank)
            else:  # pooling reads many times what it writes: it is not bound by the link
                storage = shape.storage
                pool_columns(storage.weight, some, shape.pieces, out, num_rows=storage.null_row)

    def send_gradients(self, gradient: Tensor, factors: Tensor | None) -> None:
        """Write the gradient of the output (B, W) to the ranks that hold the rows, and wait for all ranks."""
        cut_blocks(gradient, self._segments, self.memory.base(self.wire), factors, aside=True)
        self.memory.barrier(_GRADIENTS)

    def rehearse(self, num_columns: int, kind: torch.dtype, factors: Tensor | None) -> None:
        """Run everything once, so that kernels are compiled before a capture. Collective.

        Args:
            num_columns: C.
            kind: type of rows of whole tables.
            factors: as of a batch.
        """
        self.send_ids(torch.zeros(self.size, num_columns, dtype=kind, device=self.device))
        first = [torch.zeros_like(one) for one in self.ids]
        for direct in (False, True) if self.is_direct else (False,):
            self.send_vectors(first, direct=direct)
            self.keep_vectors(first, direct=direct)
        margins = self._margins or Margins(0, 0)
        own = slice(margins.front, margins.front + self._width)
        for dtype in dict.fromkeys((self.wire, torch.float32)):
            whole = torch.zeros(self.size, own.stop + margins.behind, dtype=dtype, device=self.device)
            for gradient in (whole[:, own], whole[:, own].contiguous()):
                self.send_gradients(gradient, factors)

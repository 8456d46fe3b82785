"""Gathers the rows of a batch on the host: each is copied once, from where it was decoded into the packed batch.

Shapes: B rows of the batch, nnz ids of a bag feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch
from viviane.data.buffers import Buffers, Maker, Memory
from viviane.data.packed_layout import PackedLayout
from viviane.data.row_buffer import Jagged, Rows, RowView, take

Source = tuple[RowView, Rows]
"""Decoded rows, and those to copy: a slice, or an array of row numbers."""
Lengths = NDArray[np.int64]  # number of ids of each row


def gather(layout: PackedLayout, sources: Sequence[Source], buffers: Buffers) -> Callable[[str], Batch]:
    """Copy the rows of one or several sources, concatenated; return what creates their batch from its origin.

    Args:
        layout: layout of the batch.
        sources: the rows.
        buffers: memory to copy into.
    """
    counts = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for _, rows in sources]
    spans = [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
    size = sum(counts)
    lengths = {name: [view.bags[name].lengths(rows) for view, rows in sources] for name in layout.bags}
    nnz = {name: sum(int(part.sum()) for part in parts) for name, parts in lengths.items()}
    weighted = {name: any(view.bags[name].weights is not None for view, _ in sources) for name in layout.bags}
    memory = buffers.for_batch(layout.forms(size, nnz, weighted))

    makers: list[Maker] = []
    for number, matrix in enumerate(layout.plain):
        maker, target = memory.new((size, matrix.width), matrix.dtype)
        for (view, rows), span in zip(sources, spans, strict=True):
            take(view.plain[number], rows, target[span])
        makers.append(maker)
    bags = {
        name: _gather_bag([(view.bags[name], rows) for view, rows in sources], spans, dtype, lengths[name], memory)
        for name, dtype in layout.bags.items()
    }

    def batch(origin: str) -> Batch:
        return layout.batch([make() for make in makers], {name: make() for name, make in bags.items()}, origin)

    return batch


def _gather_bag(
    sources: list[tuple[Jagged, Rows]], spans: list[slice], dtype: torch.dtype, lengths: list[Lengths], memory: Memory
) -> Callable[[], Bag]:
    size = spans[-1].stop if spans else 0
    offsets, ends = memory.new((size + 1,), torch.int64)
    ends[0] = 0
    for part, span in zip(lengths, spans, strict=True):
        np.cumsum(part, out=ends[span.start + 1 : span.stop + 1])
        ends[span.start + 1 : span.stop + 1] += ends[span.start]
    weighted = any(bag.weights is not None for bag, _ in sources)
    values, ids = memory.new((int(ends[-1]),), dtype)
    weights, numbers = memory.new(ids.shape, torch.float32) if weighted else (None, None)
    for (bag, rows), span in zip(sources, spans, strict=True):
        inside = slice(int(ends[span.start]), int(ends[span.stop]))
        bag.take(rows, ids[inside], None if numbers is None else numbers[inside])
    return lambda: Bag(values(), offsets(), None if weights is None else weights())

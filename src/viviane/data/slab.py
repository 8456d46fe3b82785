"""Rows copied from their source into new memory, each once, to form a batch.

Shapes: B rows of the batch, L labels, N dense numbers, F one-hot features, nnz ids of a bag feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch, Layout
from viviane.data.block import Jagged, Rows, View, one_hot_type, take
from viviane.data.buffers import ALIGNED, Buffers, Form, Maker, Memory
from viviane.schema import Schema

Part = tuple[View, Rows]
Lengths = NDArray[np.int64]  # number of ids of each row


@dataclass(frozen=True)
class BatchShape:
    """The layout of a schema's batches, looked up once."""

    layout: Layout
    num_labels: int
    num_dense: int
    num_one_hot: int
    ids: torch.dtype
    weighted: bool
    bags: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def of(cls, schema: Schema) -> BatchShape:
        """Return the shape of a schema's batches."""
        return cls(
            Layout.of(schema),
            len(schema.labels),
            schema.num_dense,
            len(schema.one_hot),
            torch.int64 if one_hot_type(schema) is np.int64 else torch.int32,
            schema.sample_weight is not None,
            tuple((column.name, getattr(torch, column.dtype)) for column in schema.bags),
        )

    def can_be_cut(self, rows: int) -> bool:
        """Return whether batches of this many rows can be aligned slices of shared tensors."""
        widths = [self.num_labels, self.num_dense, self.num_one_hot, int(self.weighted)]
        return rows > 0 and not self.bags and all(rows * width * 4 % ALIGNED == 0 for width in widths)


@dataclass(frozen=True)
class Slab:
    """Functions that create the tensors of a batch whose rows are in memory; see `Memory.new`."""

    labels: Maker  # (B, L)
    dense: Maker  # (B, N)
    one_hot: Maker  # (B, F)
    weight: Maker | None  # (B,)
    bags: dict[str, Callable[[], Bag]]

    @classmethod
    def gather(cls, shape: BatchShape, parts: Sequence[Part], buffers: Buffers) -> Slab:
        """Copy selected rows of one or several views, concatenated.

        Args:
            shape: layout of the batch.
            parts: views, and the rows to copy: a slice, or an array of row numbers.
            buffers: memory to copy into.
        """
        counts = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for _, rows in parts]
        size = sum(counts)
        places = [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]

        lengths = {name: [view.bags[name].lengths(rows) for view, rows in parts] for name, _ in shape.bags}
        weighted = {name: any(view.bags[name].weights is not None for view, _ in parts) for name, _ in shape.bags}
        memory = buffers.for_batch(_forms(shape, size, lengths, weighted))

        def matrix(kind: str, width: int, dtype: torch.dtype) -> Maker:
            made, target = memory.new((size, width), dtype)
            for (view, rows), place in zip(parts, places, strict=True):
                take(getattr(view, kind), rows, target[place])
            return made

        weight = None
        if shape.weighted:
            weight, target = memory.new((size,), torch.float32)
            for (view, rows), place in zip(parts, places, strict=True):
                assert view.weight is not None
                target[place] = view.weight[rows]
        return cls(
            matrix("labels", shape.num_labels, torch.float32),
            matrix("dense", shape.num_dense, torch.float32),
            matrix("one_hot", shape.num_one_hot, shape.ids),
            weight,
            {
                name: _bag([(view.bags[name], rows) for view, rows in parts], places, dtype, lengths[name], memory)
                for name, dtype in shape.bags
            },
        )

    def batch(self, shape: BatchShape, origin: str) -> Batch:
        """Return the rows as a batch of views."""
        return Batch(
            layout=shape.layout,
            labels=self.labels(),
            dense=self.dense(),
            one_hot=self.one_hot(),
            bags={name: bag() for name, bag in self.bags.items()},
            weight=None if self.weight is None else self.weight(),
            origin=origin,
        )


def _forms(
    shape: BatchShape, size: int, lengths: Mapping[str, list[Lengths]], weighted: Mapping[str, bool]
) -> Iterator[Form]:
    """Yield the shapes and types of a batch's tensors."""
    if shape.weighted:
        yield (size,), torch.float32
    yield (size, shape.num_labels), torch.float32
    yield (size, shape.num_dense), torch.float32
    yield (size, shape.num_one_hot), shape.ids
    for name, dtype in shape.bags:
        nnz = sum(int(part.sum()) for part in lengths[name])
        yield (size + 1,), torch.int64
        yield (nnz,), dtype
        if weighted[name]:
            yield (nnz,), torch.float32


def _bag(
    parts: list[tuple[Jagged, Rows]], places: list[slice], dtype: torch.dtype, lengths: list[Lengths], memory: Memory
) -> Callable[[], Bag]:
    size = places[-1].stop if places else 0
    offsets, ends = memory.new((size + 1,), torch.int64)
    ends[0] = 0
    for part, place in zip(lengths, places, strict=True):
        np.cumsum(part, out=ends[place.start + 1 : place.stop + 1])
        ends[place.start + 1 : place.stop + 1] += ends[place.start]
    weighted = any(bag.weights is not None for bag, _ in parts)
    values, ids = memory.new((int(ends[-1]),), dtype)
    weights, numbers = memory.new(ids.shape, torch.float32) if weighted else (None, None)
    for (bag, rows), place in zip(parts, places, strict=True):
        inside = slice(int(ends[place.start]), int(ends[place.stop]))
        bag.take(rows, ids[inside], None if numbers is None else numbers[inside])
    return lambda: Bag(values(), offsets(), None if weights is None else weights())

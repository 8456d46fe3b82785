"""Rows taken from where they stand into fresh memory, each once: what becomes a batch.

Shapes: B rows of the batch, L labels, N dense numbers, F one-hot features, nnz ids of a bag feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.data.block import Jagged, Matrix, Rows, View, one_hot_type
from viviane.schema import Schema

Part = tuple[View, Rows]


@dataclass(frozen=True)
class Slab:
    """The parts of a batch."""

    labels: Tensor  # (B, L)
    dense: Tensor  # (B, N)
    one_hot: Tensor  # (B, F)
    weight: Tensor | None  # (B,)
    bags: dict[str, Bag]

    @classmethod
    def gather(cls, schema: Schema, parts: Sequence[Part], pin_memory: bool = False) -> Slab:
        """Copy chosen rows of one view or several, one after another.

        Args:
            schema: of the views.
            parts: views, and which of their rows: a slice, or an array of row numbers.
            pin_memory: copy into page-locked memory, from which a GPU reads on its own.
        """
        counts = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for _, rows in parts]
        size = sum(counts)
        ends = np.cumsum([0, *counts])
        places = [slice(int(start), int(stop)) for start, stop in zip(ends[:-1], ends[1:], strict=True)]
        ids = torch.int64 if one_hot_type(schema) is np.int64 else torch.int32

        def matrix(kind: str, width: int, dtype: torch.dtype) -> Tensor:
            made = torch.empty(size, width, dtype=dtype, pin_memory=pin_memory)
            target = made.numpy()
            for (view, rows), place in zip(parts, places, strict=True):
                _take(getattr(view, kind), rows, target[place])
            return made

        weight = None
        if schema.sample_weight is not None:
            weight = torch.empty(size, dtype=torch.float32, pin_memory=pin_memory)
            for (view, rows), place in zip(parts, places, strict=True):
                assert view.weight is not None
                weight.numpy()[place] = view.weight[rows]
        return cls(
            matrix("labels", len(schema.labels), torch.float32),
            matrix("dense", schema.num_dense, torch.float32),
            matrix("one_hot", len(schema.one_hot), ids),
            weight,
            {
                column.name: _bag(
                    [(view.bags[column.name], rows) for view, rows in parts],
                    places,
                    getattr(torch, column.dtype),
                    pin_memory,
                )
                for column in schema.bags
            },
        )

    def batch(self, layout: Layout, origin: str) -> Batch:
        """Return the rows as a batch, without another copy."""
        return Batch(
            layout=layout,
            labels=self.labels,
            dense=self.dense,
            one_hot=self.one_hot,
            bags=self.bags,
            weight=self.weight,
            origin=origin,
        )


def _take(matrix: Matrix, rows: Rows, out: NDArray[Any]) -> None:
    for first, piece in matrix:
        target = out[:, first : first + piece.shape[1]]
        if isinstance(rows, slice):
            np.copyto(target, piece[rows])
        elif not piece.flags.c_contiguous:
            np.copyto(target, piece[rows])  # np.take would copy all of it first
        elif target.flags.c_contiguous and target.dtype == piece.dtype:
            # mode="clip" skips a second pass over the row numbers; they are a permutation, so nothing is clipped
            np.take(piece, rows, axis=0, mode="clip", out=target)
        else:
            np.copyto(target, np.take(piece, rows, axis=0, mode="clip"))


def _bag(parts: list[tuple[Jagged, Rows]], places: list[slice], dtype: torch.dtype, pin_memory: bool) -> Bag:
    size = places[-1].stop if places else 0
    offsets = torch.empty(size + 1, dtype=torch.int64, pin_memory=pin_memory)
    ends = offsets.numpy()
    ends[0] = 0
    for (bag, rows), place in zip(parts, places, strict=True):
        np.cumsum(bag.lengths(rows), out=ends[place.start + 1 : place.stop + 1])
        ends[place.start + 1 : place.stop + 1] += ends[place.start]
    weighted = any(bag.weights is not None for bag, _ in parts)
    values = torch.empty(int(ends[-1]), dtype=dtype, pin_memory=pin_memory)
    weights = torch.empty(len(values), dtype=torch.float32, pin_memory=pin_memory) if weighted else None
    for (bag, rows), place in zip(parts, places, strict=True):
        inside = slice(int(ends[place.start]), int(ends[place.stop]))
        bag.take(rows, values.numpy()[inside], None if weights is None else weights.numpy()[inside])
    return Bag(values, offsets, weights)

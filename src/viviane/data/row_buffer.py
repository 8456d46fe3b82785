"""Decoded rows, in the matrices of a packed batch: the buffer into which row groups are decoded.

Shapes: R rows of the buffer, nnz ids of a bag feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.data.buffers import Buffers, Memory
from viviane.data.packed_layout import PackedLayout

Rows = slice | NDArray[np.int64]
Columns = tuple[tuple[int, NDArray[Any]], ...]
"""A matrix with R rows in column ranges: the first column of each, and its values, (R, k), of any numeric type."""


@dataclass(frozen=True)
class Jagged:
    """Ids of a bag feature: row r holds values[offsets[r]:offsets[r + 1]]."""

    values: NDArray[Any]  # (nnz,)
    offsets: NDArray[Any]  # (R + 1,), from 0
    weights: NDArray[np.float32] | None = None  # (nnz,)

    def lengths(self, rows: Rows) -> NDArray[np.int64]:
        """Return the number of ids of each selected row."""
        if isinstance(rows, slice):
            ends = self.offsets[rows.start : rows.stop + 1].astype(np.int64, copy=False)
            return ends[1:] - ends[:-1]
        lengths: NDArray[np.int64] = np.subtract(self.offsets[rows + 1], self.offsets[rows], dtype=np.int64)
        return lengths

    def take(self, rows: Rows, values: NDArray[Any], weights: NDArray[np.float32] | None) -> None:
        """Copy the ids of selected rows, concatenated, into `values`, and their weights into `weights`."""
        if isinstance(rows, slice):
            inside: Any = slice(int(self.offsets[rows.start]), int(self.offsets[rows.stop]))
        else:
            lengths = self.lengths(rows)
            ends = np.cumsum(lengths)
            inside = np.repeat(self.offsets[rows] - (ends - lengths), lengths)
            inside += np.arange(len(inside))
        np.copyto(values, self.values[inside])
        if weights is not None:
            assert self.weights is not None
            np.copyto(weights, self.weights[inside])

    @classmethod
    def join(cls, parts: list[Jagged]) -> Jagged:
        """Concatenate the rows of several parts."""
        if len(parts) == 1:
            return parts[0]
        ends = np.cumsum([0, *(part.offsets[-1] for part in parts)])
        offsets = [part.offsets[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
        weights = [part.weights for part in parts if part.weights is not None]
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([np.zeros(1, np.int64), *offsets]),
            np.concatenate(weights) if weights else None,
        )


@dataclass(frozen=True)
class RowView:
    """Rows that can be gathered: in a buffer, or in place in a memory-mapped file.

    Columns may be narrower than in a batch; they are widened when gathered.
    """

    labels: Columns
    dense: Columns
    one_hot: Columns
    weight: NDArray[np.float32] | None
    bags: dict[str, Jagged]

    @cached_property
    def plain(self) -> tuple[Columns, ...]:
        """The columns of the matrices in `PackedLayout.plain`."""
        weight = () if self.weight is None else (((0, self.weight.reshape(-1, 1)),),)
        return (self.labels, self.dense, self.one_hot, *weight)


class RowBuffer:
    """A buffer for a known number of rows, into which row groups are decoded in any order.

    Args:
        layout: the matrices.
        num_rows, num_parts: number of rows, and of the row groups that they come from.
        memory: memory for the plain matrices, in the layout's order; None allocates new memory.
    """

    def __init__(self, layout: PackedLayout, num_rows: int, num_parts: int, memory: Memory | None = None) -> None:
        make = (memory or Buffers(kept_bytes=0)).new
        self.num_rows = num_rows
        self.plain = [make((num_rows, matrix.width), matrix.dtype)[1] for matrix in layout.plain]
        self.labels, self.dense, self.one_hot, *weight = self.plain
        self.weight: NDArray[np.float32] | None = weight[0].reshape(-1) if weight else None
        self.parts: dict[str, list[Jagged | None]] = {name: [None] * num_parts for name in layout.bags}

    def finish(self) -> RowView:
        """Join the bags after all parts have been filled, and return the rows."""
        bags = {name: Jagged.join([part for part in parts if part is not None]) for name, parts in self.parts.items()}
        return RowView(((0, self.labels),), ((0, self.dense),), ((0, self.one_hot),), self.weight, bags)

    def fill(self, view: RowView, start: int, num_rows: int, part: int) -> None:
        """Copy all rows of a view to rows [start, start + num_rows); its bags become part number `part`."""
        rows = slice(start, start + num_rows)
        for matrix, columns in zip(self.plain, view.plain, strict=True):
            take(columns, slice(0, num_rows), matrix[rows])
        for name, bag in view.bags.items():
            self.parts[name][part] = bag

    def take(self, view: RowView, rows: NDArray[np.int64], start: int) -> None:
        """Copy selected rows of a view, without their bags, to rows from `start` on."""
        for matrix, columns in zip(self.plain, view.plain, strict=True):
            take(columns, rows, matrix[start : start + len(rows)])


def take(columns: Columns, rows: Rows, out: NDArray[Any]) -> None:
    """Copy selected rows of a matrix to `out`, converted to its type."""
    for first, values in columns:
        target = out[:, first : first + values.shape[1]]
        if isinstance(rows, slice):
            np.copyto(target, values[rows])
        elif not values.flags.c_contiguous:
            np.copyto(target, values[rows])  # np.take would first copy the complete matrix
        elif target.flags.c_contiguous and target.dtype == values.dtype:
            # mode="clip" skips a second pass over the row numbers; they come from a permutation, so nothing is clipped
            np.take(values, rows, axis=0, mode="clip", out=target)
        else:
            np.copyto(target, np.take(values, rows, axis=0, mode="clip"))

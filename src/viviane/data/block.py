"""Rows in memory, stacked by column kind as in a batch: the buffer into which row groups are decoded.

Shapes: R rows of the block, L labels, N dense values, F one-hot features, nnz ids of a bag feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.data.buffers import Buffers, Memory
from viviane.schema import Schema

Rows = slice | NDArray[np.int64]
Matrix = tuple[tuple[int, NDArray[Any]], ...]
"""Pieces of a matrix with R rows: the first column of each piece, and its columns, (R, k), of any numeric type."""


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
class View:
    """Rows that can be taken in place: from a block, or from a memory-mapped file.

    Columns may be narrower than in a batch; they are widened when taken.
    """

    labels: Matrix
    dense: Matrix
    one_hot: Matrix
    weight: NDArray[np.float32] | None
    bags: dict[str, Jagged]


class Block:
    """A buffer for a known number of rows, filled by row group in any order.

    Args:
        schema: the columns.
        num_rows, num_parts: number of rows, and of the row groups that they come from.
        memory: memory for labels, dense values, ids and weights, in this order; None allocates new memory.
    """

    def __init__(self, schema: Schema, num_rows: int, num_parts: int, memory: Memory | None = None) -> None:
        make = (memory or Buffers(kept_bytes=0)).new
        self.num_rows = num_rows
        _, self.labels = make((num_rows, len(schema.labels)), torch.float32)
        _, self.dense = make((num_rows, schema.num_dense), torch.float32)
        ids = torch.int64 if one_hot_type(schema) is np.int64 else torch.int32
        _, self.one_hot = make((num_rows, len(schema.one_hot)), ids)
        self.weight: NDArray[np.float32] | None = None
        if schema.sample_weight is not None:
            _, self.weight = make((num_rows,), torch.float32)
        self.parts: dict[str, list[Jagged | None]] = {bag.name: [None] * num_parts for bag in schema.bags}

    def finish(self) -> View:
        """Join the bags after all parts have been filled, and return the rows."""
        bags = {name: Jagged.join([part for part in parts if part is not None]) for name, parts in self.parts.items()}
        return View(((0, self.labels),), ((0, self.dense),), ((0, self.one_hot),), self.weight, bags)

    def fill(self, view: View, start: int, num_rows: int, part: int) -> None:
        """Copy all rows of a view to rows [start, start + num_rows); its bags become part number `part`."""
        rows = slice(start, start + num_rows)
        for matrix, pieces in ((self.labels, view.labels), (self.dense, view.dense), (self.one_hot, view.one_hot)):
            for first, piece in pieces:
                np.copyto(matrix[rows, first : first + piece.shape[1]], piece)
        if self.weight is not None and view.weight is not None:
            self.weight[rows] = view.weight
        for name, bag in view.bags.items():
            self.parts[name][part] = bag

    def take(self, view: View, rows: NDArray[np.int64], start: int) -> None:
        """Copy selected rows of a view, without their bags, to rows from `start` on."""
        place = slice(start, start + len(rows))
        for matrix, pieces in ((self.labels, view.labels), (self.dense, view.dense), (self.one_hot, view.one_hot)):
            take(pieces, rows, matrix[place])
        if self.weight is not None and view.weight is not None:
            np.take(view.weight, rows, mode="clip", out=self.weight[place])


def one_hot_type(schema: Schema) -> type[np.signedinteger[Any]]:
    """Return the type of the one-hot matrix: int64 if a column needs it."""
    return np.int64 if any(column.dtype == "int64" for column in schema.one_hot) else np.int32


def take(matrix: Matrix, rows: Rows, out: NDArray[Any]) -> None:
    """Copy selected rows of a matrix to `out`, converted to its type."""
    for first, piece in matrix:
        target = out[:, first : first + piece.shape[1]]
        if isinstance(rows, slice):
            np.copyto(target, piece[rows])
        elif not piece.flags.c_contiguous:
            np.copyto(target, piece[rows])  # np.take would first copy the complete matrix
        elif target.flags.c_contiguous and target.dtype == piece.dtype:
            # mode="clip" skips a second pass over the row numbers; they come from a permutation, so nothing is clipped
            np.take(piece, rows, axis=0, mode="clip", out=target)
        else:
            np.copyto(target, np.take(piece, rows, axis=0, mode="clip"))

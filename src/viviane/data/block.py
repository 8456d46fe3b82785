"""Rows in memory, column kinds stacked as in a batch: the buffer that row groups are decoded into.

Shapes: R rows of the block, L labels, N dense numbers, F one-hot features, nnz ids of a bag feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch, Layout
from viviane.schema import Schema

Rows = slice | NDArray[np.int64]


@dataclass(frozen=True)
class Jagged:
    """Ids of a bag feature: row r holds values[offsets[r]:offsets[r + 1]]."""

    values: NDArray[Any]  # (nnz,)
    offsets: NDArray[np.int64]  # (R + 1,), from 0
    weights: NDArray[np.float32] | None = None  # (nnz,)

    def take(self, rows: Rows) -> Jagged:
        """Return chosen rows: a slice, or an array of row numbers."""
        if isinstance(rows, slice):
            offsets = self.offsets[rows.start : rows.stop + 1]
            inside: Any = slice(offsets[0], offsets[-1])
            weights = None if self.weights is None else self.weights[inside].copy()
            return Jagged(self.values[inside].copy(), offsets - offsets[0], weights)
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        inside = np.repeat(starts - offsets[:-1], lengths)
        inside += np.arange(len(inside))
        weights = None if self.weights is None else self.weights[inside]
        return Jagged(self.values[inside], offsets, weights)

    @classmethod
    def join(cls, parts: list[Jagged]) -> Jagged:
        """Return the rows of several parts, one after another."""
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


class Block:
    """A buffer of a known number of rows; its parts are filled by row group, in any order."""

    def __init__(self, schema: Schema, num_rows: int, num_parts: int) -> None:
        wide = any(column.dtype == "int64" for column in schema.one_hot)
        self.num_rows = num_rows
        self.labels = np.empty((num_rows, len(schema.labels)), np.float32)
        self.dense = np.empty((num_rows, schema.num_dense), np.float32)
        self.one_hot = np.empty((num_rows, len(schema.one_hot)), np.int64 if wide else np.int32)
        self.weight = None if schema.sample_weight is None else np.empty(num_rows, np.float32)
        self.parts: dict[str, list[Jagged | None]] = {bag.name: [None] * num_parts for bag in schema.bags}
        self.bags: dict[str, Jagged] = {}

    def finish(self) -> None:
        """Join the bags, once all parts are there."""
        for name, parts in self.parts.items():
            self.bags[name] = Jagged.join([part for part in parts if part is not None])
        self.parts = {}


@dataclass(frozen=True)
class Slab:
    """Rows taken from a block: fresh memory, ready to become a batch."""

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    one_hot: NDArray[Any]
    weight: NDArray[np.float32] | None
    bags: dict[str, Jagged]

    @classmethod
    def take(cls, block: Block, rows: Rows) -> Slab:
        """Copy chosen rows of a block: each row once."""
        return cls(
            _take(block.labels, rows),
            _take(block.dense, rows),
            _take(block.one_hot, rows),
            None if block.weight is None else _take(block.weight, rows),
            {name: bag.take(rows) for name, bag in block.bags.items()},
        )

    @classmethod
    def join(cls, parts: list[Slab]) -> Slab:
        """Return the rows of several slabs, one after another."""
        if len(parts) == 1:
            return parts[0]
        weights = [part.weight for part in parts if part.weight is not None]
        return cls(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.one_hot for part in parts]),
            np.concatenate(weights) if weights else None,
            {name: Jagged.join([part.bags[name] for part in parts]) for name in parts[0].bags},
        )

    def batch(self, layout: Layout, origin: str) -> Batch:
        """Return the rows as a batch, without another copy."""
        return Batch(
            layout=layout,
            labels=torch.from_numpy(self.labels),
            dense=torch.from_numpy(self.dense),
            one_hot=torch.from_numpy(self.one_hot),
            bags={
                name: Bag(
                    torch.from_numpy(bag.values),
                    torch.from_numpy(bag.offsets),
                    None if bag.weights is None else torch.from_numpy(bag.weights),
                )
                for name, bag in self.bags.items()
            },
            weight=None if self.weight is None else torch.from_numpy(self.weight),
            origin=origin,
        )


def _take(array: NDArray[Any], rows: Rows) -> NDArray[Any]:
    if isinstance(rows, slice):
        return array[rows].copy()
    # mode="clip" skips a second pass over the row numbers; they are a permutation, so nothing is clipped
    return np.take(array, rows, axis=0, mode="clip")

"""Batches whose rows were taken together: they lie one behind another in the tensors of one batch.

What a small batch costs the host is not its bytes. It is a few calls for each matrix, a copy and an event for each
batch, and for each call of a reader's thread a turn at the interpreter's lock, which the thread that launches kernels
needs. Together all of it is done once for several batches, and each of them is a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor

from viviane.batch import Bag, Batch

_Bags = Mapping[str, Bag]
_Part = tuple[Tensor, Tensor, Tensor, Tensor | None, _Bags]
Cut = tuple["Run", int, str]
"""A batch before its tensors are made: its run, its number in it, and where its rows came from, for messages."""


class Run:
    """Several batches of equally many rows in one; the last may have fewer rows.

    Args:
        make: makes a batch of all rows.
        rows: of each batch; None: it is the only one.
        hotness: ids of each bag by column. Without it bags cannot be cut: a batch with bags is the only one.

    Example:
        >>> from viviane.schema import Schema
        >>> whole = Batch.from_columns(Schema(dense=[{"name": "x"}]), {"x": [0, 1, 2]})
        >>> run = Run(lambda: whole, 2)
        >>> [run.batch(number, "here").dense[:, 0].tolist() for number in range(len(run))]
        [[0.0, 1.0], [2.0]]
    """

    def __init__(
        self, make: Callable[[], Batch], rows: int | None = None, hotness: Mapping[str, int] | None = None
    ) -> None:
        self._make, self._rows, self._hotness = make, rows, hotness or {}
        self._whole: Batch | None = None
        self._parts: list[_Part] | None = None

    @property
    def whole(self) -> Batch:
        """All rows."""
        if self._whole is None:  # `cached_property` would take a lock
            self._whole = self._make()
        return self._whole

    def _cut(self) -> list[_Part]:
        if self._parts is None:
            self._parts = self._new_parts()
        return self._parts

    def _new_parts(self) -> list[_Part]:
        whole, rows = self.whole, self._rows
        matrices = (whole.labels, whole.dense, whole.one_hot)
        if rows is None or whole.size <= rows:
            return [(*matrices, whole.weight, whole.bags)]
        # Unlike those of `split`, they count writes each on its own: see `Batch.ready`.
        labels, dense, one_hot = (torch.unsafe_split(matrix, rows) for matrix in matrices)
        weight = [None] * len(labels) if whole.weight is None else torch.unsafe_split(whole.weight, rows)
        bags: list[_Bags] = self._cut_bags(whole.bags, rows) if whole.bags else [{}] * len(labels)
        return list(zip(labels, dense, one_hot, weight, bags, strict=True))

    def _cut_bags(self, bags: _Bags, rows: int) -> list[_Bags]:
        """Cut bags of one number of ids: what row each begins at is the same in every batch."""
        cut: list[list[Bag]] = []
        for name, bag in bags.items():
            values = torch.unsafe_split(bag.values, rows * self._hotness[name])
            weights = [None] * len(values) if bag.weights is None else torch.unsafe_split(bag.weights, len(values[0]))
            sizes = [len(part) // self._hotness[name] for part in values]
            parts = zip(values, weights, sizes, strict=True)
            cut.append([Bag(ids, bag.offsets[: size + 1], one) for ids, one, size in parts])
        return [dict(zip(bags, parts, strict=True)) for parts in zip(*cut, strict=True)]

    def __len__(self) -> int:
        return len(self._cut())

    def batch(self, number: int, origin: str) -> Batch:
        """Return one of the batches."""
        labels, dense, one_hot, weight, bags = self._cut()[number]
        return Batch(self.whole.layout, labels, dense, one_hot, bags, weight, origin)

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU can read the rows on its own: they are in page-locked memory, or on a device."""
        return self.whole.device.type != "cpu" or self.whole.one_hot.is_pinned()

    def to(self, device: torch.device, non_blocking: bool = False) -> Run:
        """Return the run on another device."""
        there = self.whole.to(device, non_blocking)
        return Run(lambda: there, self._rows, self._hotness)

    def move_ahead(self) -> None:
        """Queue, on the current stream, copies of what later runs need; most need none."""

    @classmethod
    def one(cls, batch: Batch) -> Self:
        """Return the run of one batch."""
        return cls(lambda: batch)

    def pin_memory(self) -> Run:
        """Return the run in page-locked host memory."""
        return Run(self.whole.pin_memory, self._rows, self._hotness)

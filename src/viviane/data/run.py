"""Runs: consecutive batches whose rows are stored together in the tensors of one batch.

The host's cost of a small batch is not its bytes but a few calls per matrix, a copy and an event per batch, and, for
each call of a reader thread, the GIL, which the thread that launches kernels needs. A run pays these once for several
batches; each batch is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self, TypeVar

import torch
from torch import Tensor

from viviane.batch import Bag, Batch

_SPLIT_TOGETHER: Final = (
    16  # batches split per call: one call for several is cheaper, and the GPU does not wait for more
)
_Bags = Mapping[str, Bag]
_Part = tuple[Tensor, Tensor, Tensor, Tensor | None, _Bags]
_T = TypeVar("_T", Tensor, Tensor | None)
PendingBatch = tuple["Run", int, str]
"""A batch whose tensors do not exist yet: its run, its index in the run, and the origin of its rows, for messages."""


class Run:
    """Several batches of the same number of rows in one; the last may have fewer rows.

    Args:
        make: creates a batch of all rows.
        rows: rows of each batch; None: there is only one.
        hotness: ids per row by bag column. Without it bags cannot be split: a batch with bags must be the only one.

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
        self._parts: list[_Part] = []
        self._first = -1  # index of the first batch in `_parts`

    @property
    def whole(self) -> Batch:
        """All rows."""
        if self._whole is None:  # `cached_property` would take a lock
            self._whole = self._make()
        return self._whole

    def __len__(self) -> int:
        return 1 if self._rows is None else max(1, -(-self.whole.size // self._rows))

    def batch(self, number: int, origin: str) -> Batch:
        """Return one batch."""
        first = number // _SPLIT_TOGETHER * _SPLIT_TOGETHER
        if first != self._first:
            self._parts, self._first = self._split(first), first
        labels, dense, one_hot, weight, bags = self._parts[number - first]
        return Batch(self.whole.layout, labels, dense, one_hot, bags, weight, origin)

    def _split(self, number: int) -> list[_Part]:
        """Split some batches, starting with this one."""
        whole, rows = self.whole, self._rows
        matrices = (whole.labels, whole.dense, whole.one_hot)
        if rows is None or whole.size <= rows:
            return [(*matrices, whole.weight, whole.bags)]
        first, last = number * rows, min(whole.size, (number + _SPLIT_TOGETHER) * rows)
        labels, dense, one_hot = (_split_rows(matrix, first, last, rows) for matrix in matrices)
        weight = _split_rows(whole.weight, first, last, rows)
        bags: list[_Bags] = [{}] * len(labels)
        if whole.bags:
            parts_of_bags = [self._split_bag(name, bag, first, last, rows) for name, bag in whole.bags.items()]
            bags = [dict(zip(whole.bags, parts, strict=True)) for parts in zip(*parts_of_bags, strict=True)]
        return list(zip(labels, dense, one_hot, weight, bags, strict=True))

    def _split_bag(self, name: str, bag: Bag, first: int, last: int, rows: int) -> list[Bag]:
        """Split a bag of constant hotness: all batches have the same offsets."""
        hotness = self._hotness[name]
        values = _split_rows(bag.values, first * hotness, last * hotness, rows * hotness)
        weights = _split_rows(bag.weights, first * hotness, last * hotness, rows * hotness)
        offsets = [bag.offsets[: rows + 1]] * len(values)
        if (last - first) % rows:
            offsets[-1] = bag.offsets[: (last - first) % rows + 1]
        return [Bag(*parts) for parts in zip(values, offsets, weights, strict=True)]

    @property
    def is_pinned(self) -> bool:
        """Whether the rows are in page-locked memory or on a device, so that copies can be asynchronous."""
        return self.whole.device.type != "cpu" or self.whole.one_hot.is_pinned()

    def to(self, device: torch.device, non_blocking: bool = False) -> Run:
        """Return the run on another device."""
        there = self.whole.to(device, non_blocking)
        return Run(lambda: there, self._rows, self._hotness)

    def copy_ahead(self) -> None:
        """Queue, on the current stream, copies that later runs need; by default none."""

    @classmethod
    def one(cls, batch: Batch) -> Self:
        """Return the run of one batch."""
        return cls(lambda: batch)

    def pin_memory(self) -> Run:
        """Return the run in page-locked host memory."""
        return Run(self.whole.pin_memory, self._rows, self._hotness)


def _split_rows(tensor: _T, first: int, last: int, size: int) -> Sequence[_T]:
    """Split rows [first, last) of a tensor into parts of this size."""
    if tensor is None:
        return [tensor] * -(-(last - first) // size)
    # Unlike the views of `split`, these have separate version counters: see `Batch.ready`.
    return torch.unsafe_split(tensor[first:last], size)

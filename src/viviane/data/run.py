"""Batches whose rows were taken together: they lie one behind another in the tensors of one batch.

What a small batch costs the host is not its bytes. It is a few calls for each matrix, a copy and an event for each
batch, and for each call of a reader's thread a turn at the interpreter's lock, which the thread that launches kernels
needs. Together all of it is done once for several batches, and each of them is a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from viviane.batch import Batch

_Part = tuple[Tensor, Tensor, Tensor, Tensor | None]
Cut = tuple["Run", int, str]
"""A batch before its tensors are made: its run, its number in it, and where its rows came from, for messages."""


class Run:
    """Several batches of equally many rows in one; the last may have fewer rows.

    Args:
        make: makes a batch of all rows. Bags cannot be cut: with bags it is the only one.
        rows: of each batch; None: it is the only one.

    Example:
        >>> from viviane.schema import Schema
        >>> whole = Batch.from_columns(Schema(dense=[{"name": "x"}]), {"x": [0, 1, 2]})
        >>> run = Run(lambda: whole, 2)
        >>> [run.batch(number, "here").dense[:, 0].tolist() for number in range(len(run))]
        [[0.0, 1.0], [2.0]]
    """

    def __init__(self, make: Callable[[], Batch], rows: int | None = None) -> None:
        self._make, self._rows = make, rows
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
            return [(*matrices, whole.weight)]
        # Unlike those of `split`, they count writes each on its own: see `Batch.ready`.
        labels, dense, one_hot = (torch.unsafe_split(matrix, rows) for matrix in matrices)
        weight = [None] * len(labels) if whole.weight is None else torch.unsafe_split(whole.weight, rows)
        return list(zip(labels, dense, one_hot, weight, strict=True))

    def __len__(self) -> int:
        return len(self._cut())

    def batch(self, number: int, origin: str) -> Batch:
        """Return one of the batches."""
        labels, dense, one_hot, weight = self._cut()[number]
        whole = self.whole
        return Batch(whole.layout, labels, dense, one_hot, whole.bags, weight, origin)

    def to(self, device: torch.device, non_blocking: bool = False) -> Run:
        """Return the run on another device."""
        there = self.whole.to(device, non_blocking)
        return Run(lambda: there, self._rows)

    @classmethod
    def one(cls, batch: Batch) -> Self:
        """Return the run of one batch."""
        return cls(lambda: batch)

    def pin_memory(self) -> Run:
        """Return the run in page-locked host memory."""
        return Run(self.whole.pin_memory, self._rows)

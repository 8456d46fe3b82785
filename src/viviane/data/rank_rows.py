"""The rows of one rank, in each batch and in each window; a rank copies only these rows to its device.

Ranks share every batch, so any row of a window may belong to any rank; the permutation decides which. Each rank copies
its own rows in the order of the files, and its permutation indexes these rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.data.buffers import Buffers
from viviane.data.plan import Window

Span = tuple[int, int]
"""Rows [first, last) of a window's order."""


class BatchRanges:
    """The row ranges of one process in the stream, batch by batch; a lazy sequence, since there may be millions.

    Args:
        first_row: first row of the first batch.
        last_row: end of the last batch.
        batch_size: rows of a batch, over all processes.
        share: (r, n): of a batch of B rows, r has rows B r // n to B (r + 1) // n.

    Example:
        >>> ranges = BatchRanges(4, 15, 8, (1, 2))
        >>> [ranges[number] for number in range(len(ranges))]
        [(8, 12), (13, 15)]
        >>> ranges.spans(Window(0, 9, 6, ()))
        [(0, 3), (4, 6)]
    """

    def __init__(self, first_row: int, last_row: int, batch_size: int, share: tuple[int, int]) -> None:
        self._starts = range(first_row, last_row, batch_size)
        self._first_row, self._last_row, self._batch_size = first_row, last_row, batch_size
        self._rank, self._ranks = share

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Span:
        start = self._starts[number]
        size = min(self._batch_size, self._last_row - start)
        return start + size * self._rank // self._ranks, start + size * (self._rank + 1) // self._ranks

    def some(self, first: int, last: int) -> list[Span]:
        """Return the ranges of batches [first, last), as far as they exist."""
        return [self[number] for number in range(max(0, first), min(last, len(self)))]

    def within(self, window: Window) -> Iterator[Span]:
        """Yield the ranges of this process's rows in a window's order, batch by batch."""
        end = window.start + window.num_rows
        first = max(0, (window.start - self._first_row) // self._batch_size)
        for number in range(first, len(self)):
            if self._starts[number] >= end:
                return
            start, stop = self[number]
            if max(start, window.start) < min(stop, end):
                yield max(start, window.start) - window.start, min(stop, end) - window.start

    def spans(self, window: Window) -> list[Span] | None:
        """Return the same ranges merged into as few spans as possible; None if one process has all rows."""
        if self._ranks == 1:
            return None
        found: list[Span] = []
        for first, last in self.within(window):
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], last
            else:
                found.append((first, last))
        return found


@dataclass(frozen=True)
class RankOrder:
    """The order of the rows that a rank keeps.

    Args:
        order: (n,), int32: index of each row among the kept rows.
        rows: per row group: indices of the kept rows, ascending; None: all rows of every group.
    """

    order: Tensor
    rows: list[NDArray[np.int64]] | None = None


class WindowRows:
    """A window of which a rank keeps some rows.

    Args:
        window: the row groups.
        spans: spans of the window's order whose rows are kept; None: all rows.

    Attributes:
        num_rows: number of kept rows.
        order: order of the window.

    Example:
        >>> rows = WindowRows(Window(0, 0, 9, ()), [(2, 4), (7, 9)])
        >>> rows.num_rows, rows.places([(3, 4), (7, 8)])
        (4, [(1, 3)])
    """

    def __init__(self, window: Window, spans: Sequence[Span] | None) -> None:
        self.window = window
        self.order: Future[RankOrder] | None = None
        self._is_whole = spans is None
        spans = [(0, window.num_rows)] if spans is None else spans
        self._firsts = [first for first, _ in spans]
        *self._before, self.num_rows = accumulate((last - first for first, last in spans), initial=0)

    def places(self, spans: Sequence[Span]) -> list[Span]:
        """Return the ranges of spans of the window's order, in ascending order, among the kept rows.

        Spans that only rows of other ranks separate are merged.
        """
        found: list[Span] = []
        for first, last in spans:
            number = bisect_right(self._firsts, first) - 1
            place = self._before[number] + first - self._firsts[number]
            if found and found[-1][1] == place:
                found[-1] = found[-1][0], place + last - first
            else:
                found.append((place, place + last - first))
        return found

    def kept(self, part: int) -> NDArray[np.int64] | None:
        """Return the indices of a row group's kept rows, ascending; None: all. It may wait for the order."""
        if self._is_whole:
            return None  # the order is not needed
        assert self.order is not None
        rows = self.order.result().rows
        return None if rows is None else rows[part]

    def num_kept(self, part: int) -> int:
        """Return the number of kept rows of a row group."""
        rows = self.kept(part)
        return self.window.groups[part].num_rows if rows is None else len(rows)

    def start(self, part: int) -> int:
        """Return the number of kept rows in the preceding row groups."""
        return sum(self.num_kept(before) for before in range(part))


def rank_order(
    order: NDArray[np.int64],
    window: Window,
    spans: Sequence[Span] | None,
    memory: Buffers,
    pin_memory: bool = False,
) -> RankOrder:
    """Return the kept rows of a window, and their order in the narrowest type, since it is copied to a device.

    Args:
        order: order of all rows of the window.
        window: the row groups.
        spans: spans of the order whose rows are kept; None: all.
        memory: memory for temporary arrays.
        pin_memory: store the new order in page-locked memory.

    Example:
        >>> from viviane.data.plan import RowGroup
        >>> window = Window(0, 0, 4, (RowGroup(0, 0, 0, 3), RowGroup(0, 1, 3, 1)))
        >>> found = rank_order(np.array([3, 0, 2, 1]), window, [(0, 1), (2, 3)], Buffers())
        >>> found.order.tolist(), [rows.tolist() for rows in found.rows]
        ([1, 0], [[2], [0]])
    """
    if spans is None:
        made = torch.empty(len(order), dtype=torch.int32, pin_memory=pin_memory)
        np.copyto(made.numpy(), order, casting="same_kind")
        return RankOrder(made)
    wanted = np.concatenate([order[:0], *(order[first:last] for first, last in spans)])
    _, places = memory.new((len(order),), torch.int32)
    places[:] = 0
    places[wanted] = 1
    rows = np.flatnonzero(places)
    np.cumsum(places, out=places)  # for a kept row, its index among the kept rows plus one
    made = torch.empty(len(wanted), dtype=torch.int32, pin_memory=pin_memory)
    np.subtract(places[wanted], 1, out=made.numpy())
    begins = list(accumulate((group.num_rows for group in window.groups), initial=0))
    cuts = np.searchsorted(rows, begins).tolist()
    pairs = zip(pairwise(cuts), begins, strict=False)
    return RankOrder(made, [rows[first:last] - begin for (first, last), begin in pairs])

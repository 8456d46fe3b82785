"""The order of an epoch, determined before rows are read.

Row groups are put in random order and gathered into windows of at least `shuffle_rows` rows; the rows of a
window are permuted. The stream of rows is the concatenation of the windows, split into batches of B rows, so a
batch may span windows. Everything is a function of (row counts, seed, epoch, shuffle_rows), independent of
time and threads. Any batch can be located without decoding the ones before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.seeds import derive_seed

_STRIDE: Final = 4096


@dataclass(frozen=True)
class RowGroup:
    """One row group: `num_rows` rows from row `first_row` on in file number `file`."""

    file: int
    index: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Window:
    """Row groups whose rows are shuffled together; they form rows [start, start + num_rows) of the stream."""

    number: int
    start: int
    num_rows: int
    groups: tuple[RowGroup, ...]


class EpochPlan:
    """The source of every row of an epoch.

    Args:
        groups: the data set's row groups in the order of files.
        shuffle_rows: minimum rows of a window; None keeps the order of the files.
        seed, epoch: determine the permutation.

    Example:
        >>> plan = EpochPlan([RowGroup(0, 0, 0, 3), RowGroup(0, 1, 3, 2)], shuffle_rows=None, seed=0, epoch=0)
        >>> [(window.start, window.num_rows) for window in plan.windows]
        [(0, 3), (3, 2)]
    """

    def __init__(self, groups: Sequence[RowGroup], shuffle_rows: int | None, seed: int, epoch: int) -> None:
        self.shuffled = shuffle_rows is not None
        self._groups, self._shuffle_rows = groups, shuffle_rows
        self._seed = seed
        self.epoch = epoch
        ordered = [group for group in groups if group.num_rows]
        if self.shuffled:
            order = self._random("groups").permutation(len(ordered))
            ordered = [ordered[i] for i in order]
        self.windows: list[Window] = []
        start, rows, members = 0, 0, list[RowGroup]()
        for group in ordered:
            members.append(group)
            rows += group.num_rows
            if rows >= (shuffle_rows or 1):
                self.windows.append(Window(len(self.windows), start, rows, tuple(members)))
                start, rows, members = start + rows, 0, []
        if members:
            self.windows.append(Window(len(self.windows), start, rows, tuple(members)))
            start += rows
        self.num_rows = start
        self._starts = [window.start for window in self.windows]

    def _random(self, *names: str | int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(derive_seed(self._seed, "reader", self.epoch, *names)))

    def following(self) -> EpochPlan:
        """Return the order of the next epoch."""
        return EpochPlan(self._groups, self._shuffle_rows, self._seed, self.epoch + 1)

    def permutation(self, window: Window, out: NDArray[np.int64] | None = None) -> NDArray[np.int64] | None:
        """Return the order of a window's rows, (num_rows,), or None if they keep their order.

        Args:
            out: array to write the result to.
        """
        if not self.shuffled:
            return None
        order = np.empty(window.num_rows, np.int64) if out is None else out
        _number(order)
        self._random("rows", window.number).shuffle(order)
        return order

    def pieces(self, start: int, stop: int) -> list[tuple[Window, int, int]]:
        """Return the (window, first, last + 1) that form rows [start, stop) of the stream."""
        found = []
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            window = self.windows[number]
            end = min(stop, window.start + window.num_rows)
            found.append((window, start - window.start, end - window.start))
            start, number = end, number + 1
        return found


def _number(places: NDArray[np.int64]) -> None:
    """Write 0, 1, 2, ... without the GIL, which `numpy.arange` holds while it writes."""
    whole = len(places) // _STRIDE * _STRIDE
    rows = places[:whole].reshape(-1, _STRIDE)
    np.add(np.arange(0, whole, _STRIDE)[:, None], np.arange(_STRIDE), out=rows)
    places[whole:] = np.arange(whole, len(places))

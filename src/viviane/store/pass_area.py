"""Positions of rows in a file, where rows that the same later pass needs lie beside each other behind all others."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.ops.hash_table import reserved
from viviane.store.row_layout import Found, Keys

_MOST_POSITIONS: Final = (1 << 31) - 2


class PassArea:
    """Positions of the rows of a file: id i stands at position i, or in an extent behind all ids.

    An extent holds rows that one later pass needs, in the order of their ids. It is free again when each of its rows
    was written somewhere else. Rows find no extent where the area would become twice as large as the part of the ids;
    extents take disk only where rows were written.

    Memory: 4 bytes for each row that was in an extent.

    Args:
        num_ids: of the file.
        extent_rows: positions in an extent.

    Example:
        >>> area = PassArea(100, 8)
        >>> parts = area.allocate(np.array([3, 50, 60]), np.array([1, 0, 1]))
        >>> [(position, places.tolist()) for position, places in parts]
        [(104, [1]), (112, [0, 2])]
        >>> area.positions(np.array([3, 4, 60])).tolist()
        [112, 4, 113]
        >>> area.release(np.array([3])); area.positions(np.array([3])).tolist()
        [3]
    """

    def __init__(self, num_ids: int, extent_rows: int) -> None:
        self.extent_rows = extent_rows
        self._before = -(-num_ids // extent_rows)
        self._most = max(0, min(2 * self._before + 64, _MOST_POSITIONS // extent_rows))
        self._place_of: NDArray[np.int32] = reserved(num_ids, torch.int32).numpy()
        """For each id, 1 + its position counted from the first extent; 0: its row is at the position of its id."""
        self._in_use = np.zeros(self._most, np.int64)
        self._begun = 0
        self._free: list[int] = []

    def positions(self, ids: Keys) -> NDArray[np.int64]:
        """Return the position of each id."""
        places = self._place_of[ids].astype(np.int64)
        return np.where(places > 0, places - 1 + self._before * self.extent_rows, ids)

    def release(self, ids: Keys) -> None:
        """Let distinct ids stand at their own positions again."""
        places = self._place_of[ids]
        there = places > 0
        if not there.any():
            return
        counts = np.bincount((places[there] - 1) // self.extent_rows, minlength=len(self._in_use))
        self._in_use -= counts
        for extent in np.flatnonzero((counts > 0) & (self._in_use == 0)).tolist():
            heappush(self._free, extent)
        self._place_of[ids[there]] = 0

    def allocate(self, ids: Keys, later: NDArray[np.integer]) -> list[tuple[int, NDArray[np.int64]]]:
        """Give distinct, rising ids that stand at their own positions places in extents.

        Args:
            ids: (n,).
            later: (n,), of each the number of the pass that needs it; -1: none, it stays.

        Returns:
            of each extent its first position, and the places in `ids` of the rows that follow each other from there.
        """
        order = np.argsort(later, kind="stable")
        order = order[np.searchsorted(later[order], 0) :]
        breaks = np.flatnonzero(np.diff(later[order])) + 1
        found: list[tuple[int, NDArray[np.int64]]] = []
        for first, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(order)], strict=True):
            for low in range(first, stop, self.extent_rows):
                extent = self._next_extent()
                if extent < 0:
                    return found
                own = order[low : min(low + self.extent_rows, stop)]
                self._in_use[extent] = len(own)
                self._place_of[ids[own]] = np.arange(1, len(own) + 1) + extent * self.extent_rows
                found.append(((self._before + extent) * self.extent_rows, own))
        return found

    def stands_apart(self, ids: Keys) -> Found:
        """Return which ids stand in extents."""
        found: Found = self._place_of[ids] > 0
        return found

    def _next_extent(self) -> int:
        if self._free:
            return heappop(self._free)
        if self._begun == self._most:
            return -1
        self._begun += 1
        return self._begun - 1

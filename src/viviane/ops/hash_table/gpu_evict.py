"""Which keys of a full index on a GPU go first: the exact order of `KeyIndex`, over all rows.

By "stamp" an order lasts: stamps only rise, so that a list of all rows sorted once stays right but for rows used since,
which are passed over when their turn comes. A list (16 bytes a row) serves until it is used up. The other orders change
with every call, and are sorted for each that evicts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.hash_table.index import CLOCK_BITS, KeyIndex

_MOST_USES = (1 << CLOCK_BITS) - 1
_SPARE = 1024


class Victims:
    """Chooses the rows whose keys are evicted.

    Args:
        index: whose rows.
    """

    def __init__(self, index: KeyIndex) -> None:
        self._index = index
        self._rows: Tensor | None = None
        self._stamps = index.stamps[:0]
        self._next = 0

    def take(self, count: int, guard: int, num_rows: int) -> Tensor:
        """Return the rows of the `count` keys that go first, or as many as there are with stamps below guard.

        Args:
            count: how many.
            guard: see `KeyIndex.insert`.
            num_rows: rows allocated so far.
        """
        if self._index.order != "stamp":
            return self._sorted(guard, num_rows)[0][:count]
        found = self._from_list(count, guard)
        if found is None:
            self._rows, self._stamps = self._sorted(guard, num_rows)
            self._next = 0
            found = self._from_list(count, guard)
        if found is None:
            found, self._rows = self._rows, None
        assert found is not None
        return found

    def _from_list(self, count: int, guard: int) -> Tensor | None:
        """Take from the list; None where it has not as many."""
        window = 2 * count + _SPARE
        while self._rows is not None and self._next < len(self._rows):
            rows = self._rows[self._next : self._next + window]
            stamps = self._stamps[self._next : self._next + window]
            unused = (self._index.stamps[rows] == stamps) & (stamps < guard)
            places = unused.nonzero().squeeze(1)
            if len(places) >= count:
                self._next += int(places[count - 1]) + 1
                return rows[places[:count]]
            if self._next + window >= len(self._rows):
                return None
            window *= 4
        return None

    def _sorted(self, guard: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the rows with stamps below guard in the order of going, and their stamps."""
        index = self._index
        stamps = index.stamps[:num_rows]
        rows = ((stamps >= 0) & (stamps < guard)).nonzero().squeeze(1)
        stamps = stamps[rows]
        score = stamps
        if index.order != "stamp" and index.uses is not None:
            uses = index.uses[rows]
            score = uses if index.order == "uses" else (stamps & ~_MOST_USES) + uses.clamp_max(_MOST_USES)
        if len(rows):
            least, most = score.aminmax()
            if int(most) - int(least) < 2**31:
                score = (score - least).to(torch.int32)  # half as many passes
        order = score.sort(stable=True).indices
        return rows[order], stamps[order]

"""Which rows have changed since a time: what an incremental checkpoint holds."""

from __future__ import annotations

import torch
from torch import Tensor


class ChangedMarks:
    """A bit a row, in one byte, on the device of the rows; marked inside of recorded steps too.

    Args:
        num_rows: of all tables together.
        device: of the rows that are marked.

    Example:
        >>> marks = ChangedMarks(6, torch.device("cpu"))
        >>> marks.mark(torch.tensor([4, 2, 4]))
        >>> marks.rows(2, 6).tolist()
        [0, 2]
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._marks = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def mark(self, rows: Tensor) -> None:
        """Note that rows have changed, repeated as they are."""
        self._marks.index_fill_(0, rows.to(torch.int64), True)  # indexing would copy True to the device in a capture

    def mark_range(self, start: int, stop: int) -> None:
        """Note that all rows from `start` on and below `stop` have changed."""
        self._marks[start:stop] = True

    def rows(self, start: int, stop: int) -> Tensor:
        """Return which rows of a range have changed, rising, counted from its start; int64 on the host."""
        return self._marks[start:stop].nonzero().view(-1).cpu()

    def grow(self, num_rows: int) -> None:
        """Make room for at least `num_rows` rows; the new ones have not changed."""
        have = len(self._marks)
        if num_rows > have:
            grown = torch.zeros(max(num_rows, 2 * have), dtype=torch.bool, device=self._marks.device)
            grown[:have] = self._marks
            self._marks = grown

    def are_marked(self, start: int, stop: int) -> Tensor:
        """Return of each row of a range whether it has changed, (stop - start,), bool; a view."""
        return self._marks[start:stop]

    def clear(self) -> None:
        """Take all rows as unchanged from now on."""
        self._marks.zero_()

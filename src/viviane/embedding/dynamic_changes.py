"""Which rows of a dynamic table have changed since a time: what an increment of it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.embedding.changed_marks import ChangedMarks
from viviane.ops.hash_table import KeyIndex

_CLOCK = 0xFFFFFFFF
_NONE = 1  # marks before those of the rows: of entries without a row


class DynamicChanges:
    """Rows that were used in training or got another key, by the time in their stamp, and rows that were marked.

    Every lookup in training and every insertion stamps its rows, so that these cost nothing; what changes rows without
    a use is marked. A row that was given back is not among them: the list of free rows tells of it.

    Args:
        device: of the table.

    Example:
        >>> from viviane.ops.hash_table import make_index
        >>> index, changes = make_index(8), DynamicChanges(torch.device("cpu"))
        >>> _ = index.insert(torch.tensor([50, 60]), torch.tensor([-1, -1]), torch.arange(2), stamp=1)
        >>> changes.follow(clock=1, held=None)
        >>> _ = index.touch(torch.tensor([60]), stamp=2)
        >>> changes.rows(index).tolist()
        [1]
    """

    def __init__(self, device: torch.device) -> None:
        self._marks = ChangedMarks(_NONE, device)
        self._since: int | None = None

    def follow(self, clock: int, held: int | None) -> None:
        """Forget what changed before.

        Args:
            clock: of the table at present.
            held: stamp of the first lookup whose rows wait for an update, which changes them later; None: none waits.
        """
        self._since = clock if held is None else (held & _CLOCK) - 1
        self._marks.clear()

    def stop(self) -> None:
        """Take all rows as changed until `follow`: the content was replaced, with the times in it."""
        self._since = None

    def mark(self, rows: Tensor, capacity: int) -> None:
        """Note that rows have changed, repeated as they are; what is not 0 <= row < capacity is passed over."""
        if self._since is not None:
            self._marks.grow(_NONE + capacity)
            own = (rows >= 0) & (rows < capacity)
            self._marks.mark(torch.where(own, rows + _NONE, 0))

    def rows(self, index: KeyIndex) -> Tensor | None:
        """Return the rows with keys that have changed, rising, int64, on the device; None: all may have."""
        if self._since is None:
            return None
        self._marks.grow(_NONE + index.num_rows)
        rows = index.rows_in_use()
        marked = self._marks.are_marked(_NONE, _NONE + index.num_rows)[rows]
        return rows[((index.stamps[rows] & _CLOCK) > self._since) | marked]

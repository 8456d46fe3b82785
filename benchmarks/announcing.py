"""Batches that a training cache knows ahead, in loops that time it."""

from __future__ import annotations

from collections.abc import Callable

AHEAD = 3
"""Batches that are announced before their step, besides the next one, as many as `fit` announces."""


class Announcements:
    """Announces the batches of a loop in order, each once, as far ahead as the cache takes them.

    Args:
        announce: takes a batch's number; returns False if the cache takes no more now.

    Example:
        >>> queue = Announcements(lambda i: i < 5)
        >>> queue.up_to(3), queue.up_to(9)
        (3, 5)
    """

    def __init__(self, announce: Callable[[int], bool]) -> None:
        self._announce, self._next = announce, 0

    def up_to(self, stop: int) -> int:
        """Announce the batches below `stop` that have not been; returns the number of the next one."""
        while self._next < stop and self._announce(self._next):
            self._next += 1
        return self._next

    def trained(self, number: int) -> None:
        """Leave a batch out whose step came before the cache took it."""
        self._next = max(self._next, number + 1)

"""A lease: rows of a batch stay in a cache until its step is over or nothing refers to the batch any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class RowLease:
    """Rows of a batch stay in the cache as long as this object lives, or until the step that moves them.

    Args:
        live: stamps in use and how many leases each has.
        stamp: of the batch.
        arrive: waits for its rows.
        slots: (N,), that the batch was given.

    Example:
        >>> live = {}
        >>> lease = RowLease(live, 7, lambda: None, np.zeros(1, np.int64))
        >>> live, lease.is_live
        ({7: 1}, True)
        >>> lease.end(); live, lease.is_live
        ({}, False)
    """

    def __init__(
        self, live: dict[int, int], stamp: int, arrive: Callable[[], None], slots: NDArray[np.integer]
    ) -> None:
        live[stamp] = live.get(stamp, 0) + 1
        self.stamp, self.arrive, self.slots = stamp, arrive, slots
        self._end = weakref.finalize(self, _end_lease, live, stamp)
        self._end.atexit = False

    @property
    def is_live(self) -> bool:
        """Whether the rows stay."""
        return self._end.alive

    def end(self) -> None:
        """Let the rows go."""
        self._end()


def _end_lease(live: dict[int, int], stamp: int) -> None:
    live[stamp] -= 1
    if not live[stamp]:
        del live[stamp]

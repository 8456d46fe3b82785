"""The slots of a batch, and a lease: its rows stay in a cache until its step is over or nothing refers to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Admitted:
    """The slots of a batch.

    Args:
        slots: (N,), of the type of the rows.
        arrive: lets lookups wait for the rows.
        settle: returns when it is known whether all rows got slots; raises CacheFullError where they did not.
        host_slots: (N,), the same in host memory; None: the host does not know them.
    """

    slots: Tensor
    arrive: Callable[[], None]
    settle: Callable[[], None]
    host_slots: NDArray[Any] | None = None


class RowLease:
    """Rows of a batch stay in the cache as long as this object lives, or until the step that moves them.

    Args:
        live: stamps in use and how many leases each has.
        stamp: of the batch.
        batch: its slots.

    Example:
        >>> import torch
        >>> live, batch = {}, Admitted(torch.zeros(1), lambda: None, lambda: None)
        >>> lease = RowLease(live, 7, batch)
        >>> live, lease.is_live
        ({7: 1}, True)
        >>> lease.end(); live, lease.is_live
        ({}, False)
    """

    def __init__(self, live: dict[int, int], stamp: int, batch: Admitted) -> None:
        live[stamp] = live.get(stamp, 0) + 1
        self.stamp, self.arrive, self.settle, self.host_slots = stamp, batch.arrive, batch.settle, batch.host_slots
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

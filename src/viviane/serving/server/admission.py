"""Which requests a server takes: how many at once, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final, Protocol

from pydantic import Field

from viviane.config.base import Settings
from viviane.serving.server.status import RequestError, Status

_TICK_S: Final = 0.05


class QueueLimits(Settings):
    """How many requests may wait.

    Args:
        max_queued: requests that may wait; more are refused with 429 or UNAVAILABLE.
        max_queued_rows: their rows. A request that finds nobody waiting is taken whatever its size.
    """

    max_queued: int = Field(default=256, ge=1)
    max_queued_rows: int = Field(default=262_144, ge=1)

    def is_full(self, waiting: int, waiting_rows: int, num_rows: int = 1) -> bool:
        """Return whether a request of so many rows is one too many.

        Example:
            >>> QueueLimits(max_queued=2, max_queued_rows=10).is_full(1, 8, 3)
            True
        """
        return waiting >= self.max_queued or (waiting > 0 and waiting_rows + num_rows > self.max_queued_rows)


class Backlog:
    """Requests of one queue between their arrival and their answers.

    Where the event loop is slower than the model, requests wait to be parsed, not in the queue. So requests that
    arrived whole are counted before they are parsed, and those that nobody computes are held to the queue's limit.

    Args:
        limits: of the queue.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._arrived = 0
        self.computing = 0
        """Requests that are being computed; changed by the queue's threads under its lock."""

    def enter(self) -> None:
        """Count a request that has arrived; called by the event loop's thread alone."""
        self._arrived += 1

    def leave(self) -> None:
        """Count the answer of a request that entered, or the end of its connection."""
        self._arrived -= 1

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait, parsed or not, as the queue may hold."""
        return self._arrived - self.computing >= self._limits.max_queued


class Queue(Protocol):
    """Requests that wait for the same model or recommender."""

    backlog: Backlog

    @property
    def queued(self) -> int:
        """Requests that wait."""
        ...

    @property
    def keeps_busy(self) -> int:
        """With fewer waiting requests than this, there would soon be nothing to do."""
        ...

    def is_full(self, num_rows: int = 1) -> bool:
        """Whether a request of so many rows is refused."""
        ...


def overloaded(queued: int, queued_rows: int | None = None) -> RequestError:
    """Return the error of a request that is one too many."""
    rows = "" if queued_rows is None else f" of {queued_rows} rows"
    value = f"{queued} requests{rows} wait"
    return RequestError(Status.OVERLOADED, "too many requests wait", value=value, fix="try again later")


class Admission:
    """Counts requests in progress, and how far the event loop is behind.

    Args:
        max_concurrent: requests in progress at once.
        max_lag_ms: the event loop may be so far behind: requests wait outside of any queue then.
    """

    def __init__(self, max_concurrent: int, max_lag_ms: float) -> None:
        self._max_concurrent, self._max_lag_s = max_concurrent, max_lag_ms / 1000
        self.draining = False
        """The server ends: it is no longer ready, and answers what connections have sent already."""
        self.under_way = 0
        """Requests in progress; changed by the event loop's thread alone."""
        self._lag_s = 0.0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Count a request while it is answered.

        Raises:
            RequestError: too many requests are in progress.
        """
        self.under_way += 1
        try:
            if self.under_way > self._max_concurrent:
                allowed = str(self._max_concurrent)
                raise RequestError(Status.OVERLOADED, "too many requests are in progress", allowed=allowed)
            yield
        finally:
            self.under_way -= 1

    def refuses(self, queue: Queue) -> bool:
        """Return whether to refuse a request before it is read: beyond saturation reading is most of its cost."""
        if queue.is_full() or queue.backlog.is_full:
            return True
        return self._lag_s > self._max_lag_s and queue.queued >= queue.keeps_busy

    async def watch_lag(self) -> None:
        """Measure how far the event loop is behind, until cancelled."""
        while True:
            start = perf_counter()
            await asyncio.sleep(_TICK_S)
            self._lag_s = perf_counter() - start - _TICK_S

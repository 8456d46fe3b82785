"""Requests for recommendations: a queue and threads of their own, beside those of the models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pydantic import Field

from viviane.serving.server.admission import Backlog, QueueLimits, overloaded

T = TypeVar("T")


class RecommendSettings(QueueLimits):
    """How requests for recommendations are computed.

    Args:
        threads: of each recommender, that is requests computed at once.
        max_queued: requests that may wait for a thread; more are refused with 429.
        max_queued_rows: their rows.
    """

    threads: int = Field(default=2, ge=1, le=1024)
    max_queued: int = Field(default=64, ge=1)
    max_queued_rows: int = Field(default=16_384, ge=1)


class RecommendQueue:
    """Requests of one recommender that wait for its threads."""

    def __init__(self, name: str, settings: RecommendSettings) -> None:
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix=f"viviane-recommend-{name}")
        self._turn = threading.Lock()
        self._waiting = self._waiting_rows = 0
        self.backlog = Backlog(settings)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self._waiting

    @property
    def keeps_busy(self) -> int:
        """With fewer waiting requests than this, a thread would soon have nothing to do."""
        return self._settings.threads

    def is_full(self, num_rows: int = 1) -> bool:
        """Whether a request of so many rows is refused."""
        free = self._waiting + self.backlog.computing < self._settings.threads
        return not free and self._settings.is_full(self._waiting, self._waiting_rows, num_rows)

    async def run(self, call: Callable[[], T], num_rows: int) -> T:
        """Compute on a thread of the recommender; a request that is cancelled while it waits is not computed.

        Raises:
            RequestError: too many wait already (status OVERLOADED).
        """
        with self._turn:
            if self.is_full(num_rows):
                raise overloaded(self._waiting, self._waiting_rows)
            self._waiting += 1
            self._waiting_rows += num_rows
        future = self._pool.submit(self._computed, call, num_rows)
        future.add_done_callback(lambda done: self._left_early(done, num_rows))
        return await asyncio.wrap_future(future)

    def _computed(self, call: Callable[[], T], num_rows: int) -> T:
        with self._turn:
            self._leave(num_rows)
            self.backlog.computing += 1
        try:
            return call()
        finally:
            with self._turn:
                self.backlog.computing -= 1

    def _left_early(self, future: Future[T], num_rows: int) -> None:
        if future.cancelled():
            with self._turn:
                self._leave(num_rows)

    def _leave(self, num_rows: int) -> None:
        self._waiting -= 1
        self._waiting_rows -= num_rows

    def close(self) -> None:
        """End the threads; requests that wait are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

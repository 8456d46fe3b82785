"""One thread that does what lookups must not wait for: filling tiers, use times, recovery."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from viviane.core.logging import get_logger

_MOST_ROWS: Final = 1 << 20
_IDLE_SECONDS: Final = 1.0
_log = get_logger("store")


class Mover:
    """Runs tasks in order, in one thread; what does not fit into its queue is left out and counted.

    The thread starts with the first task and ends after a second without one: an owner that is dropped without
    `close` leaves no thread behind.

    Args:
        most_rows: rows of the tasks that may wait.
    """

    def __init__(self, most_rows: int = _MOST_ROWS) -> None:
        self.most_rows = most_rows
        self.num_left_out = 0
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._rows = 0
        self._running = self._closed = False
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None

    def offer(self, task: Callable[[], None], num_rows: int) -> bool:
        """Queue a task and return at once; False where the queue has no room for its rows."""
        with self._turn:
            if self._closed or (self._rows and self._rows + num_rows > self.most_rows):
                self.num_left_out += num_rows
                return False
            self._waiting.append((task, num_rows))
            self._rows += num_rows
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="viviane-mover", daemon=True)
                self._thread.start()
            self._turn.notify_all()
        return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all tasks are done; False where time runs out."""
        with self._turn:
            return self._turn.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    def close(self) -> None:
        """Finish the task that runs, drop the others."""
        with self._turn:
            self._closed = True
            self._waiting.clear()
            self._turn.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._closed, _IDLE_SECONDS)
                if not self._waiting:
                    self._thread = None
                    return
                task, num_rows = self._waiting.popleft()
                self._running = True
            try:
                task()
            except Exception as error:  # a failing tier raises where it is read; the thread continues
                _log.warning("a task beside lookups failed: %s", str(error).split("\n", 1)[0])
            with self._turn:
                self._running = False
                self._rows -= num_rows
                self._turn.notify_all()

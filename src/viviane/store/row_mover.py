"""One ordered thread that moves rows between a cache and its tiers, while the caller computes."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Final

_MOST_SECONDS_AT_EXIT: Final = 10.0


class RowMover:
    """Runs jobs one after another, in the order they were given, in a thread of its own.

    The thread ends with the object. An error of a job is raised by the next call, and no later job runs.

    Example:
        >>> mover, seen = RowMover("moves"), []
        >>> ticket = mover.start(lambda: seen.append(1))
        >>> mover.wait(ticket); seen
        [1]
        >>> mover.close()
    """

    def __init__(self, name: str) -> None:
        self._state = _State()
        self._given = 0
        self._thread: threading.Thread | None = None
        self._name = name
        weakref.finalize(self, self._state.jobs.put, None)

    def start(self, job: Callable[[], None]) -> int:
        """Add a job, and return its ticket for `wait`."""
        self._state.raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._state,), name=self._name, daemon=True)
            _running[self._thread] = self._state
            self._thread.start()
        self._given += 1
        self._state.jobs.put(job)
        return self._given

    def is_done(self, ticket: int) -> bool:
        """Whether a job has ended."""
        return self._state.done >= ticket

    def wait(self, ticket: int | None = None) -> None:
        """Return when a job, by default the last one, and all before it have ended; raise their error."""
        wanted = self._given if ticket is None else ticket
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.done >= wanted or self._state.error is not None)
        self._state.raise_error()

    def close(self) -> None:
        """Finish all jobs and end the thread; another job starts a new one."""
        if self._thread is not None:
            self._state.jobs.put(None)
            self._thread.join()
            self._thread = None
        self._state.raise_error()


class _State:
    """What the thread shares with its owner, which it does not keep alive."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.done = 0
        self.error: BaseException | None = None

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


_running: weakref.WeakKeyDictionary[threading.Thread, _State] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Let threads end before the interpreter does: one that returns from a driver's call later aborts the process."""
    threads = list(_running.items())
    for _, state in threads:
        state.jobs.put(None)
    for thread, _ in threads:
        thread.join(_MOST_SECONDS_AT_EXIT)


def _run(state: _State) -> None:
    while (job := state.jobs.get()) is not None:
        error: BaseException | None = None
        if state.error is None:
            try:
                job()
            except BaseException as problem:
                error = problem
        del job
        with state.changed:
            state.error = state.error or error
            state.done += 1
            state.changed.notify_all()

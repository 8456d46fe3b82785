"""What is under way between backward and a step: gradients for this process's shards, sums of replicated tables."""

from __future__ import annotations

from collections.abc import Callable

Wait = Callable[[], None]


class Underway:
    """Lists of what lets the current stream wait, each called once; those for readers as often as it is asked."""

    def __init__(self) -> None:
        self._own: list[Wait] = []
        self._replicas: list[Wait] = []
        self._readers: list[Wait] = []

    def add(self, own: Wait, replicas: Wait | None = None, readers: Wait | None = None) -> None:
        """Keep what a step has to wait for.

        Args:
            own: waits for gradients on their way to the shards.
            replicas: waits for the sums, and hands them to their storages.
            readers: waits for all that reads the batch for those sums.
        """
        self._own.append(own)
        self._replicas += [] if replicas is None else [replicas]
        self._readers += [] if readers is None else [readers]

    def finish(self, *, replicas: bool = True) -> None:
        """Wait for gradients, and for sums."""
        for waiting in (self._own, self._replicas if replicas else []):
            for wait in waiting:
                wait()
            waiting.clear()
        if replicas:
            self._readers.clear()

    def wait_for_readers(self) -> None:
        """Let the current stream wait for what reads the batch."""
        for wait in self._readers:
            wait()

    def clear(self) -> None:
        """Forget all of it."""
        for waiting in (self._own, self._replicas, self._readers):
            waiting.clear()

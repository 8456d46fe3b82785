"""A background thread that writes checkpoints while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable

from viviane.core.errors import CheckpointError, VivianeError


class BackgroundWriter:
    """Runs one function at a time in a thread. `finish` raises its error.

    Example:
        >>> writer, done = BackgroundWriter(), []
        >>> writer.start("c", lambda: done.append(1))
        >>> writer.finish()
        >>> done, writer.has_failed
        ([1], False)
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._name = ""

    @property
    def has_failed(self) -> bool:
        """Whether the last function failed; `finish` raises its error."""
        return self._failure is not None

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a function after the previous one has ended.

        Args:
            name: the path that it writes, for messages.
            work: the function.

        Raises:
            VivianeError: the previous function failed.
        """
        self.finish()
        self._name = name

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        # Not a daemon: a process that exits for another reason still completes a checkpoint that it has begun.
        self._thread = threading.Thread(target=run, name="viviane-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the function has ended; its error is kept for `finish`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait until the function has ended, and raise its error."""
        self.wait()
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if isinstance(failure, VivianeError):
            raise failure
        raise CheckpointError(
            "the checkpoint could not be written", where=self._name, value=f"{type(failure).__name__}: {failure}",
            fix="see the error above; earlier checkpoints are complete",
        ) from failure  # fmt: skip

"""A circuit breaker: a tier that fails is left alone for a while, then tried again, without a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Decides whether a tier may be called.

    Closed: every call may pass. After `most_failures` failures in a row it opens for `pause_s`; then one call may pass,
    and its success closes it again.

    Args:
        most_failures: in a row, until it opens.
        pause_s: how long it stays open.
        clock: seconds that only grow.

    Example:
        >>> now = [0.0]
        >>> breaker = CircuitBreaker(most_failures=1, pause_s=2, clock=lambda: now[0])
        >>> breaker.failed("refused"); breaker.allows()
        False
        >>> now[0] = 2.5
        >>> breaker.allows(), breaker.allows()
        (True, False)
        >>> breaker.succeeded(); breaker.allows()
        True
    """

    def __init__(
        self, most_failures: int = 1, pause_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_failures, self.pause_s, self._clock = most_failures, pause_s, clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._open_until: float | None = None
        self.num_failures = 0
        self.last_error = ""

    @property
    def is_closed(self) -> bool:
        """Whether calls pass."""
        return self._open_until is None

    def allows(self) -> bool:
        """Return whether a call may pass; of an open breaker whose pause is over, one call."""
        if self.is_closed:  # without the lock: nearly always
            return True
        with self._lock:
            until = self._open_until
            if until is not None and self._clock() < until:
                return False
            self._open_until = None if until is None else self._clock() + self.pause_s
            return True

    def failed(self, error: object) -> None:
        """Count a failure."""
        with self._lock:
            self.num_failures += 1
            self._in_a_row += 1
            self.last_error = str(error).split("\n", 1)[0][:200]
            if self._in_a_row >= self.most_failures:
                self._open_until = self._clock() + self.pause_s

    def succeeded(self) -> None:
        """Close."""
        if self._open_until is None and not self._in_a_row:
            return
        with self._lock:
            self._in_a_row, self._open_until = 0, None

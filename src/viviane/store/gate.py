"""Many readers, or one writer that does not wait behind new readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets requests pass beside each other, and a change alone.

    Example:
        >>> gate = Gate()
        >>> with gate.beside_others(), gate.beside_others():
        ...     pass
        >>> with gate.alone():
        ...     pass
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._inside = 0
        self._changing = False

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Wait for a change that has begun, and keep later ones out."""
        with self._turn:
            self._turn.wait_for(lambda: not self._changing)
            self._inside += 1
        try:
            yield
        finally:
            with self._turn:
                self._inside -= 1
                if not self._inside:
                    self._turn.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for those that are inside, and keep others out."""
        with self._turn:
            self._turn.wait_for(lambda: not self._changing)
            self._changing = True
            self._turn.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._turn:
                self._changing = False
                self._turn.notify_all()

"""Keys that were resolved before their lookup."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class KeptKeys(Generic[T]):
    """What a batch's keys were resolved to, until the lookup of that very batch takes it.

    Example:
        >>> kept, batch = KeptKeys[str](), object()
        >>> kept.keep(batch, "rows")
        >>> kept.take(object()) is None, kept.take(batch), kept.take(batch), kept.end()
        (True, 'rows', None, True)
    """

    def __init__(self) -> None:
        self._batch: object = None
        self._found: T | None = None
        self._was_taken = False

    def keep(self, batch: object, found: T) -> None:
        """Keep what the keys of a batch were resolved to."""
        self._batch, self._found, self._was_taken = batch, found, False

    def take(self, batch: object) -> T | None:
        """Return what was kept for this batch, once; None where there is nothing."""
        if self._found is None or self._batch is not batch:
            return None
        found = self._found
        self._batch, self._found, self._was_taken = None, None, True
        return found

    def end(self) -> bool:
        """Drop what nobody took; returns whether somebody took what was kept last."""
        was_taken = self._was_taken
        self._batch, self._found, self._was_taken = None, None, False
        return was_taken

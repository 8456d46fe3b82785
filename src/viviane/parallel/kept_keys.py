"""Keys that were resolved before their lookup."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class KeptKeys(Generic[T]):
    """Keys that were resolved ahead for one batch object, until its lookup takes them.

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
        """Keep the resolved keys of a batch."""
        self._batch, self._found, self._was_taken = batch, found, False

    def take(self, batch: object) -> T | None:
        """Return the kept keys of this batch object once; None if there are none."""
        if self._found is None or self._batch is not batch:
            return None
        found = self._found
        self._batch, self._found, self._was_taken = None, None, True
        return found

    def end(self) -> bool:
        """Drop keys that were not taken; return whether the last ones were taken."""
        was_taken = self._was_taken
        self._batch, self._found, self._was_taken = None, None, False
        return was_taken

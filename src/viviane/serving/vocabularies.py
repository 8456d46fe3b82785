"""Places of values in a vocabulary, from an index that is built once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Find: TypeAlias = Callable[[Any], int | None]
"""From a value to its place, or None where the vocabulary has no such value."""

_MOST_IN_A_DICT: Final = 1 << 18
_PIECE: Final = 1 << 16


def vocabulary_index(values: Any, most_in_a_dict: int = _MOST_IN_A_DICT) -> Find:
    """Return what finds values of an Arrow array without duplicates.

    A small vocabulary is a dict, of some 150 bytes a value; a larger one the sorted hashes, 16 bytes a value, beside
    the array itself.

    Example:
        >>> import pyarrow as pa
        >>> find = vocabulary_index(pa.array(["pen", "ink"]))
        >>> find("ink"), find("cup")
        (1, None)
    """
    if len(values) <= most_in_a_dict:
        return {value: place for place, value in enumerate(values.to_pylist())}.get
    return _Sorted(values)


class _Sorted:
    """Finds a value by its hash, and looks whether it is the one."""

    def __init__(self, values: Any) -> None:
        self._values = values
        hashes: NDArray[np.int64] = np.empty(len(values), np.int64)
        for start in range(0, len(values), _PIECE):
            piece = values.slice(start, _PIECE).to_pylist()
            hashes[start : start + len(piece)] = [hash(value) for value in piece]
        self._places = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._places]

    def __call__(self, value: Any) -> int | None:
        """Return the place of a value, or None."""
        wanted = hash(value)
        at = int(np.searchsorted(self._hashes, wanted))
        while at < len(self._hashes) and self._hashes[at] == wanted:
            place = int(self._places[at])
            if self._values[place].as_py() == value:
                return place
            at += 1
        return None

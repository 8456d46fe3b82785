"""A row cache as a dict, for one thread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class DictCache:
    """What `RowCache` does, key by key, without a bound."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.rows: dict[int, bytes] = {}

    def find(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy rows to `out`, (n, row_bytes), and return which were found, (n,)."""
        found = np.zeros(len(keys), np.bool_)
        for i, key in enumerate(keys.tolist()):
            if key in self.rows:
                out[i] = np.frombuffer(self.rows[key], np.uint8)
                found[i] = True
        return found

    def insert(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Put rows in; of several of one key the last counts."""
        self.rows |= {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}

    def erase(self, keys: NDArray[np.int64]) -> int:
        """Remove keys, and return how many were there."""
        return sum(self.rows.pop(key, None) is not None for key in keys.tolist())

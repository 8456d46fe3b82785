"""The values of a key's earlier rows, from rows sorted by key and time, a piece at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.cells import make_list
from viviane.etl.values import combined


class HistoryMaker:
    """Lists, for each row, the last values of the rows of its key that are strictly earlier.

    Pieces arrive one after another; between them it keeps the last values of the key at work, and those of the
    moment at work, regardless of the length of a key.

    Args:
        last: longest list.
        num_keys: columns key0, key1, ... of the pieces.

    Example:
        >>> rows = pa.table({"known": [True] * 3, "key0": ["a"] * 3, "time": [1, 2, 2], "row": [0, 1, 2],
        ...                  "value": [7, 8, 9], "counts": [True] * 3})
        >>> HistoryMaker(5, 1).add(rows).column("value").to_pylist()
        [[], [7], [7]]
    """

    def __init__(self, last: int, num_keys: int) -> None:
        self.last = last
        self.keys = ["known", *(f"key{place}" for place in range(num_keys))]
        self._before: pa.Table | None = None  # the last row of the piece before
        self._values: Any = None  # what a row of the same key may still list
        self._num_earlier = 0  # of those, how many are earlier than the moment at work

    def add(self, rows: pa.Table) -> pa.Table:
        """Take rows sorted by known, keys, time and row; returns columns row and value, a list a row.

        Args:
            rows: the columns `known` (key and time are there), keys, `time`, `row`, `value`, and `counts`: the value
                may be listed.
        """
        new_key = changes(rows.select(self.keys), self._before)
        new_moment = new_key | changes(rows.select(["time"]), self._before)
        counts = combined(rows.column("counts")).to_numpy(zero_copy_only=False).astype(bool)
        values = combined(rows.column("value")).filter(pa.array(counts))
        carried = 0 if self._values is None else len(self._values)
        if carried:
            values = pa.concat_arrays([self._values, values])
        seen = carried + np.concatenate([[0], np.cumsum(counts)])[:-1]  # values before each row
        first = _latest(seen, new_key, 0)
        end = _latest(seen, new_moment, self._num_earlier)
        start = np.maximum(first, end - self.last)
        lengths = end - start
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) + np.repeat(start, lengths)
        listed = make_list(offsets, values.take(pa.array(inside)))
        if rows.num_rows:
            self._before = rows.slice(rows.num_rows - 1)
            self._num_earlier = int(end[-1] - start[-1])
            self._values = values.slice(int(start[-1]))
        return pa.table({"row": combined(rows.column("row")), "value": listed})


def changes(columns: pa.Table, before: pa.Table | None) -> NDArray[np.bool_]:
    """Whether each row differs from the row before it; missing values are equal to each other.

    Args:
        before: a table whose last row precedes the first one; None: the first row differs.
    """
    found = np.zeros(columns.num_rows, bool)
    if columns.num_rows == 0:
        return found
    for name in columns.column_names:
        column = combined(columns.column(name))
        if before is None:
            found[0] = True
        else:
            column = pa.concat_arrays([combined(before.column(name)).slice(before.num_rows - 1), column])
        now, old = column.slice(1), column.slice(0, len(column) - 1)
        gone = pc.not_equal(pc.is_null(now), pc.is_null(old))
        other = pc.or_(pc.fill_null(pc.not_equal(now, old), False), gone).to_numpy(zero_copy_only=False)
        found[len(found) - len(other) :] |= other
    return found


def _latest(values: NDArray[np.int64], at: NDArray[np.bool_], initial: int) -> NDArray[np.int64]:
    """The value at the latest marked place up to each one, `initial` before the first."""
    places = np.maximum.accumulate(np.where(at, np.arange(len(at)), -1)) if len(at) else np.zeros(0, np.int64)
    return np.where(places >= 0, values[places], initial) if len(at) else values

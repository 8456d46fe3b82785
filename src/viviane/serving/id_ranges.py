"""Ids of a batch on the host against the ranges of tables that refuse others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.core.errors import KeyRangeError
from viviane.schema import Schema


class IdRanges:
    """Refuses ids that a table would refuse, where lookups on the device are not asked.

    Args:
        schema: the columns.
        strict: names of the columns whose ids have to be in range.

    Example:
        >>> schema = Schema(categorical=[{"name": "c", "num_ids": 9}])
        >>> IdRanges(schema, frozenset({"c"})).check(Batch.from_columns(schema, {"c": [8, 9]}))
        Traceback (most recent call last):
        ...
        viviane.core.errors.KeyRangeError: key out of range
          where:   column 'c', row 1
          value:   9
          allowed: 0 <= key < 9
    """

    def __init__(self, schema: Schema, strict: frozenset[str]) -> None:
        self._names = [column.name for column in schema.one_hot]
        self._limits = np.array(
            [c.num_ids if c.name in strict and c.num_ids is not None else 2**64 - 1 for c in schema.one_hot], np.uint64
        )
        self._bags = {c.name: c.num_ids for c in schema.bags if c.name in strict and c.num_ids is not None}

    def check(self, batch: Batch) -> None:
        """Check all ids of a batch on the host.

        Raises:
            KeyRangeError: names column, row and id.
        """
        ids = batch.one_hot.numpy()
        if ids.size:
            # Negative ids become large unsigned ones: one pass finds both kinds.
            unsigned: NDArray[Any] = ids.view(np.uint32 if ids.dtype == np.int32 else np.uint64)
            if (unsigned.max(axis=0) >= self._limits).any():
                rows, columns = np.nonzero(unsigned >= self._limits)
                self._refuse(int(columns[0]), int(rows[0]), int(ids[rows[0], columns[0]]))
        for name, limit in self._bags.items():
            bag = batch.bags[name]
            values = bag.values.numpy()
            if values.size and (values.min() < 0 or values.max() >= limit):
                at = int(np.flatnonzero((values < 0) | (values >= limit))[0])
                row = int(np.searchsorted(bag.offsets.numpy(), at, side="right")) - 1
                raise _out_of_range(name, row, int(values[at]), limit)

    def _refuse(self, column: int, row: int, value: int) -> None:
        raise _out_of_range(self._names[column], row, value, int(self._limits[column]))


def _out_of_range(column: str, row: int, value: int, limit: int) -> KeyRangeError:
    where = f"column {column!r}, row {row}"
    return KeyRangeError("key out of range", where=where, value=value, allowed=f"0 <= key < {limit}")

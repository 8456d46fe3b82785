"""Ids of a batch against the ranges of tables that refuse others, on the host or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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
        self._device_limits: dict[torch.device, torch.Tensor] = {}

    def check(self, batch: Batch) -> None:
        """Check all ids of a batch.

        Raises:
            KeyRangeError: names column, row and id.
        """
        if batch.device.type != "cpu":
            self._check_on_device(batch)
            return
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

    def _check_on_device(self, batch: Batch) -> None:
        ids, device = batch.one_hot, batch.device
        if device not in self._device_limits:
            most = np.minimum(self._limits, np.uint64(2**63 - 1)).astype(np.int64)
            self._device_limits[device] = torch.from_numpy(most).to(device)
        limits = self._device_limits[device]
        free = limits == 2**63 - 1
        bad = [((ids < 0) | (ids >= limits)) & ~free] if ids.numel() else []
        bad += [(batch.bags[name].values < 0) | (batch.bags[name].values >= n) for name, n in self._bags.items()]
        if bad and bool(torch.stack([one.any() for one in bad]).any()):
            self.check(batch.to("cpu"))

    def _refuse(self, column: int, row: int, value: int) -> None:
        raise _out_of_range(self._names[column], row, value, int(self._limits[column]))


def _out_of_range(column: str, row: int, value: int, limit: int) -> KeyRangeError:
    where = f"column {column!r}, row {row}"
    return KeyRangeError("key out of range", where=where, value=value, allowed=f"0 <= key < {limit}")

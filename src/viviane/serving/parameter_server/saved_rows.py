"""The lowest tier: a saved model's table as it lies on the disk, mapped into memory, and never written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.core.errors import CheckpointError, StoreError
from viviane.store.row_layout import Column, Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows
from viviane.training.checkpoint.manifest import ShardEntry, TableEntry
from viviane.training.checkpoint.tensor_files import read_tensors


class SavedRowsTier:
    """Rows of a table in a saved model. The file is mapped: a lookup reads the pages of its rows alone.

    Args:
        folder: the model's weights.
        entry: the table's entry in their manifest.
        name: in messages.

    Raises:
        CheckpointError: a file is missing, or differs from the manifest.
    """

    def __init__(self, folder: Path, entry: TableEntry, *, name: str = "snapshot") -> None:
        self.name = name
        rows, dim = entry.weight.shape
        self.layout = RowLayout([Column("weight", entry.weight.dtype, dim)])
        self._width = self.layout["weight"].num_bytes
        self._counter = StatsCounter(self.layout.row_bytes)
        self._where = f"{folder}, {entry.files[0]}"
        self._keys: NDArray[np.int64] | None = None
        self._order: NDArray[np.int64] | None = None
        self._num_rows = rows
        whole = (ShardEntry(file=entry.files[0], keys=(0, rows, 1), columns=(0, dim)),)
        self._shards = [self._map(folder, entry, shard) for shard in (entry.shards or whole)]
        self._is_open = True

    def _map(self, folder: Path, entry: TableEntry, shard: ShardEntry) -> tuple[range, int, NDArray[np.uint8]]:
        """Map a file: which keys, at which byte of a row, and the bytes (rows, bytes)."""
        found = read_tensors(folder / shard.file)
        rows, columns = (self._num_rows if entry.is_dynamic else len(shard.rows)), shard.columns
        weight = found.get("weight")
        shape = (rows, columns[1] - columns[0])
        if weight is None or tuple(weight.shape) != shape or str(weight.dtype) != f"torch.{entry.weight.dtype}":
            raise CheckpointError(
                "a table's file differs from the manifest", where=str(folder / shard.file),
                value="absent" if weight is None else f"{tuple(weight.shape)}", allowed=str(shape),
            )  # fmt: skip
        if entry.is_dynamic:
            keys = found.get("keys")
            if keys is None or tuple(keys.shape) != (rows,) or keys.dtype != torch.int64:
                raise CheckpointError("a table's file has no keys", where=str(folder / shard.file))
            plain: NDArray[np.int64] = keys.numpy()
            self._order = np.argsort(plain, kind="stable")
            self._keys = plain[self._order]
        item = weight.element_size()
        data: NDArray[np.uint8] = weight.contiguous().view(torch.uint8).view(rows, shape[1] * item).numpy()
        return shard.rows, columns[0] * item, data

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        if not self._is_open:
            raise StoreError("the tier is closed", where=self._where)
        with self._counter.fetching() as count:
            if self._keys is not None and self._order is not None:
                places = np.searchsorted(self._keys, keys)
                inside = np.minimum(places, max(0, len(self._keys) - 1))
                found = (self._keys[inside] == keys) if len(self._keys) else np.zeros(len(keys), np.bool_)
                rows = self._order[inside[found]] if len(self._keys) else inside[found]
                self._gather(self._shards[0], rows, np.flatnonzero(found), out)
            else:
                found = (keys >= 0) & (keys < self._num_rows)
                for shard in self._shards:
                    own, step = shard[0], shard[0].step
                    here = found & (keys >= own.start) & (keys < own.stop) & ((keys - own.start) % step == 0)
                    self._gather(shard, (keys[here] - own.start) // step, np.flatnonzero(here), out)
            if self.layout.row_bytes != self._width:
                out[found, self._width :] = 0
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits)
        return found

    def _gather(self, shard: tuple[range, int, NDArray[np.uint8]], rows: Keys, places: Keys, out: Rows) -> None:
        _, start, data = shard
        if len(rows):
            order = np.argsort(rows, kind="stable")  # in order of address: pages are read once
            out[places[order], start : start + data.shape[1]] = data[rows[order]]

    def put(self, keys: Keys, rows: Rows) -> None:
        """Refuse: a saved model is not changed."""
        raise StoreError("a saved model is not written to", where=self._where)

    def erase(self, keys: Keys) -> int:
        """Refuse: a saved model is not changed."""
        raise StoreError("a saved model is not written to", where=self._where)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows, in order of the keys."""
        check_batch_rows(batch_rows)
        for start in range(0, self._num_rows, batch_rows):
            stop = min(start + batch_rows, self._num_rows)
            keys = np.arange(start, stop) if self._keys is None else self._keys[start:stop].copy()
            rows = self.layout.empty(len(keys))
            self.fetch(keys, rows)
            yield keys, rows

    def num_rows(self) -> int:
        """Return the number of keys."""
        return self._num_rows

    def stats(self) -> TierStats:
        """Return what was counted."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Nothing is ever written."""

    def close(self) -> None:
        """Let go of the mapped files."""
        self._shards, self._keys, self._order = [], None, None
        self._is_open = False

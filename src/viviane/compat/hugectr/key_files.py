"""HugeCTR's files of a table, `key` and `emb_vector`, as the lowest tier of a parameter server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from viviane.compat.hugectr.files import read_numbers
from viviane.core.errors import CheckpointError, StoreError
from viviane.store.row_layout import Column, Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows

_WHOLE_BYTES: Final = 256 << 20
_BLOCK_BYTES: Final = 4096
_NUM_BLOCKS: Final = 16_384


class KeyFilesTier:
    """Rows of a folder with `key` (int64) and `emb_vector` (float32), memory-mapped and read-only.

    Args:
        folder: folder of the table.
        dim: width of a vector; None: derived from the file sizes.

    Raises:
        CheckpointError: a file is missing, or the files do not match.
    """

    def __init__(self, folder: Path, dim: int | None) -> None:
        for name in ("key", "emb_vector"):
            if not (folder / name).is_file():
                raise CheckpointError("a file of the table is missing", where=str(folder / name))
        num_bytes = (folder / "emb_vector").stat().st_size
        keys = read_numbers(folder / "key", "<i8").astype(np.int64)
        width = dim or (num_bytes // 4 // len(keys) if len(keys) else 1)
        if num_bytes != 4 * width * len(keys):
            raise CheckpointError(
                "keys and vectors do not match", where=str(folder),
                value=f"{len(keys)} keys, {num_bytes // 4} values", allowed=f"{width} per key",
            )  # fmt: skip
        self.name, self._where, self._folder = "files", str(folder), folder
        self.layout = RowLayout([Column("weight", "float32", width)])
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        empty = np.empty((0, 4 * width), np.uint8)
        path = folder / "emb_vector"
        self._data = np.memmap(path, np.uint8, "r", shape=(len(keys), 4 * width)) if len(keys) else empty
        self._counter = StatsCounter(self.layout.row_bytes)

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        with self._counter.fetching() as count:
            found = np.zeros(len(keys), np.bool_)
            if len(self._keys):
                places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
                found = self._keys[places] == keys
                rows, targets = self._order[places[found]], np.flatnonzero(found)
                order = np.argsort(rows, kind="stable")  # in address order, so that pages are read once
                width = self._data.shape[1]
                out[targets[order], :width] = self._data[rows[order]]
                out[targets, width:] = 0
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits)
        return found

    def times(self) -> list[list[int]]:
        """Return size and time of change of both files: equal for unchanged ones."""
        found = [(self._folder / name).stat() for name in ("key", "emb_vector")]
        return [[one.st_size, one.st_mtime_ns] for one in found]

    def digest(self) -> str:
        """Return a digest of the content; of a file above 256 MiB of 16,384 blocks, evenly spread."""
        made = hashlib.blake2b(digest_size=16)
        for name in ("key", "emb_vector"):
            path = self._folder / name
            size = path.stat().st_size
            made.update(size.to_bytes(8, "little"))
            whole = size <= _WHOLE_BYTES
            starts = range(0, size, 1 << 20) if whole else range(0, size, -(-size // _NUM_BLOCKS))
            with path.open("rb") as file:
                for start in starts:
                    file.seek(start)
                    made.update(file.read(1 << 20 if whole else _BLOCK_BYTES))
        return made.hexdigest()

    def put(self, keys: Keys, rows: Rows) -> None:
        """Raise an error: files of a trained model are read-only."""
        raise StoreError("files of a trained model are read-only", where=self._where)

    def erase(self, keys: Keys) -> int:
        """Raise an error: files of a trained model are read-only."""
        raise StoreError("files of a trained model are read-only", where=self._where)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows, in order of the keys."""
        check_batch_rows(batch_rows)
        for start in range(0, len(self._keys), batch_rows):
            keys = self._keys[start : start + batch_rows].copy()
            rows = self.layout.empty(len(keys))
            self.fetch(keys, rows)
            yield keys, rows

    def num_rows(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    def stats(self) -> TierStats:
        """Return the counters."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Do nothing: the files are read-only."""

    def close(self) -> None:
        """Release the mapped files."""
        self._data = np.empty((0, self._data.shape[1]), np.uint8)
        self._keys = self._keys[:0]

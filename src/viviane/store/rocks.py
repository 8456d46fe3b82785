"""Rows in RocksDB: any 64-bit keys, on disk, a column family for each table."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from viviane.core.errors import StoreError
from viviane.core.json_files import parse_json
from viviane.core.logging import get_logger
from viviane.store.rocks_database import RocksDatabase
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows

_log = get_logger("store.rocks")
_LAYOUTS: Final = "default"
_SIGN: Final = np.uint64(1 << 63)


def key_bytes(keys: Keys) -> list[bytes]:
    """Return keys as RocksDB orders them: 8 bytes, big-endian, the sign bit flipped, so that bytes rise with keys.

    Example:
        >>> [key.hex() for key in key_bytes(np.array([-1, 0]))]
        ['7fffffffffffffff', '8000000000000000']
    """
    data = (keys.view(np.uint64) ^ _SIGN).astype(">u8").tobytes()
    return [data[i : i + 8] for i in range(0, len(data), 8)]


def keys_of_bytes(data: list[bytes]) -> Keys:
    """Return the keys of what `key_bytes` made.

    Example:
        >>> keys_of_bytes(key_bytes(np.array([-5, 7]))).tolist()
        [-5, 7]
    """
    found: Keys = (np.frombuffer(b"".join(data), ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)
    return found


class RocksTier:
    """A table's rows in a RocksDB database.

    A `put` is one batch of writes: after a crash all of it is there, or nothing. `flush` makes it survive a failure of
    the machine. `num_rows` counts by reading all keys.

    Args:
        database: an open one, which others may share; `close` of the tier leaves it open.
        table: name of the column family.
        layout: of the rows; that of a table that is there is compared.
        name: in messages.

    Raises:
        StoreError: the table holds rows of another layout.

    Example:
        >>> import tempfile
        >>> from viviane.store.row_layout import Column
        >>> database = RocksDatabase(tempfile.mkdtemp() + "/db")
        >>> tier = RocksTier(database, "user", RowLayout([Column("weight", "float32", 2)]))
        >>> tier.put(np.array([-3, 10**15]), np.ones((2, 8), np.uint8))
        >>> out = tier.layout.zeros(2)
        >>> tier.fetch(np.array([10**15, 4]), out).tolist(), out.sum(1).tolist(), tier.num_rows()
        ([True, False], [8, 0], 2)
        >>> tier.close(); database.close()
    """

    def __init__(self, database: RocksDatabase, table: str, layout: RowLayout, *, name: str = "rocksdb") -> None:
        self.name, self.layout, self.table = name, layout, table
        self.database = database
        self._counter = StatsCounter(layout.row_bytes)
        self._lock = threading.RLock()
        self._where = f"tier {name!r}, {database.folder}, table {table!r}"
        if not table or table == _LAYOUTS:
            raise StoreError("a table needs a name of its own", where=self._where, value=table)
        mark = f"layout {table}".encode()
        known = database.get(mark)
        if known is None and database.read_only:
            raise StoreError("the database does not hold this table", where=self._where,
                             fix="write the table before a database is opened with read_only")  # fmt: skip
        if known is None:
            database.put(mark, json.dumps(layout.to_json()).encode())
        elif RowLayout.from_json(parse_json(known, where=self._where, error=StoreError), error=StoreError) != layout:
            raise StoreError("the table holds rows of another layout", where=self._where, value=known.decode()[:300],
                             allowed=str(layout), fix="name another table or folder")  # fmt: skip
        with database.reading(self._where):
            database.family(table)
        self._is_open = True

    def _check_open(self) -> None:
        if not self._is_open or not self.database.is_open:
            raise StoreError("the tier is closed", where=self._where)

    def _values(self, keys: Keys) -> list[bytes | None]:
        """Return the rows of keys as RocksDB has them, or None."""
        if not len(keys):
            return []
        with self.database.reading(self._where):
            found: list[bytes | None] = self.database.family(self.table)[key_bytes(keys)]
        return found

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        with self._counter.fetching() as count:
            self._check_open()
            values = self._values(keys)
            found = np.fromiter((value is not None for value in values), np.bool_, len(keys))
            data = [value for value in values if value is not None]
            out[found] = self._rows(data)
            count(hits=len(data), misses=len(keys) - len(data))
        return found

    def _rows(self, values: list[bytes]) -> Rows:
        size = self.layout.row_bytes
        if any(len(value) != size for value in values):
            wrong = next(len(value) for value in values if len(value) != size)
            raise StoreError("a stored row has another length", where=self._where, value=f"{wrong} bytes",
                             allowed=f"{size} bytes")  # fmt: skip
        return np.frombuffer(b"".join(values), np.uint8).reshape(-1, size)

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows, all or none; see `viviane.store.Tier`."""
        self.layout.check_rows(keys, rows)
        with self._counter.putting(len(keys)), self._lock:
            self._check_open()
            self.database.write(self._where, self.table, lambda batch, handle: self._fill(batch, handle, keys, rows))

    def _fill(self, batch: Any, handle: Any, keys: Keys, rows: Rows) -> None:
        """Put rows into a batch of writes."""
        data, size = rows.tobytes(), self.layout.row_bytes
        for i, key in enumerate(key_bytes(keys)):
            batch.put(key, data[i * size : (i + 1) * size], handle)

    @staticmethod
    def _remove(batch: Any, handle: Any, keys: Keys) -> None:
        """Put the removal of keys into a batch of writes."""
        for key in key_bytes(keys):
            batch.delete(key, handle)

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there."""
        self.layout.check_keys(keys)
        own = np.unique(keys)
        with self._lock:
            self._check_open()
            values = self._values(own)
            own = own[np.fromiter((value is not None for value in values), np.bool_, len(own))]
            self.database.write(self._where, self.table, lambda batch, handle: self._remove(batch, handle, own))
        self._counter.erased(len(own))
        return len(own)

    def clear(self) -> None:
        """Remove all rows of the table."""
        with self._lock:
            self._check_open()
            self.database.clear(self._where, self.table)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows as they are at the beginning, in order of the keys."""
        check_batch_rows(batch_rows)
        self._check_open()
        keys: list[bytes] = []
        values: list[bytes] = []
        with self.database.scanning(self._where):
            found = self._iterator()
            while found.valid():
                keys.append(found.key())
                values.append(found.value())
                found.next()
                if len(keys) == batch_rows:
                    yield keys_of_bytes(keys), self._rows(values).copy()
                    keys, values = [], []
            found.status()  # raises where the iterator ended at what it cannot read
        if keys:
            yield keys_of_bytes(keys), self._rows(values).copy()

    def num_rows(self) -> int:
        """Return the number of keys, by reading all of them."""
        self._check_open()
        count = 0
        with self.database.scanning(self._where):
            found = self._iterator()
            while found.valid():
                found.next()
                count += 1
            found.status()
        return count

    def _iterator(self) -> Any:
        found = self.database.family(self.table).iter()
        found.seek_to_first()
        return found

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Write what RocksDB holds in memory to its files."""
        self._check_open()
        self.database.flush(self._where, self.table)

    def close(self) -> None:
        """Flush; the database stays open."""
        is_open, self._is_open = self._is_open, False
        if not is_open or not self.database.is_open:
            return
        try:
            self.database.flush(self._where, self.table)
        except StoreError as error:
            _log.warning("closed without a flush: %s", error)  # what was written is in RocksDB's log

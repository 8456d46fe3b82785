"""Rows in RocksDB: any 64-bit keys, on disk, a column family for each table."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from viviane.core.errors import StoreError
from viviane.core.json_files import parse_json
from viviane.core.optional import require
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS

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


class RocksDatabase:
    """A RocksDB folder that several tables' tiers share, one process at a time.

    Args:
        folder: of the database; made if it is not there.
        cache_bytes: of blocks that RocksDB keeps in memory.
        read_only: change nothing; any number of processes may then read it. It has to be there.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: the database cannot be opened; another process has it.
    """

    def __init__(self, folder: str | Path, *, cache_bytes: int = 64 << 20, read_only: bool = False) -> None:
        rocks = require("rocksdict", extra="rocksdb", purpose="rows in RocksDB")
        self.folder, self.read_only = Path(folder), read_only
        self._rocks = rocks
        self._families: dict[str, Any] = {}
        self.options = rocks.Options(raw_mode=True)
        self.options.create_if_missing(not read_only)
        self.options.set_compression_type(rocks.DBCompressionType.none())
        tables = rocks.BlockBasedOptions()
        tables.set_block_cache(rocks.Cache(cache_bytes))
        tables.set_bloom_filter(10, False)
        self.options.set_block_based_table_factory(tables)
        if read_only and not (self.folder / "CURRENT").exists():
            raise StoreError("there is no RocksDB database to read", where=str(self.folder),
                             fix="correct the path, or open it once without read_only")  # fmt: skip
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        access = rocks.AccessType.read_only() if read_only else rocks.AccessType.read_write()
        try:
            known = rocks.Rdict.list_cf(str(self.folder)) if (self.folder / "CURRENT").exists() else []
            families = dict.fromkeys(known, self.options)
            self.db = rocks.Rdict(str(self.folder), self.options, column_families=families, access_type=access)
        except Exception as error:
            raise StoreError(
                "the RocksDB database cannot be opened", where=str(self.folder), value=str(error)[:300],
                fix="close the process that has it open, or name another folder",
            ) from error  # fmt: skip
        self._known = set(known)

    def family(self, name: str) -> Any:
        """Return a table's column family; made if it is not there."""
        if name not in self._families:
            if name in self._known:
                self._families[name] = self.db.get_column_family(name)
            else:
                self._families[name] = self.db.create_column_family(name, self.options)
                self._known.add(name)
        return self._families[name]

    def batch(self) -> Any:
        """Return an empty batch of writes that happen together."""
        return self._rocks.WriteBatch(raw_mode=True)

    def handle(self, name: str) -> Any:
        """Return what a batch of writes calls a table's column family."""
        self.family(name)
        return self.db.get_column_family_handle(name)

    def close(self) -> None:
        """Close the database; may be called again."""
        families, self._families = self._families, {}
        for one in families.values():
            one.close()
        if self.db is not None:
            self.db.close()
            self.db = None


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
        known = database.db.get(mark)
        if known is None and database.read_only:
            raise StoreError("the database does not hold this table", where=self._where,
                             fix="write the table before a database is opened with read_only")  # fmt: skip
        if known is None:
            database.db[mark] = json.dumps(layout.to_json()).encode()
        elif RowLayout.from_json(parse_json(known, where=self._where, error=StoreError), error=StoreError) != layout:
            raise StoreError("the table holds rows of another layout", where=self._where, value=known.decode()[:300],
                             allowed=str(layout), fix="name another table or folder")  # fmt: skip
        self._family = database.family(table)
        self._is_open = True

    def _check_open(self) -> None:
        if not self._is_open or self.database.db is None:
            raise StoreError("the tier is closed", where=self._where)

    def _check_writable(self) -> None:
        self._check_open()
        if self.database.read_only:
            raise StoreError(
                "the database is open for reading only", where=self._where, fix="open it without read_only"
            )

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_rows(keys, out)
        with self._counter.fetching() as count:
            self._check_open()
            values = self._family[key_bytes(keys)] if len(keys) else []
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
            self._check_writable()
            batch, handle = self.database.batch(), self.database.handle(self.table)
            data, size = rows.tobytes(), self.layout.row_bytes
            for i, key in enumerate(key_bytes(keys)):
                batch.put(key, data[i * size : (i + 1) * size], handle)
            self._apply(batch)

    def _apply(self, batch: Any) -> None:
        try:
            self.database.db.write(batch)
        except Exception as error:
            raise StoreError("RocksDB cannot write", where=self._where, value=str(error)[:300]) from error

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there."""
        self.layout.check_keys(keys)
        own = np.unique(keys)
        with self._lock:
            self._check_writable()
            values = self._family[key_bytes(own)] if len(own) else []
            own = own[np.fromiter((value is not None for value in values), np.bool_, len(own))]
            batch, handle = self.database.batch(), self.database.handle(self.table)
            for key in key_bytes(own):
                batch.delete(key, handle)
            self._apply(batch)
        self._counter.erased(len(own))
        return len(own)

    def clear(self) -> None:
        """Remove all rows of the table."""
        with self._lock:
            self._check_writable()
            self._family.delete_range(b"", b"\xff" * 9)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows as they are at the beginning, in order of the keys."""
        self._check_open()
        keys: list[bytes] = []
        values: list[bytes] = []
        for key, value in self._family.items():
            keys.append(key)
            values.append(value)
            if len(keys) == batch_rows:
                yield keys_of_bytes(keys), self._rows(values).copy()
                keys, values = [], []
        if keys:
            yield keys_of_bytes(keys), self._rows(values).copy()

    def num_rows(self) -> int:
        """Return the number of keys, by reading all of them."""
        self._check_open()
        return sum(1 for _ in self._family.keys())  # noqa: SIM118 - the table gives rows, its keys are asked for

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Write what RocksDB holds in memory to its files."""
        self._check_open()
        if self.database.read_only:
            return
        self._family.flush(True)
        self.database.db.flush_wal(True)

    def close(self) -> None:
        """Flush; the database stays open."""
        if self._is_open and self.database.db is not None:
            self.flush()
        self._is_open = False

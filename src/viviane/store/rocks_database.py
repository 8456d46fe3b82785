"""A RocksDB folder: opened once, shared by the tables in it, opened again after a write that failed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import StoreError, VivianeError
from viviane.core.file_names import refuse_links
from viviane.core.locations import local_path
from viviane.core.logging import get_logger
from viviane.core.optional import require
from viviane.store.gate import Gate

_log = get_logger("store.rocks")
_SPARE_BYTES: Final = 1 << 20
"""Room for the small files that RocksDB makes when it opens a database."""
_PROBE: Final = "viviane-probe"
_OWN_NAME: Final = re.compile(
    r"CURRENT|LOCK|IDENTITY|LOG(?:\.old\.\d+)?|(?:MANIFEST|OPTIONS)-\d+|\d+\.(?:log|sst|blob)|.*\.dbtmp"
    r"|rocksdict-config\.json"
)
"""Files of a database that was killed before it was complete."""
_FIX_OF_FOLDER: Final = "name a folder on a disk with room that this user may write"
_FIXES: Final = {
    "lock": "close the process that has it open, or name another folder",
    "corruption": "name another folder, and fill it again: viviane store import",
    "invalid argument": "name another folder: this one was written with other settings, or lacks files",
}
"""What to do, by what RocksDB's message has; its errors have no classes."""


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
        self.folder, self.read_only = local_path(folder), read_only
        self._rocks = rocks
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
        refuse_links(self.folder, error=StoreError)
        if not read_only:
            self._make_folder()
        self._gate, self._turn = Gate(), threading.RLock()
        self._families: dict[str, Any] = {}
        self._known: set[str] = set()
        self._db: Any = None
        self._scans = 0
        self._has_failed = False
        self.is_open = True
        """It was not closed; also while it is opened again."""
        self._open(read_only)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / _PROBE).unlink(missing_ok=True)  # of a process that was killed
            others = [] if (self.folder / "CURRENT").exists() else sorted(
                one.name for one in self.folder.iterdir() if not _OWN_NAME.fullmatch(one.name)
            )  # fmt: skip
        except OSError as error:
            raise StoreError("the folder of the RocksDB database cannot be made", where=str(self.folder),
                             value=error.strerror or str(error), fix=_FIX_OF_FOLDER) from error  # fmt: skip
        if others:
            raise StoreError("the folder holds something else than a RocksDB database", where=str(self.folder),
                             value=others[0], fix="name an empty folder, or one that is not there yet")  # fmt: skip

    def _open(self, read_only: bool) -> None:
        rocks = self._rocks
        access = rocks.AccessType.read_only() if read_only else rocks.AccessType.read_write()
        try:
            known = rocks.Rdict.list_cf(str(self.folder)) if (self.folder / "CURRENT").exists() else []
            families = dict.fromkeys(known, self.options)
            self._db = rocks.Rdict(str(self.folder), self.options, column_families=families, access_type=access)
        except Exception as error:
            raise StoreError(
                "the RocksDB database cannot be opened", where=str(self.folder), value=str(error)[:300],
                fix=_fix_of(str(error)),
            ) from error  # fmt: skip
        self._known = set(known)

    # Reading ----------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, where: str) -> Iterator[None]:
        """Keep the database open, and turn what RocksDB reports into a StoreError."""
        with self._gate.beside_others():
            if self._db is None:
                raise StoreError("the database is closed", where=where)
            try:
                yield
            except VivianeError:
                raise
            except Exception as error:  # RocksDB's errors have no class of their own
                raise StoreError("RocksDB cannot read", where=where, value=str(error)[:300]) from error

    @contextmanager
    def scanning(self, where: str) -> Iterator[None]:
        """As `reading`, for as long as a caller takes: changes and other readers do not wait for it."""
        with self.reading(where), self._turn:
            self._scans += 1
        try:
            yield
        except VivianeError:
            raise
        except Exception as error:
            raise StoreError("RocksDB cannot read", where=where, value=str(error)[:300]) from error
        finally:
            with self._turn:
                self._scans -= 1

    def get(self, key: bytes) -> bytes | None:
        """Return what `put` has written beside the tables, or None."""
        with self.reading(str(self.folder)):
            found: bytes | None = self._db.get(key)
        return found

    def family(self, name: str) -> Any:
        """Return a table's column family, inside `reading`; made if it is not there."""
        found = self._families.get(name)
        if found is not None:
            return found
        with self._turn:
            if name not in self._families:
                if name in self._known:
                    self._families[name] = self._db.get_column_family(name)
                else:
                    self._families[name] = self._db.create_column_family(name, self.options)
                    self._known.add(name)
            return self._families[name]

    # Writing ----------------------------------------------------------------------------------------------------

    def write(self, where: str, table: str | None, fill: Callable[[Any, Any], None]) -> None:
        """Write a batch, all of it or nothing.

        RocksDB refuses all writes after one that failed, such as on a full disk. So the next write opens the database
        again, when there is room.

        Args:
            where: in messages.
            table: whose column family is changed; None: what lies beside the tables.
            fill: gets an empty batch, and what the batch calls the column family.

        Raises:
            StoreError: the database was opened for reading, or cannot be written; nothing was changed then.
        """
        self._make_writable(where)
        with self.reading(where):
            handle = None
            if table is not None:
                self.family(table)
                handle = self._db.get_column_family_handle(table)
            batch = self._rocks.WriteBatch(raw_mode=True)
            try:
                fill(batch, handle)
                with self._failing(where):
                    self._db.write(batch)
            finally:
                del batch, handle  # else the traceback of a kept exception holds the database open

    def put(self, key: bytes, value: bytes) -> None:
        """Write something beside the tables, such as a note."""
        self.write(str(self.folder), None, lambda batch, _: batch.put(key, value))

    def clear(self, where: str, table: str) -> None:
        """Remove all rows of a table."""
        self._make_writable(where)
        with self.reading(where), self._failing(where):
            self.family(table).delete_range(b"", b"\xff" * 9)

    def flush(self, where: str, table: str) -> None:
        """Write what RocksDB holds of a table in memory to its files."""
        if self.read_only:
            return
        with self.reading(where), self._failing(where):
            self.family(table).flush(True)
            self._db.flush_wal(True)

    def _make_writable(self, where: str) -> None:
        if self.read_only:
            raise StoreError("the database is open for reading only", where=where, fix="open it without read_only")
        if self._has_failed:
            self._open_again(where)

    @contextmanager
    def _failing(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._has_failed = True
            fix = "make room on the disk; the next write opens the database again"
            raise StoreError("RocksDB cannot write", where=where, value=str(error)[:300], fix=fix) from error

    def _open_again(self, where: str) -> None:
        """Open the database again after a write that failed; readers wait for it.

        Raises:
            StoreError: there is no room yet, or a scan is in progress; the open database stays open.
        """
        self._check_for_room(where)
        with self._gate.alone(), self._turn:
            if not self._has_failed:
                return
            if self._scans or self._db is None:
                what = "closed" if self._db is None else "being read, and cannot be opened again"
                raise StoreError(f"the database is {what}", where=where)
            self._close()
            try:
                self._open(read_only=False)
            except StoreError:
                self._open(read_only=True)  # lookups go on; the next write tries again
                raise
            self._has_failed = False

    def _check_for_room(self, where: str) -> None:
        """See whether what RocksDB writes when it opens the database fits, before the open one is given up."""
        needed = _SPARE_BYTES + sum(path.stat().st_size for path in self.folder.glob("*.log"))
        probe = self.folder / _PROBE
        try:
            try:
                with probe.open("wb") as file:
                    for start in range(0, needed, _SPARE_BYTES):
                        file.write(bytes(min(_SPARE_BYTES, needed - start)))
                    os.fsync(file.fileno())
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            fix = "make room on the disk"
            raise StoreError("RocksDB cannot write", where=where, value=str(error), fix=fix) from error

    # The end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        families, self._families = self._families, {}
        db, self._db = self._db, None
        problem = ""
        for one in [*families.values(), *([] if db is None else [db])]:
            try:
                one.close()
            except Exception as error:  # closing flushes
                problem = str(error)[:300]
        if problem:
            # What was written is in the log, from which the next opening takes it.
            _log.warning("%s: RocksDB was closed without a flush: %s", self.folder, problem)

    def close(self) -> None:
        """Close the database; may be called again."""
        with self._gate.alone(), self._turn:
            self.is_open = False
            self._close()


def _fix_of(message: str) -> str:
    low = message.lower()
    for mark in ("permission denied", "read-only", "no space", "not a directory"):
        if mark in low:
            return _FIX_OF_FOLDER
    return next((fix for mark, fix in _FIXES.items() if mark in low), _FIX_OF_FOLDER)

"""Rows in memory that the processes of one machine share: a bounded copy, which any of them reads and fills.

A segment is a file in /dev/shm: sets of 32 slots, and two sets that a key may be in. A slot has the key, the row,
their CRC-32C, and a version whose two lowest bits say whether it is empty, being written, or whole.

Readers take no lock: they copy a row, then compare version and checksum, and read again what has changed meanwhile.
Writers take turns by a lock of the file, which the system releases when a process is killed. A slot that a killed
process left half written is not read, and the next writer uses it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, StoreError
from viviane.ops.crc32c import crc32c
from viviane.ops.resp import sealed_rows
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows

_FOLDER: Final = Path("/dev/shm")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,180}")
_WAYS: Final = 32
_SPARE: Final = 16
"""A 16th more slots than rows: of two sets the emptier one takes a new key, so that sets are nearly never full."""
_HEADER: Final = struct.Struct("<8sQQI")
_HEADER_BYTES: Final = 4096
_MAGIC: Final = b"vvshare2"
_EMPTY, _WRITING, _WHOLE = 0, 1, 2
_STATE: Final = np.uint32(3)
_READS: Final = 4
_FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_SLOT_BYTES: Final = 8 + 4 + 4 + 4  # key, version, checksum, time of use


class SharedTier:
    """Rows in a segment of /dev/shm, at most `max_rows` or as many as `max_bytes` hold; others make room.

    All processes that open a name have to hold the same table: rows that one of them inserts are read by the others.

    Args:
        name: of the segment; the user's number is part of the file's name.
        layout: of the rows.
        max_rows: most rows.
        max_bytes: of the segment; None: as many as `max_rows` need.
        eviction: "oldest" removes rows that were not read for longest, "random" any; both within two sets.
        remove: whether the process that closes it last removes it.

    Raises:
        StoreError: there is no shared memory, or no room in it; the segment has other rows, or another owner.

    Example:
        >>> from viviane.store import Column
        >>> layout = RowLayout([Column("weight", "float32", 2)])
        >>> one, other = (SharedTier("doctest", layout, max_rows=100) for _ in range(2))
        >>> one.put(np.array([7]), np.ones((1, 8), np.uint8))
        >>> out = layout.zeros(1)
        >>> other.fetch(np.array([7]), out).tolist(), out.sum().tolist()
        ([True], 8)
        >>> one.close(); other.close()
    """

    def __init__(
        self,
        name: str,
        layout: RowLayout,
        *,
        max_rows: int,
        max_bytes: int | None = None,
        eviction: Literal["oldest", "random"] = "random",
        remove: bool = True,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError("not a valid name of shared memory", value=name[:200], allowed="A-Z a-z 0-9 _ . -")
        self.name, self.layout, self.eviction, self.remove = "shared", layout, eviction, remove
        self._path = _FOLDER / f"viviane-{os.getuid()}-{name}"
        self._where = str(self._path)
        self.num_sets = -(-max(1, max_rows) * (_SPARE + 1) // (_SPARE * _WAYS))
        if max_bytes is not None:
            set_bytes = _WAYS * (layout.row_bytes + _SLOT_BYTES)
            self.num_sets = min(self.num_sets, (max_bytes - _HEADER_BYTES) // set_bytes)
            if self.num_sets < 1:
                raise ConfigError("shared memory is too small for rows", where=self._where, value=max_bytes,
                                  allowed=f"at least {_HEADER_BYTES + set_bytes} bytes")  # fmt: skip
        self._counter = StatsCounter(layout.row_bytes)
        self._lock = threading.RLock()
        self._random = np.random.default_rng()
        self._file = self._users = -1
        self._is_open = False
        try:
            self._open()
        except OSError as error:
            self._leave()
            raise StoreError("shared memory cannot be opened", where=self._where, value=str(error)[:200],
                             fix="make room in /dev/shm, or give the table less") from error  # fmt: skip
        except BaseException:
            self._leave()
            raise

    # Segment ----------------------------------------------------------------------------------------------------

    @property
    def _num_bytes(self) -> int:
        return _HEADER_BYTES + self.num_sets * _WAYS * (self.layout.row_bytes + _SLOT_BYTES)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._users = os.open(f"{self._path}.users", flags, 0o600)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        self._file = os.open(self._path, flags, 0o600)
        if os.fstat(self._file).st_uid != os.getuid():
            raise StoreError("the shared memory belongs to another user", where=self._where, fix="use another name")
        header = _HEADER.pack(_MAGIC, self.layout.row_bytes, self.num_sets, crc32c(str(self.layout.to_json()).encode()))
        with self._turn():
            known = os.pread(self._file, _HEADER.size, 0)
            fits = known == header and os.fstat(self._file).st_size == self._num_bytes
            if known[:8] != _MAGIC or (not fits and self._is_alone()):  # new, or those who made it were killed
                os.ftruncate(self._file, 0)
                os.posix_fallocate(self._file, 0, self._num_bytes)  # else a full /dev/shm would kill the process later
                os.pwrite(self._file, header, 0)
            elif not fits:
                raise StoreError("the shared memory holds another table, or has another size",
                                 where=self._where, fix="use another name, or the settings of the others")  # fmt: skip
        self._map(mmap.mmap(self._file, self._num_bytes))

    def _map(self, memory: Any) -> None:
        start, slots = _HEADER_BYTES, self.num_sets * _WAYS

        def part(kind: type, width: int = 1) -> Any:
            nonlocal start
            found: NDArray[Any] = np.frombuffer(memory, kind, slots * width, start)
            start += found.nbytes
            return found

        self._keys: NDArray[np.int64] = part(np.int64)
        self._versions: NDArray[np.uint32] = part(np.uint32)
        self._sums: NDArray[np.uint32] = part(np.uint32)
        self._used: NDArray[np.uint32] = part(np.uint32)
        self._rows: NDArray[np.uint8] = part(np.uint8, self.layout.row_bytes).reshape(slots, -1)
        self._is_open = True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Write alone, of all threads and processes."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError("the tier is closed", where=self._where)

    # Reading ----------------------------------------------------------------------------------------------------

    def _sets(self, keys: Keys) -> NDArray[np.int64]:
        """Return the sets (n, 2) that keys may be in."""
        found = np.empty((len(keys), 2), np.int64)
        for i, factor in enumerate(_FACTORS):
            mixed = keys.view(np.uint64) * factor
            mixed ^= mixed >> np.uint64(32)
            found[:, i] = (mixed * factor >> np.uint64(20)) % np.uint64(self.num_sets)
        return found

    def _are_whole(self, sets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots of sets hold rows, (n, 2 * ways)."""
        states = self._versions.reshape(-1, _WAYS)[sets] & _STATE
        found: NDArray[np.bool_] = states.reshape(len(sets), 2 * _WAYS) == _WHOLE
        return found

    def _places(self, keys: Keys, sets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each key, -1 where it is not there."""
        match = self._keys.reshape(-1, _WAYS)[sets].reshape(len(keys), 2 * _WAYS) == keys[:, None]
        match &= self._are_whole(sets)
        return np.where(match.any(1), _slot(sets, match.argmax(1)), -1)

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        found = np.zeros(len(keys), np.bool_)
        with self._counter.fetching() as count:
            self._check_open()
            left, damaged = np.arange(len(keys)), 0
            for _ in range(_READS):
                left, damaged = self._read(keys, left, out, found)
                if not len(left):
                    break
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits, damaged=damaged)
        return found

    def _read(self, keys: Keys, left: Keys, out: Rows, found: Found) -> tuple[Keys, int]:
        """Read some of the keys; returns those that changed meanwhile, and how many do not have their checksum."""
        places = self._places(keys[left], self._sets(keys[left]))
        there = places >= 0
        left, places = left[there], places[there]
        versions = self._versions[places]
        rows, sums = self._rows[places], self._sums[places]
        unchanged = (self._versions[places] == versions) & (self._keys[places] == keys[left])
        good = unchanged & (_sums(keys[left], rows) == sums)
        found[left[good]] = True
        out[left[good]] = rows[good]
        if self.eviction == "oldest":
            self._used[places] = int(time.time())
        return left[~good], int(np.count_nonzero(unchanged & ~good))

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows."""
        check_batch_rows(batch_rows)
        self._check_open()
        for start in range(0, len(self._keys), batch_rows):
            part = slice(start, start + batch_rows)
            keys = self._keys[part][self._versions[part] & _STATE == _WHOLE]
            rows = self.layout.empty(len(keys))
            found = self.fetch(keys, rows)
            if found.any():
                yield keys[found], rows[found]

    def num_rows(self) -> int:
        """Return the number of keys."""
        self._check_open()
        return int(np.count_nonzero(self._versions & _STATE == _WHOLE))

    # Writing ----------------------------------------------------------------------------------------------------

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows."""
        self._write(keys, rows, present=True, absent=True)

    def replace(self, keys: Keys, rows: Rows) -> None:
        """Replace the rows of those keys that are there."""
        self._write(keys, rows, present=True, absent=False)

    def fill(self, keys: Keys, rows: Rows) -> None:
        """Insert rows of those keys that are not there."""
        self._write(keys, rows, present=False, absent=True)

    def _write(self, keys: Keys, rows: Rows, *, present: bool, absent: bool) -> None:
        self.layout.check_rows(keys, rows)
        _, last = np.unique(keys[::-1], return_index=True)  # of repeated keys the last one counts
        last = len(keys) - 1 - last
        keys, rows = keys[last], rows[last]
        with self._counter.putting(len(keys)), self._turn():
            self._check_open()
            sets = self._sets(keys)
            places = self._places(keys, sets)
            there = places >= 0
            if present and there.any():
                self._store(places[there], keys[there], rows[there])
            new = np.flatnonzero(~there) if absent else np.empty(0, np.int64)
            while len(new):
                chosen = self._room(sets[new])
                _, first = np.unique(chosen // _WAYS, return_index=True)  # one key a set at a time
                self._store(chosen[first], keys[new[first]], rows[new[first]])
                new = np.delete(new, first)

    def _room(self, sets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choose a slot for each new key: an empty one of the emptier set, else one whose row makes room."""
        whole = self._are_whole(sets)
        load = whole.reshape(-1, 2, _WAYS).sum(2)
        second = np.arange(2 * _WAYS) >= _WAYS
        wanted = (load[:, 1] < load[:, 0])[:, None] == second
        order = np.where(whole, 2, np.where(wanted, 0, 1))
        choice = order.argmin(1)
        full = np.flatnonzero(whole.all(1))
        if self.eviction == "oldest":
            used = self._used.reshape(-1, _WAYS)[sets[full]]
            choice[full] = used.reshape(len(full), 2 * _WAYS).argmin(1)
        else:
            choice[full] = self._random.integers(0, 2 * _WAYS, len(full))
        return _slot(sets, choice)

    def _store(self, places: NDArray[np.int64], keys: Keys, rows: Rows) -> None:
        sums = _sums(keys, rows)
        versions = (self._versions[places] & ~_STATE) + np.uint32(4)
        self._versions[places] = versions | np.uint32(_WRITING)
        self._keys[places], self._sums[places], self._used[places] = keys, sums, int(time.time())
        self._rows[places] = rows
        self._versions[places] = versions | np.uint32(_WHOLE)

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there."""
        self.layout.check_keys(keys)
        own = np.unique(keys)
        with self._turn():
            self._check_open()
            places = self._places(own, self._sets(own))
            places = places[places >= 0]
            self._versions[places] = (self._versions[places] & ~_STATE) + np.uint32(4)
        self._counter.erased(len(places))
        return len(places)

    # End --------------------------------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        """Return what this process counted."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Do nothing: memory does not survive the machine."""

    def close(self) -> None:
        """Let go of the memory; the last process removes it, if it is to be removed."""
        with self._lock:
            if not self._is_open:
                return
            none: Any = np.empty(0, np.int64)
            self._keys, self._rows = none, np.empty((0, self.layout.row_bytes), np.uint8)
            self._versions = self._sums = self._used = none.astype(np.uint32)
            self._leave()

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process uses it
            return False
        fcntl.flock(self._users, fcntl.LOCK_SH)
        return True

    def _leave(self) -> None:
        if self._users >= 0 and self.remove and self._is_alone():
            self._path.unlink(missing_ok=True)
            Path(f"{self._path}.users").unlink(missing_ok=True)
        self._is_open = False
        for file in (self._file, self._users):
            if file >= 0:
                os.close(file)
        self._file = self._users = -1


def _slot(sets: NDArray[np.int64], choice: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return slots by their number among those of two sets."""
    found: NDArray[np.int64] = sets[np.arange(len(sets)), choice // _WAYS] * _WAYS + choice % _WAYS
    return found


def _sums(keys: Keys, rows: Rows) -> NDArray[np.uint32]:
    """Return the CRC-32C of each key and its row."""
    sealed = sealed_rows(np.ascontiguousarray(keys), np.ascontiguousarray(rows))
    return np.ascontiguousarray(sealed[:, -4:]).view("<u4")[:, 0]

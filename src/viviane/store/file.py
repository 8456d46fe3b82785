"""Rows of contiguous ids in one file, read and written in address order."""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, StoreError
from viviane.core.file_names import refuse_links
from viviane.core.files import write_bytes_atomic, write_json_atomic
from viviane.core.json_files import read_json_object
from viviane.core.locations import local_path
from viviane.core.locks import locked
from viviane.store import file_sweep, pass_stream
from viviane.store.file_sweep import SweptFile
from viviane.store.journal import Journal
from viviane.store.pass_area import PassArea
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, Exchange, check_batch_rows

FORMAT: Final = "viviane-file-tier"
_SUM_BYTES: Final = 4
_GAP_BYTES: Final = 16 << 10  # reading over a gap of this size costs less than another call
_MOST_BYTES: Final = 8 << 20  # of one read
_AHEAD_BYTES: Final = 32 << 20
_LARGE_BYTES: Final = 256 << 10
_RUNS_AHEAD: Final = 256
_PIECE_ROWS: Final = 65_536
_PAGE_BYTES: Final = 4 << 10  # a hole of this size is written with its neighbours: the disk writes its page anyway


class FileTier:
    """Rows of ids 0 <= id < num_ids: row i stands at byte i * row_bytes of a file.

    The file is sparse: rows that were never written take no disk. Calls sort their keys, so that the disk is read and
    written in address order, and read neighbouring rows at once. Which rows are there is kept in memory, one bit each.

        <folder>/tier.json      layout and number of ids
        <folder>/rows.bin       the rows
        <folder>/present.bin    a bit for each id, as of the last flush, and a check sum
        <folder>/journal.bin    rows that were written since (`durable`)

    Args:
        folder: of the tier; made if it is not there, opened and checked otherwise.
        layout: of the rows.
        num_ids: ids lie below this.
        durable: write rows to a journal first, so that a crash tears none. False is for a working file that is made
            for each process: it is removed from the folder as soon as it is open, and its disk is given back when
            it is closed or the process ends, however that is.
        name: in messages.

    Raises:
        StoreError: the folder holds another layout or number of ids, or is damaged.
        ConfigError: another process has it open (`durable`).

    Example:
        >>> import tempfile
        >>> from viviane.store.row_layout import Column
        >>> tier = FileTier(Path(tempfile.mkdtemp()) / "t", RowLayout([Column("weight", "float32", 2)]), 100)
        >>> tier.put(np.array([99, 3]), np.ones((2, 8), np.uint8))
        >>> out = tier.layout.zeros(2)
        >>> tier.fetch(np.array([3, 4]), out).tolist(), out.sum(1).tolist(), tier.num_rows()
        ([True, False], [8, 0], 2)
        >>> tier.close()
    """

    def __init__(
        self, folder: str | Path, layout: RowLayout, num_ids: int, *, durable: bool = True, name: str = "file"
    ) -> None:
        if num_ids < 1:
            raise ConfigError("a file tier needs at least one id", value=num_ids)
        self.name, self.layout, self.num_ids, self.durable = name, layout, num_ids, durable
        self.folder = local_path(folder)
        self._counter = StatsCounter(layout.row_bytes)
        self._lock = threading.RLock()
        self._where = f"tier {name!r}, {self.folder}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._direct = -1
        self._held = ExitStack()
        if durable:
            self._held.enter_context(locked(self.folder, once=True))
        try:
            refuse_links(self.folder, error=StoreError)
            self._open()
        except BaseException:
            self._held.close()
            raise

    def _open(self) -> None:
        if self.durable:
            self._open_description()
        self._present = np.zeros(-(-self.num_ids // 8), np.uint8)
        self._read_present()
        self._area: PassArea | None = None
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._file = os.open(self.folder / "rows.bin", flags, 0o644)
        if not self.durable and hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # not every file system can
                self._direct = os.open(self.folder / "rows.bin", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        self._journal = Journal(self.folder / "journal.bin", self.layout) if self.durable else None
        if self._journal is None:
            self._remove_working_file()
            return
        for keys, rows in self._journal.replay():
            self._check_ids(keys)
            self._write(keys, rows)
        self.flush()

    def _remove_working_file(self) -> None:
        """Take the working file out of its folder; Windows does so when it is closed."""
        with suppress(PermissionError):
            (self.folder / "rows.bin").unlink(missing_ok=True)
            self.folder.rmdir()

    def _description(self) -> dict[str, object]:
        return {"format": FORMAT, "layout": self.layout.to_json(), "num_ids": self.num_ids}

    def _open_description(self) -> None:
        """Read and compare the description, or write it."""
        path = self.folder / "tier.json"
        if not path.exists():
            write_json_atomic(path, self._description())
            return
        found = read_json_object(path, error=StoreError)
        if found.get("format") != FORMAT:
            raise StoreError("not a file tier", where=str(path), allowed=FORMAT)
        theirs = RowLayout.from_json(found.get("layout"), where=str(path), error=StoreError)
        if theirs != self.layout or found.get("num_ids") != self.num_ids:
            raise StoreError(
                "the tier holds rows of another form", where=str(path),
                value=f"{found.get('num_ids')!r:.40} x {theirs}", allowed=f"{self.num_ids} x {self.layout}",
                fix="name another folder",
            )  # fmt: skip

    def _read_present(self) -> None:
        path = self.folder / "present.bin"
        if not self.durable or not path.exists():
            return
        data = np.fromfile(path, np.uint8)
        if len(data) != len(self._present) + _SUM_BYTES:
            raise StoreError("the list of rows was truncated", where=str(path), value=len(data),
                             allowed=f"{len(self._present) + _SUM_BYTES} bytes")  # fmt: skip
        if _sum_of(data[:-_SUM_BYTES]) != data[-_SUM_BYTES:].tobytes():
            raise StoreError("the list of rows was altered: its check sum differs", where=str(path),
                             fix="use a copy of it")  # fmt: skip
        self._present = data[:-_SUM_BYTES].copy()

    def _check_ids(self, keys: Keys) -> None:
        if len(keys) and not (int(keys.min()) >= 0 and int(keys.max()) < self.num_ids):
            wrong = keys[(keys < 0) | (keys >= self.num_ids)][0]
            raise StoreError("an id lies outside the tier", where=self._where, value=int(wrong),
                             allowed=f"0 <= id < {self.num_ids}")  # fmt: skip

    def _is_there(self, keys: Keys) -> Found:
        found: Found = (self._present[keys >> 3] >> (keys & 7).astype(np.uint8)) & 1 != 0
        return found

    # The contract -----------------------------------------------------------------------------------------------

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; ids outside the tier are not found."""
        self.layout.check_out(keys, out)
        with self._counter.fetching() as count, self._lock:
            self._check_open()
            inside = (keys >= 0) & (keys < self.num_ids)
            there = inside & self._is_there(np.where(inside, keys, 0))
            places = np.flatnonzero(there)
            num_bytes = self._read_ids(keys[places], places, out)
            count(hits=len(places), misses=len(keys) - len(places), num_bytes=num_bytes)
        return there

    def _read_ids(self, ids: Keys, targets: Keys, out: Rows) -> int:
        positions = self._positions(ids)
        order = np.argsort(positions, kind="stable")
        return self._read(positions[order], targets[order], out)

    def _read(self, ids: Keys, targets: Keys, out: Rows) -> int:
        """Read rows at rising positions into lines of `out`; returns the bytes read."""
        size = self.layout.row_bytes
        runs = list(_runs(ids, max(1, _GAP_BYTES // size), max(1, _MOST_BYTES // size)))
        total = 0
        for first, last in self._read_ahead(runs, ids):
            start = int(ids[first])
            wanted = (int(ids[last - 1]) + 1 - start) * size
            data = _pread(self._file, wanted, start * size)
            if len(data) != wanted:
                raise StoreError("the tier's file was truncated", where=str(self.folder / "rows.bin"),
                                 value=f"{len(data)} bytes at {start * size}", allowed=f"{wanted}")  # fmt: skip
            rows = np.frombuffer(data, np.uint8).reshape(-1, size)
            out[targets[first:last]] = rows if len(rows) == last - first else rows[ids[first:last] - start]
            total += wanted
        return total

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows.

        Raises:
            StoreError: an id lies outside the tier; nothing is changed then. The disk is full.
        """
        self.layout.check_rows(keys, rows)
        self._check_ids(keys)
        with self._counter.putting(len(keys)), self._lock:
            self._check_open()
            if self._journal is not None:
                self._journal.append(keys, rows)
            self._write(keys, rows)

    def exchange(self, change: Exchange) -> Found:
        """Write and read the rows of a change of passes; see `viviane.store.file_sweep`.

        Rows of a working file that a later pass needs are written beside the others that it needs. All others stay at
        the place of their id; where many pages of those are concerned, one sweep over the file reads and writes them.

        Returns:
            (m,), which rows of `change.coming` were there and taken.
        """
        with self._lock:
            self._check_open()
            self._check_ids(change.leaving)
            self._check_ids(change.coming)
            there = self._is_there(change.coming)
            swept = SweptFile(self._file, self._direct, self.layout.row_bytes, self.folder / "rows.bin")
            left, came = self._stream(swept, change, there)
            positions, waiting = self._positions(change.coming), there & ~came
            stay = np.flatnonzero(~left)
            for leaving, chosen in (
                (stay, waiting & (positions < self.num_ids)),
                (stay[:0], waiting & (positions >= self.num_ids)),
            ):
                coming = np.flatnonzero(chosen)
                coming = coming[np.argsort(positions[coming], kind="stable")]
                own = change.part(leaving, coming, positions[coming])
                if not self.durable and swept.is_worth_it(own):
                    self._sweep(swept, own)
                else:
                    self._exchange_pieces(own, change.coming[coming])
        return there

    def _stream(self, swept: SweptFile, change: Exchange, there: Found) -> tuple[Found, Found]:
        """Write rows whose next pass is known beside each other, and read those that stand so already.

        Returns:
            which rows of `leaving` and of `coming` moved.
        """
        left, came = np.zeros(len(change.leaving), np.bool_), np.zeros(len(change.coming), np.bool_)
        size = self.layout.row_bytes
        if self.durable or not swept.block_rows or change.later is None:
            return left, came
        if int((change.later >= 0).sum()) * size < file_sweep.SMALLEST_BYTES // 8:
            return left, came
        start = time.perf_counter()
        if self._area is None:
            self._area = PassArea(self.num_ids, swept.rows_of(pass_stream.EXTENT_BYTES))
        rounds, positions = pass_stream.rounds_of(change, self._area, self.num_ids, size, there)
        num_read, num_written = pass_stream.stream(swept, change, rounds, positions)
        left = self._area.stands_apart(change.leaving)
        for one in rounds:
            came[one.coming] = True
        self._note_present(change.leaving[left])
        self._counter.swept(time.perf_counter() - start, rows_read=int(came.sum()), rows_written=int(left.sum()),
                            bytes_read=num_read, bytes_written=num_written)  # fmt: skip
        return left, came

    def _sweep(self, swept: SweptFile, change: Exchange) -> None:
        start = time.perf_counter()
        if self._area is not None:
            self._area.release(change.leaving)
        num_read, num_written = swept.sweep(change, self._present)
        self._note_present(change.leaving)
        self._counter.swept(time.perf_counter() - start, rows_read=len(change.coming), bytes_read=num_read,
                            rows_written=len(change.leaving), bytes_written=num_written)  # fmt: skip

    def _exchange_pieces(self, change: Exchange, coming: Keys) -> None:
        """Put rows, then fetch the ids `coming`, a piece at a time: all is written before anything is read."""
        for low in range(0, len(change.leaving), _PIECE_ROWS):
            places = np.arange(low, min(low + _PIECE_ROWS, len(change.leaving)))
            rows = self.layout.empty(len(places))
            change.give(places, rows)
            self.put(change.leaving[places], rows)
        for low in range(0, len(coming), _PIECE_ROWS):
            places = np.arange(low, min(low + _PIECE_ROWS, len(coming)))
            rows = self.layout.empty(len(places))
            self.fetch(coming[places], rows)
            change.take(places, rows, np.arange(len(places)))

    def _positions(self, ids: Keys) -> NDArray[np.int64]:
        """Return where rows stand in the file."""
        return ids if self._area is None else self._area.positions(ids)

    def _note_present(self, ids: Keys) -> None:
        np.bitwise_or.at(self._present, ids >> 3, (1 << (ids & 7)).astype(np.uint8))

    def _write(self, keys: Keys, rows: Rows) -> None:
        order = np.argsort(keys, kind="stable")
        ids = keys[order]
        last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]  # of equal keys the last row counts
        order, ids = order[last], ids[last]
        if self._area is not None:
            self._area.release(ids)
        size = self.layout.row_bytes
        runs = list(_runs(ids, _PAGE_BYTES // size, max(1, _MOST_BYTES // size)))
        for first, stop in self._read_ahead(runs, ids):  # pages that are written in part are read
            start, count = int(ids[first]), int(ids[stop - 1]) + 1 - int(ids[first])
            part = rows[order[first:stop]]
            if count > stop - first:  # rows between them are written again as they are
                part = self._with_holes(start, count, ids[first:stop] - start, part)
            _pwrite(self._file, part, start * size, self._where)
        self._note_present(ids)

    def _read_ahead(self, runs: list[tuple[int, int]], ids: Keys) -> Iterator[tuple[int, int]]:
        """Yield runs, and let the system read those that follow: a disk answers many requests in the time of one."""
        if len(runs) < 2 or not hasattr(os, "posix_fadvise"):
            yield from runs
            return
        size, ahead, waiting = self.layout.row_bytes, 0, 0
        for number, (first, last) in enumerate(runs):
            while ahead < len(runs) and ahead - number < _RUNS_AHEAD and waiting < _AHEAD_BYTES:
                start, stop = int(ids[runs[ahead][0]]) * size, (int(ids[runs[ahead][1] - 1]) + 1) * size
                if stop - start < _LARGE_BYTES:  # of larger ones the disk is at work for long enough
                    os.posix_fadvise(self._file, start, stop - start, os.POSIX_FADV_WILLNEED)
                waiting, ahead = waiting + stop - start, ahead + 1
            waiting -= (int(ids[last - 1]) + 1 - int(ids[first])) * size
            yield first, last

    def _with_holes(self, start: int, count: int, places: Keys, rows: Rows) -> Rows:
        """Return `count` rows from `start` on as the file has them, with some replaced."""
        size = self.layout.row_bytes
        whole = np.zeros((count, size), np.uint8)
        data = np.frombuffer(_pread(self._file, count * size, start * size), np.uint8)
        whole.reshape(-1)[: len(data)] = data  # behind the end of the file are no rows yet
        whole[places] = rows
        return whole

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there; their place on the disk stays."""
        self.layout.check_keys(keys)
        with self._lock:
            self._check_open()
            own = np.unique(keys[(keys >= 0) & (keys < self.num_ids)])
            own = own[self._is_there(own)]
            if self._journal is not None and len(own):
                self.flush()  # a journal cannot hold a removal: it must not bring the rows back
            np.bitwise_and.at(self._present, own >> 3, ~(1 << (own & 7)).astype(np.uint8))
            if self.durable and len(own):
                self._write_present()
        self._counter.erased(len(own))
        return len(own)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows, in order of their ids."""
        check_batch_rows(batch_rows)
        step = max(8, -(-batch_rows // 8) * 8)
        for start in range(0, self.num_ids, step):
            bits = np.unpackbits(self._present[start >> 3 : (start + step) >> 3], bitorder="little")
            keys = (np.flatnonzero(bits) + start).astype(np.int64)
            for low in range(0, len(keys), batch_rows):
                part = np.ascontiguousarray(keys[low : low + batch_rows])
                rows = self.layout.empty(len(part))
                with self._lock:
                    self._check_open()
                    there = self._is_there(part)
                    num_bytes = self._read_ids(part[there], np.flatnonzero(there), rows)
                self._counter.moved(bytes_read=num_bytes)
                yield part[there], rows[there]

    def num_rows(self) -> int:
        """Return the number of keys."""
        with self._lock:
            self._check_open()
            return int(np.unpackbits(self._present).sum(dtype=np.int64))

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened."""
        return self._counter.snapshot()

    def _write_present(self) -> None:
        write_bytes_atomic(self.folder / "present.bin", self._present.tobytes() + _sum_of(self._present))

    def flush(self) -> None:
        """Write all rows to the disk; where `durable` is False, do nothing."""
        with self._lock:
            self._check_open()
            if self._journal is not None:
                os.fsync(self._file)
                self._write_present()
                self._journal.clear()

    def close(self) -> None:
        """Flush and close the files."""
        with self._lock:
            if self._file < 0:
                return
            self.flush()
            if self._journal is not None:
                self._journal.close()
            os.close(self._file)
            if self._direct >= 0:
                os.close(self._direct)
            self._file = self._direct = -1
            self._held.close()
            if not self.durable and self.folder.exists():
                self._remove_working_file()

    def _check_open(self) -> None:
        if self._file < 0:
            raise StoreError("the tier is closed", where=self._where)


def _sum_of(data: NDArray[np.uint8]) -> bytes:
    return zlib.crc32(data.data).to_bytes(_SUM_BYTES, "little")


def _runs(ids: Keys, gap: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 of runs of rising ids that are at most `gap` apart and span at most `most` ids.

    Example:
        >>> list(_runs(np.array([1, 2, 3, 9, 10]), 0, 2))
        [(0, 2), (2, 3), (3, 5)]
    """
    if not len(ids):
        return
    breaks = np.flatnonzero(np.diff(ids) > gap + 1) + 1
    for first, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(ids)], strict=True):
        begin = first
        while begin < stop:
            end = min(stop, begin + int(np.searchsorted(ids[begin:stop], ids[begin] + most)))
            yield begin, end
            begin = end


def _pread(file: int, size: int, offset: int) -> bytes | bytearray:
    if sys.platform == "win32":
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, size)
    data = os.pread(file, size, offset)
    while len(data) < size:
        more = os.pread(file, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _pwrite(file: int, data: NDArray[np.uint8], offset: int, where: str) -> None:
    view = data.data.cast("B")
    try:
        while len(view):
            if sys.platform == "win32":
                os.lseek(file, offset, os.SEEK_SET)
                done = os.write(file, view)
            else:
                done = os.pwrite(file, view, offset)
            view, offset = view[done:], offset + done
    except OSError as error:
        raise StoreError("a tier cannot be written", where=where, value=str(error), fix="make room") from error

"""Rows of any 64-bit keys in sorted files: written and merged at sequential speed, found by binary search."""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import StoreError
from viviane.core.exchange import sync_folder
from viviane.core.file_names import file_inside, refuse_links
from viviane.core.files import write_json_atomic
from viviane.core.json_files import expected_form, read_json_object
from viviane.core.locations import local_path
from viviane.core.locks import locked
from viviane.store.host import HostTier
from viviane.store.journal import Journal
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows

FORMAT: Final = "viviane-sorted-runs"
_RUN: Final = re.compile(r"run-([0-9]{8,12})\.bin")
_MOST_RUNS: Final = 10**12
_PIECE_ROWS: Final = 65_536
_GAP_ROWS: Final = 32


class Run:
    """One sorted file: keys, rising; a flag for each that it was erased; the rows, in the order of the keys.

    Args:
        path: of the file.
        count: keys in it.
        layout: of the rows.
    """

    def __init__(self, path: Path, count: int, layout: RowLayout) -> None:
        self.path, self.count, self.layout = path, count, layout
        self.keys: NDArray[np.int64] = np.memmap(path, np.int64, "r", 0, (count,))
        self.erased: NDArray[np.bool_] = np.memmap(path, np.bool_, "r", count * 8, (count,))
        self.first_row = count * 9

    def find(self, keys: Keys) -> Keys:
        """Return the place of each key, -1 where it is not."""
        places = np.searchsorted(self.keys, keys)
        inside = np.minimum(places, self.count - 1)
        return np.where(self.keys[inside] == keys, inside, -1)

    def read(self, places: Keys, file: int) -> Rows:
        """Return the rows at some rising places, read in their order; neighbours at once."""
        size, out = self.layout.row_bytes, self.layout.empty(len(places))
        if not len(places):
            return out
        breaks = np.flatnonzero(np.diff(places) > _GAP_ROWS) + 1
        for first, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(places)], strict=True):
            for low in range(first, stop, _PIECE_ROWS):
                high = min(stop, low + _PIECE_ROWS)
                start, count = int(places[low]), int(places[high - 1] - places[low]) + 1
                data = os.pread(file, count * size, self.first_row + start * size)
                if len(data) != count * size:
                    raise StoreError("a run was truncated", where=str(self.path), value=len(data))
                rows = np.frombuffer(data, np.uint8).reshape(-1, size)
                out[low:high] = rows[places[low:high] - start]
        return out


class SortedRunTier:
    """Rows of any int64 keys on disk.

    New rows go to a journal and to memory. When memory holds `memory_rows`, or at a flush, they become a run: a file
    sorted by key. When there are more than `most_runs`, all are merged into one, at the disk's sequential speed, and
    erased keys disappear. `manifest.json` names the runs with their check sums; it is replaced when a run is whole on
    the disk, so that a crash leaves the old runs or the new one.

    Args:
        folder: of the tier; opened where it exists.
        layout: of the rows.
        memory_rows: rows in memory before a run is written.
        most_runs: runs before they are merged.
        verify: compare the check sums of all runs when the tier is opened, which reads them whole.
        name: in messages.

    Raises:
        StoreError: the folder holds another layout, or is damaged.
        ConfigError: another process has it open.

    Example:
        >>> import tempfile
        >>> from viviane.store.row_layout import Column
        >>> tier = SortedRunTier(Path(tempfile.mkdtemp()) / "t", RowLayout([Column("weight", "float32", 2)]))
        >>> tier.put(np.array([10**15, -3]), np.ones((2, 8), np.uint8)); tier.flush()
        >>> [keys.tolist() for keys, rows in tier.scan()]
        [[-3, 1000000000000000]]
        >>> tier.close()
    """

    def __init__(
        self,
        folder: str | Path,
        layout: RowLayout,
        *,
        memory_rows: int = 1 << 18,
        most_runs: int = 8,
        verify: bool = True,
        name: str = "sorted runs",
    ) -> None:
        self.name, self.layout = name, layout
        self.folder = local_path(folder)
        self._memory_rows, self._most_runs = memory_rows, most_runs
        self._counter = StatsCounter(layout.row_bytes)
        self._lock = threading.RLock()
        self._files: dict[Path, int] = {}
        self._next = 0
        self._runs: list[Run] = []
        """From the oldest to the newest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sums: dict[str, int] = {}
        self._held = ExitStack()
        self._held.enter_context(locked(self.folder, once=True))
        try:
            refuse_links(self.folder, error=StoreError)
            self._open_runs(verify)
        except BaseException:
            self._held.close()
            raise
        self._recent = self._new_memory()
        self._erased: set[int] = set()
        self._journal: Journal | None = Journal(self.folder / "journal.bin", layout)
        for keys, rows in self._journal.replay():
            self._recent.put(np.array(keys), np.array(rows))
        self.flush()

    def _new_memory(self) -> HostTier:
        return HostTier(self.layout, max_rows=max(self._memory_rows, 1 << 20) * 2)

    def _open_runs(self, verify: bool) -> None:
        path = self.folder / "manifest.json"
        if not path.exists():
            self._write_manifest([])
        found = read_json_object(path, error=StoreError)
        if found.get("format") != FORMAT:
            raise StoreError("not a tier of sorted runs", where=str(path), allowed=FORMAT)
        theirs = RowLayout.from_json(found.get("layout"), where=str(path), error=StoreError)
        if theirs != self.layout:
            raise StoreError("the tier holds rows of another layout", where=str(path), value=str(theirs),
                             allowed=str(self.layout), fix="name another folder")  # fmt: skip
        with expected_form(str(path), StoreError):
            entries = [(str(one["file"]), int(one["rows"]), int(one["crc32"])) for one in found["runs"]]
            self._next = int(found["next"])
        numbers = [-1, *(_run_number(name, path) for name, _, _ in entries)]
        if not max(numbers) < self._next < _MOST_RUNS:
            allowed = f"{max(numbers) + 1} to {_MOST_RUNS - 1}"
            raise StoreError("the number of the next run is out of range", where=f"{path}, next",
                             value=str(self._next)[:50], allowed=allowed, fix="use a copy of the tier")  # fmt: skip
        for name, count, total in entries:
            run = file_inside(self.folder, name, where=str(path), error=StoreError)
            size = run.stat().st_size if run.is_file() else -1
            if count < 1 or size != count * (9 + self.layout.row_bytes):
                raise StoreError("a run is missing or truncated", where=str(run), value=f"{size} bytes",
                                 allowed=f"{count * (9 + self.layout.row_bytes)} bytes")  # fmt: skip
            if verify and _crc(run) != total:
                raise StoreError("a run was altered: its check sum differs", where=str(run), fix="use a copy of it")
            self._add_run(run, count, total)
        known = {run.path.name for run in self._runs}
        for left in self.folder.glob("run-*.bin"):
            if left.name not in known:  # a crash came before the manifest named it
                left.unlink()

    def _add_run(self, path: Path, count: int, total: int) -> None:
        run = Run(path, count, self.layout)
        if not bool((run.keys[1:] > run.keys[:-1]).all()):  # a difference could overflow
            raise StoreError("the keys of a run do not rise", where=str(path), fix="use a copy of it")
        self._runs.append(run)
        self._files[path] = os.open(path, os.O_RDONLY)
        self._sums[path.name] = total

    def _write_manifest(self, runs: list[Run]) -> None:
        entries = [{"file": run.path.name, "rows": run.count, "crc32": self._sums[run.path.name]} for run in runs]
        content = {"format": FORMAT, "layout": self.layout.to_json(), "next": self._next, "runs": entries}
        write_json_atomic(self.folder / "manifest.json", content)

    # The contract -----------------------------------------------------------------------------------------------

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        with self._counter.fetching() as count, self._lock:
            self._check_open()
            found = self._recent.fetch(keys, out)
            decided = found.copy()
            if self._erased:
                decided |= np.isin(keys, np.fromiter(self._erased, np.int64, len(self._erased)))
            num_bytes = int(found.sum()) * self.layout.row_bytes
            for run in reversed(self._runs):
                open_places = np.flatnonzero(~decided)
                if not len(open_places):
                    break
                order = open_places[np.argsort(keys[open_places], kind="stable")]
                places = run.find(keys[order])
                here = places >= 0
                decided[order[here]] = True
                alive = here.copy()
                alive[here] = ~run.erased[places[here]]
                out[order[alive]] = run.read(places[alive], self._files[run.path])
                found[order[alive]] = True
                num_bytes += int(alive.sum()) * self.layout.row_bytes
            hits = int(found.sum())
            count(hits=hits, misses=len(keys) - hits, num_bytes=num_bytes)
        return found

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows; see `viviane.store.Tier`."""
        self.layout.check_rows(keys, rows)
        with self._counter.putting(len(keys)), self._lock:
            self._check_open()
            assert self._journal is not None
            for start in range(0, len(keys), self._memory_rows):
                own, data = keys[start : start + self._memory_rows], rows[start : start + self._memory_rows]
                if self._recent.num_rows() + len(own) > self._memory_rows:
                    self.flush()
                self._journal.append(own, data)
                self._recent.put(own, data)
                self._erased.difference_update(own.tolist() if self._erased else [])

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there; they are gone from the disk when runs are merged."""
        self.layout.check_keys(keys)
        own = np.unique(keys)
        with self._lock:
            self._check_open()
            there = own[self.fetch(own, self.layout.empty(len(own)))]
            if len(there):
                self._recent.erase(there)
                self._erased |= set(there.tolist())
                self.flush()  # a journal cannot hold a removal
        self._counter.erased(len(there))
        return len(there)

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows as they are at the beginning, by rising key: a merge of all runs."""
        check_batch_rows(batch_rows)
        with self._lock:
            self._check_open()
            self.flush()
            runs = list(self._runs)
            files = [os.dup(self._files[run.path]) for run in runs]
        try:
            for keys, rows, erased in merged(runs, files, batch_rows):
                alive = ~erased
                if alive.any():
                    yield keys[alive], rows[alive]
        finally:
            for file in files:
                os.close(file)

    def num_rows(self) -> int:
        """Return the number of keys, by reading the keys of all runs."""
        with self._lock:
            self._check_open()
            self.flush()
            if len(self._runs) <= 1:
                return sum(int(run.count - run.erased.sum()) for run in self._runs)
            return sum(int((~erased).sum()) for _, _, erased in merged(self._runs, None, _PIECE_ROWS))

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """Write rows in memory as a run, and merge runs where they are too many."""
        with self._lock:
            self._check_open()
            assert self._journal is not None
            if self._recent.num_rows() or self._erased:
                self._write_recent()
                self._journal.clear()
            if len(self._runs) > self._most_runs:
                self.merge()

    def _write_recent(self) -> None:
        parts = list(self._recent.scan())
        gone = np.fromiter(self._erased, np.int64, len(self._erased))
        keys = np.concatenate([*(part for part, _ in parts), gone])
        rows = np.concatenate([*(part for _, part in parts), self.layout.zeros(len(gone))])
        erased = np.zeros(len(keys), np.bool_)
        erased[len(keys) - len(gone) :] = True
        order = np.argsort(keys, kind="stable")
        self._replace(iter([(keys[order], rows[order], erased[order])]), keep=self._runs, count=len(keys))
        self._recent.close()
        self._recent, self._erased = self._new_memory(), set()

    def merge(self) -> None:
        """Merge all runs into one without erased keys."""
        with self._lock:
            runs = list(self._runs)
            files = [self._files[run.path] for run in runs]
            count = sum(int((~erased).sum()) for _, _, erased in merged(runs, None, _PIECE_ROWS))
            alive = ((k[~e], r[~e], e[~e]) for k, r, e in merged(runs, files, _PIECE_ROWS))
            self._replace(alive, keep=[], count=count)
            for run in runs:
                os.close(self._files.pop(run.path))
                del self._sums[run.path.name]
                run.path.unlink()

    def _replace(self, parts: Iterator[tuple[Keys, Rows, Found]], *, keep: list[Run], count: int) -> None:
        """Write a run, then name it and the kept ones in the manifest."""
        path = self.folder / f"run-{self._next:08d}.bin"
        self._next += 1
        runs = list(keep)
        if count:
            total = _write_run(path, parts, count, self.layout)
            sync_folder(self.folder)
            self._counter.moved(bytes_written=count * (9 + self.layout.row_bytes))
            self._runs = runs
            self._add_run(path, count, total)
            runs = self._runs
        self._write_manifest(runs)
        self._runs = runs

    def _check_open(self) -> None:
        if self._journal is None:
            raise StoreError("the tier is closed", where=f"tier {self.name!r}, {self.folder}")

    def close(self) -> None:
        """Flush and close the files."""
        with self._lock:
            if self._journal is None:
                return
            self.flush()
            self._journal.close()
            self._journal = None
            for file in self._files.values():
                os.close(file)
            self._files = {}
            self._runs = []
            self._recent.close()
            self._held.close()


def merged(runs: list[Run], files: list[int] | None, batch_rows: int) -> Iterator[tuple[Keys, Rows, Found]]:
    """Yield the keys of all runs by rising key, each once, with the newest run's row and whether it was erased.

    Args:
        runs: from the oldest to the newest.
        files: open files of the runs; None: yield keys alone, with no rows.
        batch_rows: keys at once, about.
    """
    starts = [0] * len(runs)
    while True:
        alive = [i for i, run in enumerate(runs) if starts[i] < run.count]
        if not alive:
            return
        share = max(1, batch_rows // len(alive))
        bound = min(int(runs[i].keys[min(starts[i] + share, runs[i].count) - 1]) for i in alive)
        parts: list[tuple[Any, int, Keys]] = []
        for i in alive:
            stop = starts[i] + int(np.searchsorted(runs[i].keys[starts[i] : starts[i] + share], bound, side="right"))
            places = np.arange(starts[i], stop)
            parts.append((np.array(runs[i].keys[places]), i, places))
            starts[i] = stop
        keys = np.concatenate([own for own, _, _ in parts])
        order = np.argsort(keys, kind="stable")  # of equal keys the newest run's comes last
        last = np.append(keys[order][1:] != keys[order][:-1], True)
        chosen = order[last]
        erased = np.concatenate([runs[i].erased[places] for _, i, places in parts])[chosen]
        if files is None:
            yield keys[chosen], np.empty((0, 0), np.uint8), erased
            continue
        rows = np.concatenate([runs[i].read(places, files[i]) for _, i, places in parts])
        yield keys[chosen], rows[chosen], erased


def _write_run(path: Path, parts: Iterator[tuple[Keys, Rows, Found]], count: int, layout: RowLayout) -> int:
    at = 0
    with path.open("w+b") as file:
        file.truncate(count * (9 + layout.row_bytes))
        for keys, rows, erased in parts:
            for start, size, data in ((0, 8, keys), (count * 8, 1, erased), (count * 9, layout.row_bytes, rows)):
                file.seek(start + at * size)
                file.write(np.ascontiguousarray(data).data)
            at += len(keys)
        if at != count:
            raise StoreError("a run changed while it was written", where=str(path), value=at, allowed=str(count))
        file.flush()
        os.fsync(file.fileno())
    return _crc(path)


def _run_number(name: str, manifest: Path) -> int:
    """Return the number in the name of a run; the next one gets a larger number, and so a name of its own."""
    found = _RUN.fullmatch(name)
    if found is None:
        raise StoreError("not the name of a run", where=str(manifest), value=name[:100], allowed="run-00000000.bin")
    return int(found[1])


def _crc(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while data := file.read(4 << 20):
            total = zlib.crc32(data, total)
    return total

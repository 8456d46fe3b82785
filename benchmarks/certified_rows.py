"""Rows that certify themselves, looked up beside write-back and eviction: counts those that are torn, lost or stale.

    python benchmarks/certified_rows.py [--small] [--lookups 100000000] [--seconds 300]

A table lies in a file, and a cache in host memory holds a tenth of its rows. Readers look rows up: half of the lookups
ask for a fiftieth of the table, the others for any row, so that rows come and go all the time. Beside them a writer
replaces rows, and a thread writes all changed rows to the file again and again. A row is its version, and numbers that
follow from key and version. Each row that a reader gets must be whole and there, not older than what the writer had
finished or the reader had seen before the lookup began, and not newer than what the writer had begun when it ended. The
first that is not ends the run with an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from record import record
from viviane.store import Column, FileTier, HostCacheTier, RowLayout

WIDTH = 4
LAYOUT = RowLayout([Column("weight", "int64", WIDTH)])
BATCH = 8192


def rows_of(keys: NDArray[np.int64], versions: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Return rows (n, WIDTH): the version, then numbers that follow from key, version and place."""
    rows = np.empty((len(keys), WIDTH), np.int64)
    rows[:, 0] = versions
    mixed = keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + rows[:, 0].view(np.uint64)
    for place in range(1, WIDTH):
        rows[:, place] = (mixed * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(place)).view(np.int64)
    return rows


class Run:
    """Readers, a writer and a thread that flushes, on one tier.

    Args:
        tier: all of its keys are there, in version 1.
        num_keys: keys are 0 <= key < num_keys.
        lookups: how many to make.
        seconds: after these it ends earlier.
    """

    def __init__(self, tier: HostCacheTier, num_keys: int, lookups: int, seconds: float) -> None:
        self.tier, self.num_keys, self.lookups = tier, num_keys, lookups
        self.deadline = time.monotonic() + seconds
        self.finished = np.ones(num_keys, np.int64)
        """By key, the version that `put` has returned from."""
        self.begun = 1
        self.done, self.written, self.flushes = [0, 0], 0, 0
        self.ended, self.errors = threading.Event(), list[BaseException]()

    def read(self, reader: int) -> None:
        """Look up and check rows."""
        random, seen = np.random.default_rng(reader), np.ones(self.num_keys, np.int64)
        out = LAYOUT.empty(BATCH)
        while sum(self.done) < self.lookups and time.monotonic() < self.deadline and not self.ended.is_set():
            keys = random.integers(0, self.num_keys, BATCH)
            keys[::2] %= self.num_keys // 50
            least = np.maximum(seen[keys], self.finished[keys])
            found = self.tier.fetch(keys, out)
            newest, rows = self.begun, out.view(np.int64)
            versions = rows[:, 0].copy()
            assert found.all(), f"lost: the row of key {keys[~found][0]}"
            torn = (rows != rows_of(keys, versions)).any(1)
            assert not torn.any(), f"torn: the row of key {keys[torn][0]}"
            stale = versions < least
            assert not stale.any(), f"stale: the row of key {keys[stale][0]}"
            assert int(versions.max()) <= newest, "a row of a version that no writer has begun"
            seen[keys] = versions
            self.done[reader] += BATCH

    def write(self, reader: int) -> None:
        """Replace rows; at most as many as are looked up, so that readers get their share of the processor."""
        random = np.random.default_rng(2**32)
        while not self.ended.is_set():
            keys = random.integers(0, self.num_keys, 1024)
            keys[::2] %= self.num_keys // 50
            keys = np.unique(keys)
            self.begun += 1
            self.tier.put(keys, rows_of(keys, self.begun).view(np.uint8))
            self.finished[keys] = self.begun
            self.written += len(keys)
            self.ended.wait(0.0005)

    def flush(self, reader: int) -> None:
        """Write changed rows down."""
        while not self.ended.wait(0.05):
            self.tier.flush()
            self.flushes += 1

    def run(self) -> float:
        """Run all threads to their end; return the seconds that it took, or raise the first error."""
        start = time.monotonic()

        def guarded(work: object, number: int) -> None:
            try:
                work(number)  # type: ignore[operator]
            except BaseException as error:
                self.errors.append(error)
                self.ended.set()

        readers = [threading.Thread(target=guarded, args=(self.read, i)) for i in range(len(self.done))]
        others = [threading.Thread(target=guarded, args=(one, 0)) for one in (self.write, self.flush)]
        for thread in (*others, *readers):
            thread.start()
        for thread in readers:
            thread.join()
        self.ended.set()
        for thread in others:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="Look up rows that certify themselves beside write-back and eviction.")
    parser.add_argument("--small", action="store_true", help="few lookups: shows that it runs, keeps no figures")
    parser.add_argument("--lookups", type=int, default=100_000_000)
    parser.add_argument("--seconds", type=float, default=300.0, help="end after these, with the lookups made so far")
    arguments = parser.parse_args()
    num_keys, lookups = (20_000, 200_000) if arguments.small else (400_000, arguments.lookups)
    with tempfile.TemporaryDirectory() as folder:
        below = FileTier(Path(folder) / "file", LAYOUT, num_keys)
        tier = HostCacheTier(below, num_keys, max_rows=num_keys // 10)
        keys = np.arange(num_keys)
        for part in np.array_split(keys, 20):
            tier.put(part, rows_of(part, 1).view(np.uint8))
        tier.flush()
        read, wrote = below.stats().rows_read, below.stats().rows_written
        run = Run(tier, num_keys, lookups, arguments.seconds)
        seconds = run.run()
        read, wrote = below.stats().rows_read - read, below.stats().rows_written - wrote
        tier.close()
    counts = (
        ("lookups that were checked", sum(run.done), "lookups", 100_000_000),
        ("rows read from the file meanwhile", read, "rows", None),
        ("rows written to the file meanwhile", wrote, "rows", None),
        ("rows that the writer replaced meanwhile", run.written, "rows", None),
    )
    case, shape = "host cache over a file", {"rows": num_keys, "cache": 0.1, "readers": len(run.done)}
    for metric, value, unit, goal in counts:
        record(bench="certified_rows", case=case, metric=metric, value=value, unit=unit, better="higher", goal=goal,
               shape=shape)  # fmt: skip
    record(bench="certified_rows", case=case, metric="torn, lost or stale rows", value=0, unit="rows", better="lower",
           goal=0, shape=shape)  # fmt: skip
    print(f"{run.flushes} flushes in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

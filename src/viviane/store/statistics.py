"""What a tier counts: rows, bytes, hits, and how long its calls take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

_STEPS = 8  # of the histogram for each doubling: a percentile is known to 9%
_FIRST_SECONDS = 1e-6
_NUM_BINS = 8 * 30  # up to 1,074 s


@dataclass
class LatencyHistogram:
    """Durations of calls, in bins that grow by 9%, from 1 microsecond to 18 minutes.

    Example:
        >>> histogram = LatencyHistogram()
        >>> for milliseconds in range(1, 101):
        ...     histogram.add(milliseconds / 1000)
        >>> 0.045 < histogram.percentile(50) < 0.055, 0.09 < histogram.percentile(99) < 0.11
        (True, True)
    """

    counts: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one call."""
        place = int(_STEPS * math.log2(seconds / _FIRST_SECONDS)) if seconds > _FIRST_SECONDS else 0
        self.counts[min(place, _NUM_BINS - 1)] += 1
        self.total_s += seconds

    @property
    def num_calls(self) -> int:
        """Calls that were counted."""
        return sum(self.counts)

    def percentile(self, percent: float) -> float:
        """Return the seconds that `percent` of the calls do not exceed, to 9%; 0 without any call."""
        wanted = math.ceil(self.num_calls * percent / 100)
        seen = 0
        for place, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return float(_FIRST_SECONDS * 2 ** ((place + 1) / _STEPS))
        return 0.0

    def plus(self, other: LatencyHistogram) -> LatencyHistogram:
        """Return both together."""
        both = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return LatencyHistogram(both, self.total_s + other.total_s)


@dataclass
class TierStats:
    """What a tier has counted since it was opened.

    Args:
        hits, misses: keys that `fetch` found and did not find.
        rows_read, rows_written, rows_erased: rows.
        bytes_read, bytes_written: bytes of rows moved out of and into the tier; of a tier on disk those that its files
            gave and took.
        damaged: rows that were found with another checksum, and counted as misses.
        fetches, puts: durations of these calls.

    Example:
        >>> one = TierStats(hits=3, misses=1)
        >>> one.hit_rate, one.plus(one).hits
        (0.75, 6)
    """

    hits: int = 0
    misses: int = 0
    rows_read: int = 0
    rows_written: int = 0
    rows_erased: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    damaged: int = 0
    fetches: LatencyHistogram = field(default_factory=LatencyHistogram)
    puts: LatencyHistogram = field(default_factory=LatencyHistogram)

    @property
    def hit_rate(self) -> float:
        """Share of keys that were found; 1 where none was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0

    def plus(self, other: TierStats) -> TierStats:
        """Return both together."""
        sums: dict[str, Any] = {}
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            sums[one.name] = mine.plus(theirs) if isinstance(mine, LatencyHistogram) else mine + theirs
        return TierStats(**sums)

    def to_json(self) -> dict[str, float | int]:
        """Return the counts, and percentiles in milliseconds."""
        counts = {one.name: getattr(self, one.name) for one in fields(self) if one.type == "int"}
        times = {
            f"{name}_p{percent}_ms": round(histogram.percentile(percent) * 1e3, 4)
            for name, histogram in (("fetch", self.fetches), ("put", self.puts))
            for percent in (50, 99)
        }
        return counts | times


class StatsCounter:
    """Counts for a tier, from any thread.

    Args:
        row_bytes: of a row.

    Example:
        >>> counter = StatsCounter(row_bytes=8)
        >>> with counter.fetching() as count:
        ...     count(hits=3, misses=1)
        >>> counter.snapshot().bytes_read
        24
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._stats = TierStats()
        self._lock = threading.Lock()

    @contextmanager
    def fetching(self) -> Iterator[Any]:
        """Time a `fetch`; call what it gives with `hits` and `misses`, and `num_bytes` where files gave others."""
        start = time.perf_counter()

        def count(*, hits: int, misses: int, num_bytes: int | None = None, damaged: int = 0) -> None:
            self.fetched(time.perf_counter() - start, hits, misses, num_bytes=num_bytes, damaged=damaged)

        yield count

    def fetched(
        self, seconds: float, hits: int, misses: int, *, num_bytes: int | None = None, damaged: int = 0
    ) -> None:  # fmt: skip
        """Count a `fetch` that was timed by the caller."""
        with self._lock:
            stats = self._stats
            stats.hits += hits
            stats.misses += misses
            stats.damaged += damaged
            stats.rows_read += hits
            stats.bytes_read += hits * self._row_bytes if num_bytes is None else num_bytes
            stats.fetches.add(seconds)

    @contextmanager
    def putting(self, rows: int, *, num_bytes: int | None = None) -> Iterator[None]:
        """Time a `put` of some rows, which is counted when it succeeds."""
        start = time.perf_counter()
        yield
        with self._lock:
            self._stats.rows_written += rows
            self._stats.bytes_written += rows * self._row_bytes if num_bytes is None else num_bytes
            self._stats.puts.add(time.perf_counter() - start)

    def swept(
        self, seconds: float, *, rows_read: int = 0, rows_written: int = 0, bytes_read: int = 0, bytes_written: int = 0
    ) -> None:  # fmt: skip
        """Count rows that were read and written in one sweep."""
        if rows_read:
            self.fetched(seconds, rows_read, 0, num_bytes=bytes_read)
        with self._lock:
            self._stats.rows_written += rows_written
            self._stats.bytes_written += bytes_written

    def erased(self, rows: int) -> None:
        """Count rows that were erased."""
        with self._lock:
            self._stats.rows_erased += rows

    def moved(self, *, bytes_read: int = 0, bytes_written: int = 0) -> None:
        """Count bytes that files moved outside of `fetch` and `put`."""
        with self._lock:
            self._stats.bytes_read += bytes_read
            self._stats.bytes_written += bytes_written

    def snapshot(self) -> TierStats:
        """Return what was counted up to now."""
        with self._lock:
            return self._stats.plus(TierStats())

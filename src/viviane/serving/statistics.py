"""Counts and latencies of a session."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, Final

BOUNDS_S: Final = (*(digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)), 10.0)
"""Upper bounds of the latency buckets, 10 us to 10 s; a last bucket has no bound."""


@dataclass(frozen=True)
class LatencyHistogram:
    """Latencies in buckets.

    Args:
        counts: requests in each bucket of `BOUNDS_S`, and above the last bound.
        sum_s: sum of all latencies in seconds.

    Example:
        >>> LatencyHistogram((0,) * 5 + (99,) + (0,) * 12 + (1, 0), 0.2).quantile(0.5)
        0.0005
    """

    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """Number of requests."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Return an upper bound of the q-quantile in seconds: the bound of its bucket; NaN without requests."""
        left = q * self.count
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            left -= count
            if count and left <= 0:
                return bound
        return float("nan")


@dataclass(frozen=True)
class SessionStatistics:
    """What a session has done since it was made.

    Args:
        requests: answered requests, those with refused rows included.
        failed: requests that ended with an error.
        rows: predicted rows.
        refused_rows: rows that `try_predict` refused.
        latency: of answered requests, from the call to the result.
    """

    requests: int
    failed: int
    rows: int
    refused_rows: int
    latency: LatencyHistogram

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with estimates of the median and the 99th percentile."""
        return {
            "requests": self.requests,
            "failed": self.failed,
            "rows": self.rows,
            "refused_rows": self.refused_rows,
            "latency_s": {
                "sum": self.latency.sum_s,
                "bounds": list(BOUNDS_S),
                "counts": list(self.latency.counts),
                **({"p50": self.latency.quantile(0.5), "p99": self.latency.quantile(0.99)} if self.requests else {}),
            },
        }


@dataclass
class Recorder:
    """Adds requests up, from several threads."""

    _requests: int = 0
    _failed: int = 0
    _rows: int = 0
    _refused: int = 0
    _sum_s: float = 0.0
    _counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rows: int, refused: int, seconds: float) -> None:
        """Count an answered request."""
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            self._requests += 1
            self._rows += rows
            self._refused += refused
            self._sum_s += seconds
            self._counts[bucket] += 1

    def add_failure(self) -> None:
        """Count a request that ended with an error."""
        with self._lock:
            self._failed += 1

    def read(self) -> SessionStatistics:
        """Return the counts of one moment."""
        with self._lock:
            latency = LatencyHistogram(tuple(self._counts), self._sum_s)
            return SessionStatistics(self._requests, self._failed, self._rows, self._refused, latency)

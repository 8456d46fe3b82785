"""Counts and times of a server, as Prometheus reads them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import time
from typing import Any, Final

from viviane.core.optional import require
from viviane.serving.server.batcher import Outcome
from viviane.serving.server.table_metrics import TableMetrics

_SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 65_536)


class ServerMetrics:
    """Metrics of one server, in a registry of their own.

    Args:
        queued: returns how many requests wait, by model and version; the version of a recommender is "".
        tables: returns what tables in tiers have done, by model and version.
    """

    def __init__(
        self,
        queued: Callable[[], dict[tuple[str, str], int]],
        tables: Callable[[], dict[tuple[str, int], dict[str, Any]]],
    ) -> None:
        library = require("prometheus_client", extra="serving", purpose="metrics of a server")
        self._library = library
        self.registry = library.CollectorRegistry()
        library.ProcessCollector(registry=self.registry)
        self.registry.register(_Queues(queued))
        self.registry.register(TableMetrics(tables))

        def counter(name: str, text: str, labels: Iterable[str]) -> Any:
            return library.Counter(f"viviane_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return library.Histogram(f"viviane_{name}", text, ["model"], buckets=buckets, registry=self.registry)

        self._requests = counter("requests", "Requests by how they ended.", ["protocol", "model", "code"])
        self._rows = counter("rows", "Predicted rows.", ["model"])
        self._seconds = histogram("request_seconds", "From a request's headers to its answer.", _SECONDS)
        self._queue = histogram("queue_seconds", "Time that requests wait for others and for an instance.", _SECONDS)
        self._compute = histogram("batch_seconds", "Time that the batch of a request takes.", _SECONDS)
        self._batch = histogram("batch_rows", "Rows of the batch that a request is part of.", _ROWS)
        self._failed: dict[tuple[str, str, str], Any] = {}
        self._lock = threading.Lock()
        self._totals: dict[str, _Totals] = defaultdict(_Totals)

    def answered(self, protocol: str, model: str, rows: int, seconds: float, outcome: Outcome | None) -> None:
        """Count an answered request."""
        self._requests.labels(protocol, model, "OK").inc()
        self._rows.labels(model).inc(rows)
        self._seconds.labels(model).observe(seconds)
        queued, computed, batch = (outcome.queued_s, outcome.computed_s, outcome.batch_rows) if outcome else (0, 0, 1)
        self._queue.labels(model).observe(queued)
        self._compute.labels(model).observe(computed)
        self._batch.labels(model).observe(batch)
        with self._lock:
            total = self._totals[model]
            total.requests += 1
            total.rows += rows
            total.batches += rows / batch if batch else 1
            total.seconds += seconds
            total.queued_s += queued
            total.computed_s += computed
            total.last = time()

    def failed(self, protocol: str, model: str, code: str) -> None:
        """Count a request that was refused or failed; `model` is "" where there is no such model."""
        child = self._failed.get((protocol, model, code))
        if child is None:  # at most one for each known model and code
            child = self._failed[protocol, model, code] = self._requests.labels(protocol, model, code)
        child.inc()
        if model:
            with self._lock:
                self._totals[model].failed += 1

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        found: bytes = self._library.generate_latest(self.registry)
        return found

    def statistics(self, model: str) -> dict[str, Any]:
        """Return a model's totals in the form of Triton's statistics, times in nanoseconds."""
        with self._lock:
            total = self._totals[model]
            return {
                "last_inference": int(total.last * 1000),
                "inference_count": total.rows,
                "execution_count": round(total.batches),
                "inference_stats": {
                    "success": _duration(total.requests, total.seconds),
                    "fail": _duration(total.failed, 0),
                    "queue": _duration(total.requests, total.queued_s),
                    "compute_input": _duration(total.requests, 0),
                    "compute_infer": _duration(total.requests, total.computed_s),
                    "compute_output": _duration(total.requests, 0),
                    "cache_hit": _duration(0, 0),
                    "cache_miss": _duration(0, 0),
                },
                "batch_stats": [],
            }


class _Totals:
    """Sums of one model."""

    def __init__(self) -> None:
        self.requests = self.failed = self.rows = 0
        self.batches = self.seconds = self.queued_s = self.computed_s = self.last = 0.0


class _Queues:
    """Reads how many requests wait at the moment when the metrics are read."""

    def __init__(self, queued: Callable[[], dict[tuple[str, str], int]]) -> None:
        self._queued = queued

    def collect(self) -> Iterable[Any]:
        """Yield the gauge."""
        core = require("prometheus_client.core", extra="serving", purpose="metrics of a server")
        gauge = core.GaugeMetricFamily("viviane_queued_requests", "Requests that wait.", labels=["model", "version"])
        for (model, version), count in self._queued().items():
            gauge.add_metric([model, version], count)
        yield gauge


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}

"""What one load of a server gave: requests, answers, errors and latencies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from viviane.serving.load.clients import OK

NOT_SENT: Final = "not sent"
_QUANTILES: Final = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}


@dataclass(frozen=True)
class Phase:
    """What one load gave.

    Args:
        kind: "closed", clients that wait for their answers; "open", arrivals at a rate.
        load: the number of clients, or requests a second.
        seconds: from the first request to the last answer.
        sent, answered: requests.
        errors: requests without an answer, by kind: an HTTP status, the name of a gRPC code, "timeout"; and "not sent",
            which were due while `max_outstanding` others waited for an answer.
        throughput: answers a second.
        rows_per_s: rows in them.
        latency_ms: quantiles over answered requests, from the intended start.
    """

    kind: Literal["closed", "open"]
    load: float
    seconds: float
    sent: int
    answered: int
    errors: dict[str, int]
    throughput: float
    rows_per_s: float
    latency_ms: dict[str, float]


@dataclass
class Tally:
    """Answers of one phase, or of one process of it.

    Args:
        latencies: of answered requests, seconds.
        errors: requests without an answer, by kind.
        seconds: from the first request to the last answer.
    """

    latencies: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, outcome: str, seconds: float) -> None:
        """Count a request that ended."""
        if outcome == OK:
            self.latencies.append(seconds)
        else:
            self.errors[outcome] += 1

    def merge(self, other: Tally) -> None:
        """Add what another process counted at the same time."""
        self.latencies += other.latencies
        self.errors.update(other.errors)
        self.seconds = max(self.seconds, other.seconds)

    def phase(self, kind: Literal["closed", "open"], load: float, rows: int) -> Phase:
        """Return the figures of requests of so many rows."""
        answered = len(self.latencies)
        times = np.array(self.latencies) * 1000
        quantiles = {name: float(np.percentile(times, q)) for name, q in _QUANTILES.items()} if answered else {}
        rate = answered / self.seconds
        sent = answered + sum(self.errors.values()) - self.errors[NOT_SENT]
        return Phase(kind, load, self.seconds, sent, answered, dict(self.errors), rate, rate * rows, quantiles)

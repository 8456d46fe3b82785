"""The load itself: clients that wait for their answers, and arrivals that do not wait for anyone.

A latency is counted from the moment at which a request was to be sent. A server that falls behind therefore cannot hide
the time that requests spent waiting for their turn (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import cycle
from time import perf_counter
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from viviane.core.errors import ConfigError, RemoteError
from viviane.serving.load.clients import OK, Client, make_client
from viviane.serving.load.requests import PreparedRequest, RequestSource
from viviane.serving.load.settings import LoadSettings

_QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}


@dataclass(frozen=True)
class Phase:
    """What one load gave.

    Args:
        kind: "closed", clients that wait for their answers; "open", arrivals at a rate.
        load: the number of clients, or requests a second.
        seconds: from the first request to the last answer.
        sent, answered: requests.
        errors: requests without an answer, by kind: an HTTP status, the name of a gRPC code, "timeout", "not sent".
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


@dataclass(frozen=True)
class LoadResult:
    """All phases of a load test."""

    settings: LoadSettings
    model: str
    phases: tuple[Phase, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "format": "viviane-load-test",
            "version": 1,
            "settings": self.settings.to_dict(),
            "model": self.model,
            "phases": [asdict(phase) for phase in self.phases],
        }


@dataclass
class _Tally:
    """Answers of one phase."""

    latencies: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: str, seconds: float) -> None:
        if outcome == OK:
            self.latencies.append(seconds)
        else:
            self.errors[outcome] += 1

    def phase(self, kind: Literal["closed", "open"], load: float, seconds: float, rows: int) -> Phase:
        answered = len(self.latencies)
        times = np.array(self.latencies) * 1000
        quantiles = {name: float(np.percentile(times, q)) for name, q in _QUANTILES.items()} if answered else {}
        rate = answered / seconds
        sent = answered + sum(self.errors.values())
        return Phase(kind, load, seconds, sent, answered, dict(self.errors), rate, rate * rows, quantiles)


def run_load(
    settings: LoadSettings, table: pa.Table | None = None, *, progress: Callable[[Phase], None] = lambda phase: None
) -> LoadResult:
    """Put a server under load, phase by phase.

    Args:
        table: rows to send; None makes rows up from the model's metadata.
        progress: called after each phase.

    Raises:
        RemoteError: the server does not respond, or refuses the rows.
        ConfigError: several models, and the settings name none.
    """
    return asyncio.run(_run(settings, table, progress))


def prepare_load(settings: LoadSettings, table: pa.Table | None) -> tuple[str, list[PreparedRequest]]:
    """Return the model of a load test and its requests, without sending them."""

    async def ask() -> tuple[str, list[PreparedRequest]]:
        client = make_client(settings)
        try:
            return await _requests(client, settings, table)
        finally:
            await client.close()

    return asyncio.run(ask())


async def _requests(
    client: Client, settings: LoadSettings, table: pa.Table | None
) -> tuple[str, list[PreparedRequest]]:
    model = settings.model or _only(await client.models(), settings.url)
    inputs, columns = await client.describe(model, settings.version)
    return model, RequestSource(inputs, columns, table).prepared(settings.rows, settings.seed)


async def _run(settings: LoadSettings, table: pa.Table | None, progress: Callable[[Phase], None]) -> LoadResult:
    client = make_client(settings)
    try:
        model, made = await _requests(client, settings, table)
        requests = [client.prepare(model, settings.version, one) for one in made]
        await _warm_up(client, requests, settings)
        phases: list[Phase] = []
        for count in settings.concurrency:
            phases.append(await closed_loop(client, requests, count, settings))
            progress(phases[-1])
        best = max((phase.throughput for phase in phases), default=0.0)
        for rate in settings.rates:
            if rate < 0 and not best:
                raise ConfigError("rates relative to the best throughput need phases with clients", where="rates",
                                  value=rate, fix="give concurrency, or rates in requests a second")  # fmt: skip
            phases.append(await open_loop(client, requests, rate if rate > 0 else -rate * best, settings))
            progress(phases[-1])
        return LoadResult(settings, model, tuple(phases))
    finally:
        await client.close()


def _only(models: list[str], url: str) -> str:
    if len(models) != 1:
        raise ConfigError("which model?", where=url, value=f"{len(models)} models", allowed=", ".join(models),
                          fix="name one with --model")  # fmt: skip
    return models[0]


async def _warm_up(client: Client, requests: list[Any], settings: LoadSettings) -> None:
    for _, request in zip(range(max(1, settings.warm_up)), cycle(requests), strict=False):
        outcome = await client.send(request)
        if outcome != OK:
            fix = "send rows that the model accepts: --rows FILE"
            raise RemoteError("the server rejects these rows", where=settings.url, value=outcome, fix=fix)


async def closed_loop(client: Client, requests: list[Any], count: int, settings: LoadSettings) -> Phase:
    """Let clients send, each its next request when it has the answer to the last one."""
    tally, turn = _Tally(), cycle(requests)
    gc.collect()
    start = perf_counter()
    until = start + settings.seconds

    async def work() -> None:
        while (begin := perf_counter()) < until:
            outcome = await client.send(next(turn))
            tally.add(outcome, perf_counter() - begin)

    await asyncio.gather(*(work() for _ in range(count)))
    return tally.phase("closed", count, perf_counter() - start, settings.rows)


async def open_loop(client: Client, requests: list[Any], rate: float, settings: LoadSettings) -> Phase:
    """Send at the times of a Poisson process, whether or not earlier requests are answered."""
    tally, turn = _Tally(), cycle(requests)
    draw = np.random.default_rng(settings.seed)
    times = np.cumsum(draw.exponential(1 / rate, int(rate * settings.seconds * 1.5) + 10))
    times = times[times < settings.seconds]
    under_way: set[asyncio.Task[None]] = set()
    gc.collect()
    start = perf_counter()

    async def send(intended: float) -> None:
        outcome = await client.send(next(turn))
        tally.add(outcome, perf_counter() - intended)

    for time in times:
        wait = start + time - perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        if len(under_way) >= settings.max_outstanding:
            tally.errors["not sent"] += 1
            await asyncio.sleep(0)
            continue
        task = asyncio.create_task(send(start + time))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way)
    return tally.phase("open", rate, max(perf_counter() - start, settings.seconds), settings.rows)

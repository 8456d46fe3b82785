"""A load test: its requests, its phases, and the processes that send them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, Literal

import pyarrow as pa

from viviane.core.errors import ConfigError, RemoteError
from viviane.serving.load.clients import OK, Client, make_client
from viviane.serving.load.phase import Phase
from viviane.serving.load.requests import PreparedRequest, RequestSource
from viviane.serving.load.senders import Senders
from viviane.serving.load.settings import LoadSettings


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
    if settings.shared_memory:
        raise ConfigError("only perf_analyzer sends requests through shared memory", where="shared_memory", value=True,
                          fix="--tool perf_analyzer")  # fmt: skip
    model, made = prepare_load(settings, table, warm_up=max(1, settings.warm_up))
    phases: list[Phase] = []
    with Senders(settings, model, made) as senders:

        def add(kind: Literal["closed", "open"], load: float) -> None:
            phases.append(senders.run(kind, load).phase(kind, load, settings.rows))
            progress(phases[-1])

        for count in settings.concurrency:
            add("closed", count)
        best = max((phase.throughput for phase in phases), default=0.0)
        for rate in settings.rates:
            if rate < 0 and not best:
                raise ConfigError("rates relative to the best throughput need phases with clients", where="rates",
                                  value=rate, fix="give concurrency, or rates in requests a second")  # fmt: skip
            add("open", rate if rate > 0 else -rate * best)
    return LoadResult(settings, model, tuple(phases))


def prepare_load(
    settings: LoadSettings, table: pa.Table | None, *, warm_up: int = 0
) -> tuple[str, list[PreparedRequest]]:
    """Return the model of a load test and its requests, of which only `warm_up` are sent."""

    async def ask() -> tuple[str, list[PreparedRequest]]:
        client = make_client(settings)
        try:
            model = settings.model or _only(await client.models(), settings.url)
            inputs, columns = await client.describe(model, settings.version)
            made = RequestSource(inputs, columns, table).prepared(settings.rows, settings.seed)
            await _warm_up(client, [client.prepare(model, settings.version, one) for one in made], warm_up, settings)
            return model, made
        finally:
            await client.close()

    return asyncio.run(ask())


def _only(models: list[str], url: str) -> str:
    if len(models) != 1:
        raise ConfigError("which model?", where=url, value=f"{len(models)} models", allowed=", ".join(models),
                          fix="name one with --model")  # fmt: skip
    return models[0]


async def _warm_up(client: Client, requests: list[Any], count: int, settings: LoadSettings) -> None:
    for _, request in zip(range(count), cycle(requests), strict=False):
        outcome = await client.send(request)
        if outcome != OK:
            fix = "send rows that the model accepts: --rows FILE"
            raise RemoteError("the server rejects these rows", where=settings.url, value=outcome, fix=fix)

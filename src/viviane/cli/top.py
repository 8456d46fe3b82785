"""`viviane top`: what the tiers of a server's tables do, as a table that is updated in place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field, ValidationError

from viviane.cli.console import printable
from viviane.config.base import first_problem
from viviane.core.errors import RemoteError

if TYPE_CHECKING:
    from rich.table import Table

_COUNTED = ("hits", "misses", "bytes_read", "degraded")
_HEADS = ("model", "table", "tier", "state", "hits/s", "misses/s", "hit rate", "MB/s", "p50 ms", "p99 ms", "degraded/s")
Counts = Mapping[tuple[str, ...], Mapping[str, Any]]
"""By model, version, table and tier: counts since the server was started."""


Count = Annotated[int, Field(ge=0, lt=2**64)]
Amount = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False)]


class _Tier(BaseModel):
    tier: str
    hits: Count
    misses: Count
    bytes_read: Count
    available: bool
    fetch_p50_ms: Amount
    fetch_p99_ms: Amount


class _Table(BaseModel):
    table: str
    degraded: Count
    tiers: list[_Tier]


class _Updates(BaseModel):
    connected: bool
    publication: int | None
    staleness_s: Amount
    rows: Count
    refused: Count = 0
    last_error: str = ""
    gaps: list[Any]


class _ParameterServer(BaseModel):
    tables: list[_Table] = []
    updates: _Updates | None = None


class _Model(BaseModel):
    name: str
    version: str
    parameter_server: _ParameterServer = _ParameterServer()


class _Statistics(BaseModel):
    model_stats: list[_Model]


def command(
    url: Annotated[str, typer.Argument(help="The server: http://127.0.0.1:8000.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print totals since the start, and end.")] = False,
) -> None:
    """Show hits, misses, bytes, times, staleness and degraded answers of each tier, until Ctrl-C."""
    from rich.live import Live

    from viviane.cli.console import output
    from viviane.cli.models import ask

    def read() -> tuple[float, list[Any]]:
        return time.monotonic(), checked_stats(ask(url, "/v2/models/stats"), url)

    at, stats = read()
    if once:
        output().print(table_of(counts_of(stats), {}, None, updates_of(stats)))
        return
    with Live(table_of(counts_of(stats), {}, None, updates_of(stats)), console=output(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before_at, before, (at, stats) = at, counts_of(stats), read()
            shown = table_of(counts_of(stats), before, at - before_at, updates_of(stats))
            live.update(shown, refresh=True)


def checked_stats(reply: Any, url: str) -> list[Any]:
    """Return the statistics of all models in a server's reply.

    Raises:
        RemoteError: the reply has another form; names the first value that differs.

    Example:
        >>> checked_stats({"model_stats": [{"name": "ctr", "version": "1"}]}, "http://127.0.0.1:8000")[0]["name"]
        'ctr'
    """
    try:
        found = _Statistics.model_validate(reply)
    except ValidationError as error:
        place, problem = first_problem(error)
        raise RemoteError(
            "the server's statistics have another form", where=f"{url}, {place}", value=problem,
            allowed="the reply of `viviane serve`",
            fix="check that the address is that of `viviane serve`",
        ) from None  # fmt: skip
    return [one.model_dump() for one in found.model_stats]


def counts_of(stats: list[Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return what a server's statistics say about each tier; `degraded` is counted for the table's first tier."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for model in stats:
        for table in model.get("parameter_server", {}).get("tables", ()):
            for number, tier in enumerate(table["tiers"]):
                name = (model["name"], model["version"], table["table"], tier["tier"])
                found[name] = {**tier, "degraded": 0 if number else table["degraded"]}
    return found


def updates_of(stats: list[Any]) -> str:
    """Return a line about each model's updates."""
    lines = []
    for model in stats:
        updates = model.get("parameter_server", {}).get("updates")
        if updates is not None:
            state = "connected" if updates["connected"] else "not connected"
            lines.append(
                f"{model['name']} {model['version']}: {state}, publication {updates['publication']}, "
                f"staleness {updates['staleness_s']:.2f} s, {updates['rows']:,} rows, gaps {len(updates['gaps'])}"
                + (f", refused {updates['refused']:,}: {updates['last_error']}" if updates.get("refused") else "")
            )
    return "\n".join(map(printable, lines))


def table_of(now: Counts, before: Counts, seconds: float | None, caption: str) -> Table:
    """Return a table of rates over the last `seconds`; None: of totals."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    heads = _HEADS if seconds is not None else tuple(head.removesuffix("/s") for head in _HEADS)
    table = Table(*heads, box=box.SIMPLE, caption=escape(caption) or None, caption_justify="left")
    for column in table.columns[4:]:
        column.justify = "right"
    for name, tier in now.items():
        # A version that was loaded again counts from 0.
        older = before.get(name, {})
        rate = {count: max(0, tier[count] - older.get(count, 0)) / (seconds or 1.0) for count in _COUNTED}
        asked = rate["hits"] + rate["misses"]
        model, version, own, kind = (escape(printable(part)) for part in name)
        table.add_row(
            f"{model} {version}", own, kind, "ok" if tier["available"] else "failed",
            f"{rate['hits']:,.0f}", f"{rate['misses']:,.0f}", f"{rate['hits'] / asked:.1%}" if asked else "-",
            f"{rate['bytes_read'] / 1e6:,.1f}", f"{tier['fetch_p50_ms']:.3f}", f"{tier['fetch_p99_ms']:.3f}",
            f"{rate['degraded']:,.0f}",
        )  # fmt: skip
    if not now:
        table.add_row("no tables in tiers", *[""] * (len(heads) - 1))
    return table

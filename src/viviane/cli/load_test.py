"""`viviane load-test`: latency and throughput of a server, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from viviane.serving.load import LoadResult
    from viviane.serving.load.phase import Phase

_SHOWN = ("p50", "p99", "p99.9")  # perf_analyzer does not know the last one
_HEADS = ("load", "sent", "answered/s", "rows/s", "p50 ms", "p99 ms", "p99.9 ms", "errors")
_TOOLS = ("viviane", "perf_analyzer")


def command(
    url: Annotated[
        str, typer.Argument(help="The server: http://127.0.0.1:8000, or 127.0.0.1:8001 with --protocol grpc.")
    ],
    model: Annotated[str | None, typer.Option(help="The model, where the server has several.")] = None,
    rows: Annotated[
        str | None, typer.Option(help="Rows to send: .parquet, .csv, .jsonl, or a data set; made up unless given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of each request.")] = 1,
    protocol: Annotated[str, typer.Option(help="http or grpc.")] = "http",
    concurrency: Annotated[str, typer.Option(help="Numbers of clients that wait for their answers.")] = "1,16,64",
    rates: Annotated[
        str, typer.Option(help="Open-loop requests per second; 1.5x is relative to the clients' best.")
    ] = "0.25x,0.5x,0.75x,1x,1.5x,2x",
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each phase.")] = 5.0,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="A request without an answer for so long has failed.")
    ] = 30.0,
    processes: Annotated[int, typer.Option(min=1, max=256, help="That send requests, where one is too slow.")] = 1,
    seed: Annotated[int, typer.Option(help="Of times and made-up rows.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .json file; a page with a plot goes next to it.")
    ] = Path("load-test.json"),
    tool: Annotated[str, typer.Option(help="viviane, or perf_analyzer, Triton's own.")] = "viviane",
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Share memory with Triton on this host; needs perf_analyzer.")
    ] = False,
) -> None:
    """Measure a server of the Open Inference Protocol: ours, or Triton."""
    from viviane.core.files import write_bytes_atomic, write_json_atomic
    from viviane.serving.load import LoadSettings, run_load
    from viviane.serving.load.requests import read_rows

    if output.suffix != ".json":
        raise ConfigError("the output is a .json file", where="--output", value=str(output))
    if tool not in _TOOLS:
        raise ConfigError("no such tool", where="--tool", value=tool, allowed=", ".join(_TOOLS))
    settings = LoadSettings.from_dict(
        {
            "url": url, "model": model, "rows": batch_size, "protocol": protocol, "seconds": seconds, "seed": seed,
            "timeout_s": timeout_s, "processes": processes, "concurrency": _numbers(concurrency, "--concurrency"),
            "rates": _numbers(rates, "--rates"), "shared_memory": shared_memory,
        },
        where="options",
    )  # fmt: skip
    table = None if rows is None else read_rows(rows)
    typer.echo(_line(*_HEADS))
    if tool == "perf_analyzer":
        from viviane.serving.load.perf_analyzer import run_perf_analyzer

        result = run_perf_analyzer(settings, table, progress=_show)
    else:
        result = run_load(settings, table, progress=_show)
    write_json_atomic(output, result.to_dict())
    page = output.with_suffix(".html")
    write_bytes_atomic(page, _page(result).encode())
    typer.echo(f"figures: {output}\nplot:    {page}")


def _numbers(text: str, where: str) -> list[float]:
    """Read "1,16" and "0.5x,200"; a factor is negative, as the settings have it."""
    found = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        try:
            found.append(-float(part[:-1]) if part.endswith("x") else float(part))
        except ValueError:
            raise ConfigError("not a list of numbers", where=where, value=text, allowed="1,16,64 or 0.5x,2x") from None
    return found


def _show(phase: Phase) -> None:
    typer.echo(_line(*_cells(phase)))


def _cells(phase: Phase) -> list[str]:
    """Return what is shown of a phase, under `_HEADS`."""
    clients = "1 client" if phase.load == 1 else f"{phase.load:g} clients"
    load = clients if phase.kind == "closed" else f"{phase.load:,.0f}/s"
    latency = [f"{phase.latency_ms[name]:.2f}" if name in phase.latency_ms else "-" for name in _SHOWN]
    errors = ", ".join(f"{count} x {kind}" for kind, count in sorted(phase.errors.items())) or "-"
    return [load, f"{phase.sent:,}", f"{phase.throughput:,.0f}", f"{phase.rows_per_s:,.0f}", *latency, errors]


def _line(*cells: str) -> str:
    return "".join(f"{cell:>12}" if place else f"{cell:<14}" for place, cell in enumerate(cells))


def _page(result: LoadResult) -> str:
    """Return a page with latency against throughput, answers against the offered rate, and a table of all phases."""
    from viviane.report.chart import Line, line_chart
    from viviane.report.html import page, part
    from viviane.report.panels import Panel, section

    def latency(kind: str, quantile: str) -> list[tuple[float, float]]:
        phases = [phase for phase in result.phases if phase.kind == kind and phase.latency_ms]
        return [(phase.throughput, phase.latency_ms[quantile]) for phase in phases]

    lines = [
        Line(f"{name} {quantile}", sorted(latency(kind, quantile)), marks=True, dashed=kind == "closed")
        for kind, name in (("open", "open loop,"), ("closed", "closed loop,"))
        for quantile in ("p50", "p99")
    ]
    offered = [phase for phase in result.phases if phase.kind == "open"]
    answered = [
        Line("answered", [(phase.load, phase.throughput) for phase in offered], marks=True),
        Line("offered", [(phase.load, phase.load) for phase in offered], dashed=True),
    ]
    panels = [Panel("Latency", line_chart(lines, x_label="answers/s", y_label="latency, ms", log_y=True))]
    if offered:
        chart = line_chart(answered, x_label="requests/s offered", y_label="requests/s answered")
        panels.append(Panel("Answers", chart))
    table = str(part("table", _HEADS, [_cells(phase) for phase in result.phases]))
    note = "Closed loop: each client waits for its answer. Open loop: requests arrive at a rate, whatever is answered."
    panels.append(Panel("Phases", table, note, wide=True))
    rows = "1 row" if result.settings.rows == 1 else f"{result.settings.rows:,} rows"
    told = f"{result.settings.url}, {rows} a request, {result.settings.seconds:g} s a phase"
    return page(f"Load test of {result.model}", told, section("Under load", panels))

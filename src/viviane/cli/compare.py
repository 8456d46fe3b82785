"""`viviane compare`: runs side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from viviane.core.errors import ConfigError


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, two or more.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a page with tables and curves into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare runs: best metrics, speed, size, and the settings that differ."""
    from rich import box
    from rich.table import Table

    from viviane.cli.console import output as console
    from viviane.report import compare_runs, write_comparison

    if output is not None and output.is_dir():
        raise ConfigError("the page is a file, and this is a folder", where=str(output), fix="--output compare.html")
    found = compare_runs(runs)
    if as_json:
        typer.echo(json.dumps({"runs": [asdict(one) for one in found.runs], "differing": found.differing}, indent=2))
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for run in found.runs:
            table.add_column(run.name, justify="right")
        for row in found.rows():
            table.add_row(*row)
        console().print(table)
        typer.echo("* best of the runs")
    if output is not None:
        typer.echo(f"page: {write_comparison(runs, output)}", err=as_json)

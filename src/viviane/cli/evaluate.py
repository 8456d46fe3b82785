"""`viviane evaluate`: a saved model's metrics on data with labels."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from viviane.cli.console import ResultsOnly


def command(
    model: Annotated[Path, typer.Argument(help="A saved model, or the run folder that holds one.")],
    data: Annotated[Path, typer.Argument(help="A data set folder, or raw files for the model's ETL.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: ResultsOnly = False,
) -> None:
    """Print loss and metrics of a saved model."""
    from viviane.cli.rows import open_rows
    from viviane.model import Model

    loaded = Model.load(model, device=device)
    with open_rows(data, loaded, with_labels=True) as rows:
        values = {"rows": len(rows), **loaded.evaluate(rows)}
    if as_json:
        typer.echo(json.dumps({name: value if math.isfinite(value) else None for name, value in values.items()}))
        return
    for name, value in values.items():
        typer.echo(f"{name:<20} {value:,}" if isinstance(value, int) else f"{name:<20} {value:.6f}")

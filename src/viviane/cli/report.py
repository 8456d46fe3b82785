"""`viviane report`: a run's page, written again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from viviane.core.errors import DataNotFoundError


def command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[
        Path | None,
        typer.Option("--importance", metavar="DATA", help="Measure the importance of columns on these held-out rows."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --importance: rows that are shuffled.")] = 20_000,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="With --importance: shuffles of each column.")] = 1,
    label: Annotated[
        str | None, typer.Option(help="With --importance: a binary label; the first one if left out.")
    ] = None,
    device: Annotated[str, typer.Option(help="With --importance: auto, cpu, cuda, cuda:1.")] = "auto",
) -> None:
    """Write report.html of a run again, with the importance of columns if wanted."""
    from viviane.report import permutation_importance, write_report
    from viviane.report.record import RunRecord

    RunRecord.load(run)  # refuse a folder without a run before anything is measured
    if data is not None:
        from viviane.data import Dataset
        from viviane.model import Model

        if not (run / "model").exists():
            raise DataNotFoundError("the run holds no saved model", where=str(run / "model"), fix="finish its training")
        model = Model.load(run / "model", device=device)
        found = permutation_importance(model, Dataset(data), label=label, rows=rows, repeats=repeats)
        found.save(run)
        for one in found.features:
            typer.echo(f"{one.name:<24} log loss {one.log_loss:+.5f}  AUC {-one.auc:+.5f}")
    typer.echo(f"report: {write_report(run)}")

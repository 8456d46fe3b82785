"""`viviane train`: a JSON file to a trained, saved model and a report."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from viviane.cli.console import Quiet, say
from viviane.core.errors import ConfigError
from viviane.core.locations import AnyPath, RemotePath, location

if TYPE_CHECKING:
    from viviane.data import Dataset
    from viviane.model import Model
    from viviane.model.publication import Publication
    from viviane.training import History

_INTERRUPTED = 130
_MAX_COLUMNS = 8
_IMPORTANCE_ROWS = 10_000
_IMPORTANCE_S = 5.0


def command(
    config: Annotated[Path, typer.Argument(help="JSON or YAML file: data, solver, optimizer, model.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: solver.lr=0.01.")
    ] = None,
    run_folder: Annotated[
        Path | None,
        typer.Option("--run-folder", "--output", "-o", help="Where metrics, checkpoints and the model go."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Train in this many processes on the CPU.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Train on this many GPUs of this machine.")] = None,
    publish: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send changed rows to kafka://host:port/topic while it trains; servers begin with RUN/snapshot.",
        ),
    ] = None,
    publish_every: Annotated[float, typer.Option(min=0.01, help="Seconds between publications.")] = 1.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Maximum restarts after a process has died, from the last checkpoint.")
    ] = 0,
    quiet: Quiet = False,
) -> None:
    """Train a model; writes a run folder with the saved model and report.html."""
    if processes is not None or gpus is not None:
        from viviane.cli.launch import launch

        launch(processes, gpus, max_restarts)  # does not return: the command starts over in every process
    from viviane.cli.train_config import read_train_config
    from viviane.parallel import join_processes, num_restarts
    from viviane.report import write_report
    from viviane.training import RunFolder
    from viviane.training.checkpoint.remote_run import RunMirror
    from viviane.training.run_folder import hold_folder

    settings = read_train_config(config, changes or [])
    place = location(run_folder or settings.run_folder or f"runs/{settings.name}")
    mirror = RunMirror(place) if isinstance(place, RemotePath) else None
    folder = RunFolder(place if isinstance(place, Path) else RunMirror(place).local)
    group = join_processes(settings.solver.device, settings.solver.peer_timeout_s)
    resume = resume or num_restarts() > 0
    with ExitStack() as held:
        group.from_first(lambda: hold_folder(folder, held))
        if group.from_first(lambda: (mirror or folder).holds_a_run) and not resume:
            fix = "continue it with --resume, or choose another with --run-folder"
            raise ConfigError("the run folder already holds a run", where=str(place), fix=fix)
        train = settings.data.open_train()
        validation = settings.data.open_validation()
        model = settings.build(train.schema)
        model.compile(settings.optimizer, settings.embedding_optimizer, settings.metrics, statistics=train.info)
        if group.rank == 0 and not quiet:
            model.summary()
        if publish is not None:
            held.callback(_publish(model, publish, publish_every, folder.path, quiet=quiet).close)
        files = {"train.json": settings.to_dict()}
        history = model.fit(train, validation, run_folder=place, resume=resume, files=files, verbose=0 if quiet else 1)
        if history.interrupted:
            if group.rank == 0:
                typer.echo(f"interrupted; resume with: viviane train {config} --run-folder {place} --resume")
            sys.exit(_INTERRUPTED)
        saved = model.save(place / "model")
        if group.rank:
            return
        if validation is not None and group.size == 1:
            _measure_importance(model, validation, folder.path)
        report: AnyPath = write_report(folder.path)
        if mirror is not None:
            mirror.push_files()
            report = mirror.url / report.name
    if quiet:
        return
    _show(history)
    best = train.info.get("best_auc")
    if best is not None and settings.data.negatives is None:
        say(f"best reachable AUC of this synthetic data: {best:.4f}")
    say(f"model:  {saved}\nreport: {report}")


def _publish(model: Model, url: str, every_s: float, folder: Path, *, quiet: bool) -> Publication:
    """Publish from now on, and save where servers begin unless an earlier start of the run did."""
    publication = model.publish(url, outbox=folder / "outbox", every_s=every_s)
    if not publication.position().positions:
        snapshot = model.save(folder / "snapshot")
        if not quiet:
            say(f"servers begin with: {snapshot}")
    return publication


def _measure_importance(model: Model, validation: Dataset, folder: Path) -> None:
    """Measure which columns the model looks at, on as many rows as a few seconds allow."""
    from viviane.report import permutation_importance

    if any(label.task == "binary" for label in model.schema.labels):
        permutation_importance(model, validation, rows=_IMPORTANCE_ROWS, seconds=_IMPORTANCE_S).save(folder)


def _show(history: History) -> None:
    """Print as a table the row of each split that is of the saved model."""
    from rich import box
    from rich.table import Table

    from viviane.cli.console import output

    rows = [row for row in (history.of_model("train"), history.of_model("valid")) if row is not None]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("split", "epoch", "lr", "seconds")))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    if len(names) > _MAX_COLUMNS:  # several labels or metrics: a line for each figure
        for row in rows:
            table.add_column(row["split"], justify="right")
        for name in names:
            table.add_row(name.replace("_", " "), *(_number(row.get(name), name) for row in rows))
    else:
        for name in names:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(row["split"], *(_number(row.get(name), name) for name in names))
    output().print(table)
    typer.echo(f"stopped by: {history.stopped}")
    if history.restored_step is not None:
        typer.echo(f"the model is that of step {history.restored_step:,}, the best evaluation; so are these figures")


def _number(value: object, name: str) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 or name == "samples_per_second" else f"{value:.5f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

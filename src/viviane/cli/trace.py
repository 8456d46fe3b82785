"""`viviane trace`: a few steps of training under the profiler, as a trace file, a picture and a table."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from viviane.data import Dataset
    from viviane.model import Model
    from viviane.training.profiling.trace import Recorded, Replayed

_SYNTHETIC_BATCHES = 8
_KERNELS = 8


def command(
    source: Annotated[Path, typer.Argument(help="JSON file of `viviane train`, or a saved model.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to record.")] = 5,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1; else the solver's.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for traces, pictures and trace.html.")] = Path(
        "trace"
    ),
    data: Annotated[Path | None, typer.Option(help="Rows to train on; else the file's, or synthetic ones.")] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Draw rows by the schema, whatever data there is.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows of a batch; else the solver's.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: solver.precision=bf16.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Train in this many processes on the CPU.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Train on this many GPUs of this machine.")] = None,
) -> None:
    """Show where the time of a training step goes. No file of the model or the run is touched."""
    if processes is not None or gpus is not None:
        from viviane.cli.launch import launch

        launch(processes, gpus)  # does not return: the command starts over in every process
    from viviane.data import Dataset
    from viviane.report.trace_page import PICTURE_FILE, REPLAYED_PICTURE_FILE, write_trace_page
    from viviane.training.profiling.trace import record_trace

    model, rows = _model(source, device, batch_size, changes or [], data)
    group = model.trainer.group
    with tempfile.TemporaryDirectory(prefix="viviane-trace-") as spare:
        if synthetic or rows is None:
            rows = Dataset(group.from_first(lambda: _draw(model, Path(spare) / "rows")))
        recorded = record_trace(model.trainer, rows, output, steps)
        group.from_first(lambda: None)  # rank 0's rows stay until all have read them
    if recorded is None:
        return
    page = write_trace_page(recorded, output)
    _show(recorded)
    for found, picture in (
        (recorded.replayed, page.with_name(REPLAYED_PICTURE_FILE)),
        (recorded, page.with_name(PICTURE_FILE)),
    ):
        if found is not None:
            typer.echo(f"trace:   {found.file} (open it at ui.perfetto.dev)\npicture: {picture}")
    typer.echo(f"page:    {page}")


def _draw(model: Model, folder: Path) -> str:
    """Write synthetic rows for a few batches."""
    from viviane.bench.samples import Samples

    return str(Samples(model.schema).write(folder, model.solver.batch_size * _SYNTHETIC_BATCHES).path)


def _model(
    source: Path, device: str | None, batch_size: int | None, changes: list[str], data: Path | None
) -> tuple[Model, Dataset | None]:
    """Build the model of a JSON file, or load a saved one; and open its rows, if it has any."""
    from viviane.cli.train_config import read_train_config
    from viviane.config import Solver
    from viviane.data import Dataset
    from viviane.model import Model
    from viviane.model.saving import find_model, read_model

    given = {"batch_size": batch_size, "device": device}
    wanted = {name: value for name, value in given.items() if value is not None}
    if source.is_dir():
        if changes:
            raise ConfigError("--set changes a JSON file, and this is a saved model", value=str(source),
                              fix="use --batch-size and --device")  # fmt: skip
        file, schema = read_model(find_model(source))
        model = Model((file.solver or Solver()).model_copy(update=wanted), schema, name=file.name)
        model.nodes.extend(file.nodes)
        model.compile(file.optimizer, file.embedding_optimizer)
        return model, None if data is None else Dataset(data)
    settings = read_train_config(source, [*(f"solver.{name}={value}" for name, value in wanted.items()), *changes])
    place = settings.data if data is None else settings.data.model_copy(update={"train": str(data)})
    rows = place.open_train()
    if not isinstance(rows, Dataset):
        fix = "give a data set of such rows: --data FOLDER"
        raise ConfigError("a stream is not traced", where="data", value=place.train, fix=fix)
    model = settings.build(rows.schema)
    model.compile(settings.optimizer, settings.embedding_optimizer, settings.metrics)
    return model, rows


def _show(recorded: Recorded) -> None:
    """Print replayed steps by kind of kernel, where there are any; the ranges, and the longest kernels."""
    from viviane.cli.console import output
    from viviane.report.trace_page import HEADINGS, OF_A_DEVICE, cells, summary

    timeline, console = recorded.timeline, output()
    title = f"A step on {timeline.device}"
    if recorded.replayed is not None:
        _show_replayed(recorded.replayed, console)
        title = "The same step from Python"
    shown = [i for i, name in enumerate(HEADINGS) if timeline.work or name not in OF_A_DEVICE]
    rows = [cells(recorded, row) for row in timeline.rows()]
    console.print(_table(title, [HEADINGS[i] for i in shown], [[row[i] for i in shown] for row in rows]))
    for name, ms, times in timeline.kernels(_KERNELS):
        console.print(f"{ms:9.4f} ms {times:6.1f} x  {name[:90]}", soft_wrap=True, markup=False)
    console.print(summary(recorded), soft_wrap=True)


def _show_replayed(replayed: Replayed, console: Console) -> None:
    from viviane.report.trace_page import KIND_HEADINGS, gap_lines, kind_cells, replayed_summary

    time = replayed.time
    title = f"A replayed step on {replayed.timeline.device}"
    console.print(_table(title, KIND_HEADINGS, [kind_cells(time, row) for row in time.kinds]))
    for ms, times, before, after in gap_lines(time):
        console.print(f"{ms:>9} ms {times:>6} x  no kernel between {before} and {after}", soft_wrap=True, markup=False)
    console.print(replayed_summary(replayed), soft_wrap=True)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table

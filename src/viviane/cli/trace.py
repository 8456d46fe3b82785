"""`viviane trace`: a few steps of training under the profiler, as a trace file, a picture and a table."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from viviane.data import Dataset
    from viviane.model import Model
    from viviane.training.trace import Recorded

_SYNTHETIC_BATCHES = 8
_KERNELS = 8


def command(
    source: Annotated[Path, typer.Argument(help="JSON file of `viviane train`, or a saved model.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to record.")] = 5,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1; else the solver's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for trace.json.gz, trace.svg and trace.html.")] = Path("trace"),
    data: Annotated[Path | None, typer.Option(help="Rows to train on; else the file's, or synthetic ones.")] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Draw rows by the schema, whatever data there is.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows of a batch; else the solver's.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: solver.precision=bf16.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Train in so many processes on the CPU.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Train on so many GPUs of this machine.")] = None,
) -> None:
    """Show where the time of a training step goes. No file of the model or the run is touched."""
    if processes is not None or gpus is not None:
        from viviane.cli.launch import launch

        launch(processes, gpus)  # does not come back: the command starts anew in every process
    from viviane.data import Dataset
    from viviane.report.trace_page import write_trace_page
    from viviane.training.trace import record_trace

    model, rows = _model(source, device, batch_size, changes or [], data)
    group = model.trainer.group
    with tempfile.TemporaryDirectory(prefix="viviane-trace-") as spare:
        if synthetic or rows is None:
            rows = Dataset(group.from_first(lambda: _draw(model, Path(spare) / "rows")))
        recorded = record_trace(model.trainer, rows, out, steps)
        group.from_first(lambda: None)  # rank 0's rows stay until all have read them
    if recorded is None:
        return
    page = write_trace_page(recorded, out)
    _show(recorded)
    typer.echo(f"trace:   {recorded.file} (open it at ui.perfetto.dev)\npicture: {out / 'trace.svg'}\npage:    {page}")


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
    """Print the ranges, and the longest kernels."""
    from rich import box
    from rich.table import Table

    from viviane.cli.console import output
    from viviane.report.trace_page import HEADINGS, OF_A_DEVICE, cells, summary

    timeline = recorded.timeline
    table = Table(title=f"A step on {timeline.device}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [i for i, name in enumerate(HEADINGS) if timeline.work or name not in OF_A_DEVICE]
    for i in shown:
        table.add_column(HEADINGS[i], justify="right" if i else "left", no_wrap=True)
    for row in timeline.rows():
        values = cells(recorded, row)
        table.add_row(*(values[i] for i in shown))
    console = output()
    console.print(table)
    for name, ms, times in timeline.kernels(_KERNELS):
        console.print(f"{ms:9.4f} ms {times:6.1f} x  {name[:90]}", soft_wrap=True, markup=False)
    console.print(summary(recorded), soft_wrap=True)

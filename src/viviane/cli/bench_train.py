"""What `viviane bench train` does and prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from viviane.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from rich.table import Table

    from viviane.bench.embedding import LeftOut
    from viviane.bench.train import TrainComparison, TrainFigure
    from viviane.bench.train_libraries import Training

_PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class BenchOptions:
    """The command's options.

    Args:
        model: name in the zoo.
        rows, dim: of the tables.
        batches: batch sizes.
        optimizer, num_dense, precision, ids, exponent, device: see `viviane bench --help`.
    """

    model: str
    rows: tuple[int, ...]
    dim: int
    batches: tuple[int, ...]
    optimizer: str
    num_dense: int
    precision: str
    ids: str
    exponent: float
    device: str

    def trainings(self) -> list[Training]:
        """Return what is to be measured, for each batch size.

        Raises:
            ConfigError: something of it is not there, and what is.
        """
        from viviane.bench.train_libraries import Training
        from viviane.bench.workload import Tables, draw_ids, known_rule
        from viviane.core.device import resolve_device
        from viviane.zoo import ZOO

        if self.model not in list(ZOO):
            raise ConfigError("no such model", where="--model", value=self.model, fix=suggest(self.model, list(ZOO)))
        if self.precision not in _PRECISIONS:
            raise ConfigError("no such precision", where="--precision", value=self.precision,
                              allowed=", ".join(_PRECISIONS))  # fmt: skip
        draw_ids(self.rows, 1, self.ids, self.exponent, count=1)  # refuses what it does not know
        tables = Tables(self.rows, self.dim, known_rule(self.optimizer.strip()), resolve_device(self.device))
        return [
            Training(self.model, tables, size, self.num_dense, self.precision, self.ids, self.exponent)
            for size in self.batches
        ]


def run(options: BenchOptions, peers: str, seconds: float, to_json: Path | None) -> None:
    """Measure, print, and write the file."""
    from viviane.bench.train import choose_train_libraries, compare_training

    trainings = options.trainings()
    names = choose_train_libraries(peers, options.model)
    tables = trainings[0].tables
    words = f"{options.model}, {len(tables.rows)} tables, {sum(tables.rows):,} rows x {options.dim}, {options.ids} ids"
    typer.echo(f"{words}, {options.precision}, {tables.rule}, on {tables.device}; the first step compiles", err=True)
    found = compare_training(trainings, names, seconds=seconds, heard=tell)
    show(found)
    if to_json is not None:
        to_json.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
        typer.echo(f"written: {to_json}")


def tell(one: TrainFigure | LeftOut) -> None:
    """Print a new measurement."""
    from viviane.bench.train import TrainFigure

    if isinstance(one, TrainFigure):
        typer.echo(f"  {one.library}, batch {one.batch}: {one.ms:.3f} ms", err=True)


def show(found: TrainComparison) -> None:
    """Print the figures, and what was left out."""
    from rich.markup import escape

    from viviane.cli.console import output

    console = output()
    console.print(figures(found))
    floor = found.floors[0]
    console.print(
        f"Floor: {floor.num_bytes / 1e6 / found.trainings[0].batch * 1e3:.1f} KB and "
        f"{floor.flops / found.trainings[0].batch / 1e6:.2f} MFLOP a sample, at {floor.copy_gb_per_second:.1f} GB/s "
        f"(a large copy) and {floor.tflops:.2f} TFLOP/s (a large product).",
        soft_wrap=True,
    )
    for one in found.left_out:
        line = "" if one.install is None else f"; {one.install}"
        console.print(f"{one.library}: {escape(one.why + line)}", soft_wrap=True)


def figures(found: TrainComparison) -> Table:
    """Lay out the figures."""
    from rich import box
    from rich.table import Table

    from viviane.bench.train_libraries import OURS, TRAIN_LIBRARIES

    first = found.trainings[0]
    title = f"Training step of {first.model}, {first.tables.rule}, {first.precision}, {first.tables.device}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("batch", justify="right")
    table.add_column("library", no_wrap=True)
    for heading in ("ms", "samples/s", "ours faster by", "of the floor", "first ms"):
        table.add_column(heading, justify="right")
    for training in found.trainings:
        name = f"{training.batch:,}"
        for one in (one for one in found.figures if one.batch == training.batch):
            ratio = found.times_faster(one)
            table.add_row(
                name, one.library, f"{one.ms:.3f}", f"{one.samples_per_second:,.0f}",
                "" if ratio is None or one.library == OURS else f"{ratio:.2f}x", f"{found.share_of_floor(one):.0%}",
                f"{one.first_ms:.1f}",
            )  # fmt: skip
            name = ""
        table.add_section()
    names = dict.fromkeys(one.library for one in found.figures)
    table.caption = "; ".join(f"{name}: {TRAIN_LIBRARIES[name].title}" for name in names)
    table.caption_justify = "left"
    return table

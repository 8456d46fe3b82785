"""`viviane bench`: how fast this machine is, beside the libraries that are installed on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from viviane.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from rich.table import Table

    from viviane.bench.embedding import Comparison, LeftOut, Measurement

BENCHES = {
    "embedding": "embedding tables: lookup alone; lookup + backward + update by each optimizer",
    "train": "the training step of a model, from memory and from files",
}
_RULES = "sgd,adagrad,row_wise_adagrad,adam"
_TRAIN_MAX_ROWS = "100_000"
_PEERS = "auto, none, or of torch, fbgemm, torchrec, keras; train: of torch, torch-compile, deepctr."
_WHAT = "; ".join(f"{name}: {what}" for name, what in BENCHES.items())


def command(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=_WHAT + ".")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    tables: Annotated[
        str, typer.Option(help="Sizes of the tables: criteo-kaggle, criteo-terabyte, movielens-20m.")
    ] = "criteo-kaggle",
    rows: Annotated[str | None, typer.Option(help="Sizes of your own, instead of --tables: 1e6,50000,10.")] = None,
    max_rows: Annotated[str | None, typer.Option(help="No table is larger than this.")] = None,
    dim: Annotated[int, typer.Option(min=1, max=2**20, help="Width of the rows.")] = 16,
    batch_size: Annotated[str, typer.Option(help="Rows of a batch; several with commas.")] = "2048",
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="sgd, adagrad, row_wise_adagrad, rmsprop, adam, adamw, adamax, adadelta, row_wise_adam, lamb or "
            "ftrl; several with commas, train takes one."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="train: a model of the zoo.")] = "dlrm",
    num_dense: Annotated[int, typer.Option(min=1, help="train: dense columns.")] = 13,
    precision: Annotated[str, typer.Option(help="train: of the dense layers: fp32, bf16, fp16.")] = "fp32",
    ids: Annotated[str, typer.Option(help="How ids are drawn: power-law or uniform.")] = "power-law",
    exponent: Annotated[float, typer.Option(help="Of the power law.")] = 1.1,
    peers: Annotated[str, typer.Option(help=_PEERS)] = "auto",
    seconds: Annotated[float, typer.Option(min=0.0, help="To spend on each figure.")] = 2.0,
    processor_time: Annotated[
        bool, typer.Option("--processor-time", help="Of all threads on the CPU, not on the wall: for a busy machine.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write everything to this file.")] = None,
) -> None:
    """Compare with other libraries on this machine. WHAT there is: embedding, train."""
    if what not in BENCHES:
        raise ConfigError("no such benchmark", value=what, fix=suggest(what, BENCHES))
    if what == "train":
        from viviane.cli.bench_train import BenchOptions, run

        if processor_time:
            raise ConfigError("train is timed on the wall alone", where="--processor-time", fix="leave it out")
        sizes = table_sizes(tables, rows, max_rows or _TRAIN_MAX_ROWS)
        batches = whole_numbers(batch_size, "batch-size")
        rule = optimizer or "sgd"
        options = BenchOptions(model, sizes, dim, batches, rule, num_dense, precision, ids, exponent, device)
        run(options, peers, seconds, output)
        return
    from viviane.bench.embedding import choose_libraries, compare
    from viviane.bench.workload import Draw, Tables, draw_ids, known_rule
    from viviane.core.device import resolve_device

    where = resolve_device(device)
    names = choose_libraries(peers, where)
    sizes = table_sizes(tables, rows, max_rows)
    kinds = [Tables(sizes, dim, known_rule(one.strip()), where) for one in (optimizer or _RULES).split(",")]
    draws = [Draw(size, ids, exponent) for size in whole_numbers(batch_size, "batch-size")]
    draw_ids(sizes, 1, ids, exponent, count=1)  # refuses what it does not know before processes are started
    typer.echo(
        f"{len(sizes)} tables, {sum(sizes):,} rows x {dim}, {ids} ids, on {where}; the first step compiles", err=True
    )
    found = compare(kinds, draws, names, seconds=seconds, processor_time=processor_time, heard=tell)
    show(found)
    if output is not None:
        law = {"ids": ids, "exponent": exponent if ids == "power-law" else None, "processor_time": processor_time}
        output.write_text(json.dumps({**found.to_dict(), **law}, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"written: {output}")


def tell(one: Measurement | LeftOut) -> None:
    """Print a new measurement."""
    from viviane.bench.embedding import Measurement

    if isinstance(one, Measurement):
        typer.echo(f"  {one.library}, {one.operation}, batch {one.batch}: {one.ms:.3f} ms", err=True)


def table_sizes(name: str, rows: str | None, max_rows: str | None) -> tuple[int, ...]:
    """Return the rows of each table, by name or as given, none above the largest."""
    from viviane.bench.workload import TABLE_SIZES

    if rows is None and name not in TABLE_SIZES:
        raise ConfigError("no such tables", where="--tables", value=name, fix=suggest(name, TABLE_SIZES))
    sizes = TABLE_SIZES[name] if rows is None else whole_numbers(rows, "rows")
    if max_rows is not None:
        (largest,) = whole_numbers(max_rows, "max-rows")[:1]
        sizes = tuple(min(size, largest) for size in sizes)
    return sizes


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read positive whole numbers with commas between, each written as 1000, 1_000 or 1e3."""
    from viviane.cli.generate import whole

    numbers = tuple(whole(part, option) for part in text.split(","))
    if min(numbers) < 1:
        raise ConfigError("must be at least 1", where=f"--{option}", value=text)
    return numbers


def show(found: Comparison) -> None:
    """Print the figures of each batch size, and what was left out."""
    from rich.markup import escape

    from viviane.cli.console import output as output_console

    console = output_console()
    for size in dict.fromkeys(one.batch for one in found.measurements):
        console.print(figures(found, size))
    console.print(f"Copy of a large tensor: {found.copy_gb_per_second:.1f} GB/s, read and written.")
    for one in found.left_out:
        what = one.library if one.operation is None else f"{one.library}, {one.operation}"
        line = "" if one.install is None else f"; {one.install}"
        console.print(f"{what}: {escape(one.why + line)}", soft_wrap=True)


def figures(found: Comparison, size: int) -> Table:
    """Lay out the figures of one batch size."""
    from rich import box
    from rich.table import Table

    from viviane.bench.libraries import LIBRARIES, OURS
    from viviane.bench.workload import RULES

    here = [one for one in found.measurements if one.batch == size]
    distinct, ids = here[0].distinct_rows, here[0].num_ids
    title = f"Batch {size:,} ({distinct:,.0f} distinct rows of {ids:,} ids), {found.device}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("operation", no_wrap=True)
    table.add_column("library", no_wrap=True)
    for heading in ("ms", "M ids/s", "ours faster by", "GB/s", "of copy", "first ms"):
        table.add_column(heading, justify="right")
    for operation in dict.fromkeys(["lookup", *(one.operation for one in here)]):
        name = f"train, {operation}" if operation in RULES else operation
        for one in (one for one in here if one.operation == operation):
            ratio = found.times_faster(one)
            table.add_row(
                name, one.library, f"{one.ms:.3f}", f"{one.ids_per_second / 1e6:.1f}",
                "" if ratio is None or one.library == OURS else f"{ratio:.2f}x", f"{one.gb_per_second:.1f}",
                f"{one.gb_per_second / found.copy_gb_per_second:.0%}", f"{one.first_ms:.1f}",
            )  # fmt: skip
            name = ""
        table.add_section()
    titles = (f"{name}: {LIBRARIES[name].title}" for name in dict.fromkeys(one.library for one in here))
    table.caption = "; ".join(["train: lookup + backward + update", *titles])
    table.caption_justify = "left"
    return table

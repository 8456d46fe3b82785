"""`viviane etl`: raw logs to data sets with their schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from viviane.etl import EtlConfig, FittedEtl, Summary

_SPLIT_HELP = (
    "hash:COLUMN:train=0.8,valid=0.1,test=0.1 | time:COLUMN:train=0.9,test=0.1 | time:COLUMN:test@2024-06-01 | "
    "file:train=day_0*,test=day_1 | rows:train=0.9,test=0.1 (in the order of the files)."
)


def command(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Raw files, folders or patterns.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the data sets and etl.zip.")],
    config: Annotated[Path | None, typer.Option(help="Declarative JSON file.")] = None,
    preset: Annotated[str | None, typer.Option(help="A ready-made file: criteo.")] = None,
    apply: Annotated[Path | None, typer.Option(help="Apply this fitted etl.zip; nothing is learned.")] = None,
    num_dense: Annotated[int | None, typer.Option(help="Preset: numeric columns [13].")] = None,
    num_categorical: Annotated[int | None, typer.Option(help="Preset: categorical columns [26].")] = None,
    min_count: Annotated[int | None, typer.Option(help="Preset: rarer values become one unknown id [6].")] = None,
    hash_ids: Annotated[int | None, typer.Option(help="Preset: hash into so many ids, learn no vocabulary.")] = None,
    raw_ids: Annotated[bool, typer.Option(help="Preset: keep ids as they are, for dynamic tables.")] = False,
    split: Annotated[str | None, typer.Option(help=_SPLIT_HELP)] = None,
    memory_limit: Annotated[str, typer.Option(help="Bound of the whole process: 4GB, 512MiB.")] = "4GB",
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.", min=1)] = None,
    on_bad_row: Annotated[
        str, typer.Option(help="error: stop, naming file, line, column. reject: set aside in rejects.jsonl.")
    ] = "error",
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted run of the same job.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
) -> None:
    """Clean raw logs: learn on the training part, write Parquet and schema for every part."""
    from viviane.etl import run

    options = {
        "num_dense": num_dense, "num_categorical": num_categorical, "min_count": min_count, "hash_ids": hash_ids,
        "raw_ids": raw_ids or None,
    }  # fmt: skip
    what = _choose(config, preset, apply, {name: value for name, value in options.items() if value is not None})
    with _Progress() as progress:
        summary = run(
            what,
            inputs,
            output,
            split=split,
            memory_limit=memory_limit,
            threads=threads,
            on_bad_row=on_bad_row,
            resume=resume,
            overwrite=overwrite,
            progress=progress.show,
        )
    _print(summary)


def _choose(
    config: Path | None, preset: str | None, apply: Path | None, options: dict[str, int]
) -> EtlConfig | FittedEtl:
    from viviane.etl import PRESETS, EtlConfig, FittedEtl

    if sum(one is not None for one in (config, preset, apply)) != 1:
        raise ConfigError(
            "say what to do with the rows", allowed="exactly one of --config FILE, --preset NAME, --apply etl.zip"
        )
    if options and preset is None:
        flag = "--" + next(iter(options)).replace("_", "-")
        raise ConfigError(f"{flag} belongs to --preset", fix="write it into the declarative file instead")
    if apply is not None:
        return FittedEtl.load(apply)
    if config is not None:
        return EtlConfig.from_json_file(config)
    made: EtlConfig = PRESETS[str(preset)](**options)
    return made


class _Progress:
    """A line of progress at a terminal, nothing elsewhere."""

    def __enter__(self) -> _Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, object] = {}
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def show(self) -> Callable[[str, int, int], None]:
        """Called by the ETL with a step, how much is done, of how much."""

        def update(step: str, done: int, total: int) -> None:
            if step not in self._tasks:
                self._tasks[step] = self._bar.add_task(step, total=total or None)
            self._bar.update(self._tasks[step], completed=done, total=total or None)  # type: ignore[arg-type]

        return update


def _print(summary: Summary) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"ETL into {summary.output}", title_justify="left")
    table.add_column("")
    table.add_column("rows", justify="right")
    table.add_row("read", f"{summary.rows_in:,}")
    for name, value in (("rejected", summary.rejected), ("filtered", summary.filtered)):
        if value:
            table.add_row(name, f"{value:,}")
    for name, value in summary.rows.items():
        table.add_row(f"written: {name}", f"{value:,}")
    console = Console(highlight=False)
    console.print(table)
    if summary.num_ids:
        largest = sorted(summary.num_ids.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {count:,}" for name, count in largest[:8])
        more = f", and {len(largest) - 8} smaller ones" if len(largest) > 8 else ""
        console.print(f"ids per column: {shown}{more}")
    for name, value in summary.num_cut.items():
        if value:
            console.print(f"{name}: {value:,} lists were longer than max_length and were cut")
    seconds = sum(summary.seconds.values())
    if seconds:
        steps = ", ".join(f"{step} {value:.1f}" for step, value in summary.seconds.items())
        console.print(f"{seconds:.1f} s ({steps}), {summary.rows_in / seconds:,.0f} rows/s")

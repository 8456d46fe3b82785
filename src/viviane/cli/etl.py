"""`viviane etl`: raw logs to data sets with their schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from viviane.cli.console import Quiet, is_quiet
from viviane.cli.work_progress import WorkProgress
from viviane.core.errors import ConfigError
from viviane.core.files import write_bytes_atomic
from viviane.core.optional import require
from viviane.core.yaml_files import is_yaml, yaml_text

if TYPE_CHECKING:
    from viviane.etl import EtlConfig, FittedEtl, SequenceConfig, SequenceSummary, Summary

SEQUENCES = "viviane-sequences"
_SPLIT_HELP = (
    "hash:COLUMN:train=0.8,valid=0.1,test=0.1 | time:COLUMN:train=0.9,test=0.1 | time:COLUMN:test@2024-06-01 | "
    "file:train=day_0*,test=day_1 | rows:train=0.9,test=0.1 (in the order of the files)."
)


def command(
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT...", help="Raw files, folders or patterns.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the data sets and etl.zip.")] = None,
    config: Annotated[Path | None, typer.Option(help="Declarative file, JSON or YAML: rows, or sequences.")] = None,
    preset: Annotated[str | None, typer.Option(help="A ready-made file: criteo.")] = None,
    apply: Annotated[Path | None, typer.Option(help="Apply this fitted etl.zip, or a folder's; learn nothing.")] = None,
    num_dense: Annotated[int | None, typer.Option(help="Preset: numeric columns [13].")] = None,
    num_categorical: Annotated[int | None, typer.Option(help="Preset: categorical columns [26].")] = None,
    min_count: Annotated[int | None, typer.Option(help="Preset: rarer values become one unknown id [6].")] = None,
    hash_ids: Annotated[int | None, typer.Option(help="Preset: hash into this many ids, learn no vocabulary.")] = None,
    raw_ids: Annotated[bool, typer.Option(help="Preset: keep ids as they are, for dynamic tables.")] = False,
    infer: Annotated[
        bool, typer.Option("--infer", help="Infer column types of INPUT; print them and the declarative file.")
    ] = False,
    label: Annotated[list[str] | None, typer.Option(help="With --infer: a column to predict; several times.")] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Print statistics of the raw columns of --config as JSON, no more.")
    ] = False,
    split: Annotated[str | None, typer.Option(help=_SPLIT_HELP)] = None,
    memory_limit: Annotated[str, typer.Option(help="Bound of the whole process: 4GB, 512MiB.")] = "4GB",
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.", min=1)] = None,
    on_bad_row: Annotated[
        str, typer.Option(help="error: stop, naming file, line, column. reject: set aside in rejects.jsonl.")
    ] = "error",
    engine: Annotated[str, typer.Option(help="duckdb, spark or gpu; the output is the same.")] = "duckdb",
    master: Annotated[str | None, typer.Option(help="Spark's master: local[4], spark://host:7077, yarn.")] = None,
    spark: Annotated[list[str] | None, typer.Option(help="A setting of Spark, key=value; several times.")] = None,
    device: Annotated[str | None, typer.Option(help="Of the GPU engine: cuda, cuda:1; cpu to try it. [cuda]")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted run of the same job.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw what would be done as SVG into this file, no more.")] = None,
    quiet: Quiet = False,
) -> None:
    """Clean raw logs: learn on the training part, write Parquet and schema for every part."""
    from viviane.etl import SequenceConfig, run, sequences

    if label and not infer:
        raise ConfigError("--label is for --infer; the declarative file names the labels", value=", ".join(label))
    if infer:
        _infer(inputs or [], label or [], output, overwrite=overwrite)
        return

    options = {
        "num_dense": num_dense, "num_categorical": num_categorical, "min_count": min_count, "hash_ids": hash_ids,
        "raw_ids": raw_ids or None,
    }  # fmt: skip
    what = _choose(config, preset, apply, {name: value for name, value in options.items() if value is not None})
    if plot is not None:
        _draw(what, plot)
        return
    if statistics:
        _describe(what, inputs or [], memory_limit, threads, _bad_row(on_bad_row))
        return
    if not inputs or output is None:
        raise ConfigError("the input or the output is missing", allowed="INPUT... --output FOLDER, or --plot FILE")
    if isinstance(what, SequenceConfig):
        _refuse_of_rows(split, engine, bool(master or spark or device))
        made = sequences(
            what, inputs, output,
            memory_limit=memory_limit, threads=threads, on_bad_row=_bad_row(on_bad_row), resume=resume,
            overwrite=overwrite,
        )  # fmt: skip
        _print_sequences(made)
        return
    with WorkProgress() as progress:
        summary = run(
            what, inputs, output,
            split=split, memory_limit=memory_limit, threads=threads, on_bad_row=_bad_row(on_bad_row), engine=engine,
            master=master, spark=spark_settings(spark or []), device=device, resume=resume, overwrite=overwrite,
            progress=progress.show,
        )  # fmt: skip
    _print(summary)


def _describe(
    what: EtlConfig | FittedEtl | SequenceConfig,
    inputs: list[str],
    memory_limit: str,
    threads: int | None,
    on_bad_row: Literal["error", "reject"],
) -> None:
    """Print what the raw columns hold."""
    from dataclasses import asdict

    from viviane.etl import EtlConfig
    from viviane.etl import statistics as statistics_of

    if not isinstance(what, EtlConfig) or not inputs:
        raise ConfigError("--statistics reads files with a config of rows", allowed="INPUT... --config etl.json")
    found = statistics_of(what, inputs, memory_limit=memory_limit, threads=threads, on_bad_row=on_bad_row)
    typer.echo(json.dumps([asdict(one) for one in found], indent=2, ensure_ascii=False))


def _refuse_of_rows(split: str | None, engine: str, has_options: bool) -> None:
    """Refuse options that rows to sequences do not take."""
    if split is not None:
        raise ConfigError("rows to sequences are not split", value=split, fix="split the ETL that reads them")
    if engine != "duckdb" or has_options:
        fix = "leave out --engine, --master, --spark, --device"
        raise ConfigError("rows to sequences are DuckDB's work", value=engine, fix=fix)


def _infer(inputs: list[str], labels: list[str], output: Path | None, *, overwrite: bool) -> None:
    """Print what each column is, and write or print the declarative file."""
    from viviane.etl import infer_file
    from viviane.etl.saved import as_written

    if len(inputs) != 1:
        raise ConfigError("--infer reads one input", value=len(inputs), allowed="viviane etl --infer clicks.csv")
    if output is not None and "=" in output.name and not (output.suffix.lower() == ".json" or is_yaml(output)):
        raise ConfigError(  # without --infer it is a folder of a partition, which rows are written into
            "--infer writes a file, and this is the name of a partition's folder",
            where="--output", value=str(output), allowed="a file such as etl.json or etl.yaml",
            fix="name the file, then write the rows: viviane etl INPUT --config FILE --output " + str(output),
        )  # fmt: skip
    if output is not None and output.exists() and not overwrite:
        raise ConfigError("the file exists", where=str(output), fix="choose another, or pass --overwrite")
    if as_yaml := output is not None and is_yaml(output):
        require("yaml", extra="yaml", purpose="a declarative file in YAML (another name is written as JSON)")
    found = infer_file(inputs[0], labels)
    plain = as_written(found.config)
    text = yaml_text(plain) if as_yaml else json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    typer.echo(found.describe(), err=True)
    if output is None:
        typer.echo(text, nl=False)
        return
    write_bytes_atomic(output, text.encode())
    typer.echo(f"\nedit {output}, then: viviane etl {inputs[0]} --config {output} --output data", err=True)


def spark_settings(pairs: list[str]) -> dict[str, str]:
    """Read settings written as key=value.

    Example:
        >>> spark_settings(["spark.executor.memory=8g"])
        {'spark.executor.memory': '8g'}
    """
    settings = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ConfigError("not a setting of Spark", where="--spark", value=pair, allowed="key=value")
        settings[key] = value
    return settings


def _choose(
    config: Path | None, preset: str | None, apply: Path | None, options: dict[str, int]
) -> EtlConfig | FittedEtl | SequenceConfig:
    from viviane.etl import PRESETS, EtlConfig, FittedEtl, SequenceConfig

    if sum(one is not None for one in (config, preset, apply)) != 1:
        raise ConfigError(
            "the operation is missing",
            allowed="exactly one of --config FILE, --preset NAME, --apply etl.zip",
            fix="for a first --config FILE: viviane etl --infer INPUT --output FILE",
        )
    if options and preset is None:
        flag = "--" + next(iter(options)).replace("_", "-")
        raise ConfigError(f"{flag} belongs to --preset", fix="write it into the declarative file instead")
    if apply is not None:
        return FittedEtl.load(apply)
    if config is not None:
        of_sequences = config.exists() and _format_of(config) == SEQUENCES
        return SequenceConfig.from_json_file(config) if of_sequences else EtlConfig.from_json_file(config)
    made: EtlConfig = PRESETS[str(preset)](**options)
    return made


def _format_of(config: Path) -> object:
    from viviane.config.base import load_json

    data = load_json(config)
    return data.get("format") if isinstance(data, dict) else None


def _bad_row(word: str) -> Literal["error", "reject"]:
    if word not in ("error", "reject"):
        raise ConfigError("unknown on_bad_row", value=word, allowed="error, reject")
    return "error" if word == "error" else "reject"


def _draw(what: EtlConfig | FittedEtl | SequenceConfig, file: Path) -> None:
    from viviane.core.files import write_bytes_atomic
    from viviane.etl import picture

    write_bytes_atomic(file, picture(what).encode())
    print(f"drawn into {file}")  # noqa: T201


def _print_sequences(summary: SequenceSummary) -> None:
    if is_quiet():
        return
    from dataclasses import asdict

    for name, value in asdict(summary).items():
        if value:
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")  # noqa: T201


def _print(summary: Summary) -> None:
    if is_quiet():
        return
    from rich import box
    from rich.table import Table

    from viviane.cli.console import output

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"ETL into {summary.output}", title_justify="left")
    table.add_column("")
    table.add_column("rows", justify="right")
    table.add_row("read", f"{summary.rows_in:,}")
    for name, value in (("rejected", summary.rejected), ("filtered", summary.filtered)):
        if value:
            table.add_row(name, f"{value:,}")
    for name, value in summary.rows.items():
        table.add_row(f"written: {name}", f"{value:,}")
    console = output()
    console.print(table)
    if summary.num_ids:
        largest = sorted(summary.num_ids.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {count:,}" for name, count in largest[:8])
        more = f", and {len(largest) - 8} smaller ones" if len(largest) > 8 else ""
        console.print(f"ids per column: {shown}{more}")
    for name, value in summary.num_cut.items():
        if value:
            console.print(f"{name}: {value:,} lists were longer than max_length and were cut")
    if summary.dropped:
        console.print(f"left out, with fewer values than min_cardinality: {', '.join(summary.dropped)}")
    seconds = sum(summary.seconds.values())
    if seconds:
        steps = ", ".join(f"{step} {value:.1f}" for step, value in summary.seconds.items())
        console.print(f"{seconds:.1f} s ({steps}), {summary.rows_in / seconds:,.0f} rows/s")

"""`viviane convert`: the same rows in another format."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viviane.core.errors import ConfigError
from viviane.core.json_files import json_or_text

if TYPE_CHECKING:
    from viviane.data import Dataset
    from viviane.data.formats import Format

_FORMATS = "parquet, viviane, norm, raw, raw-async, hugectr-parquet"


def command(
    source: Annotated[Path, typer.Argument(help="Data set folder; or a foreign file, folder or file list.")],
    output: Annotated[Path, typer.Argument(help="Folder for the converted data set.")],
    to: Annotated[str, typer.Option("--to", help=f"Format to write: {_FORMATS}.")],
    source_format: Annotated[
        str | None, typer.Option("--from", help="Format of a foreign source; our folders and file lists contain it.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="schema.json of a foreign source.")] = None,
    columns: Annotated[str | None, typer.Option(help="Keep these columns alone: label,I1,C1.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the format to write: check_sum=false, i64_input_key=true.")
    ] = None,
    source_option: Annotated[
        list[str] | None, typer.Option(help="Option of the format to read: num_samples=1000, shifted_keys=false.")
    ] = None,
    rows_per_group: Annotated[int, typer.Option(help="Rows of a row group or block.", min=1)] = 131_072,
    rows_per_file: Annotated[int, typer.Option(help="Rows of a file.", min=1)] = 1_048_576,
    key_set: Annotated[Path | None, typer.Option(help="Write HugeCTR's key set of the rows to this file.")] = None,
    threads: Annotated[int, typer.Option(help="Threads that read.", min=1)] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
) -> None:
    """Write a data set in another format: the same rows in the same order."""
    from viviane.data import Dataset
    from viviane.data.conversion import convert
    from viviane.schema import Schema

    wanted = chosen_format(to, option or [], "--to")
    if source_option and source_format is None:
        raise ConfigError("--source-option needs --from", value=source_option[0], fix=f"give --from: {_FORMATS}")
    given = None if source_format is None else chosen_format(source_format, source_option or [], "--from")
    data = Dataset(source, None if schema is None else Schema.load(schema), given)
    if columns is not None:
        data = _narrow(data, [name.strip() for name in columns.split(",")])
    start = time.perf_counter()
    done = convert(
        data,
        output,
        wanted,
        rows_per_group=rows_per_group,
        rows_per_file=rows_per_file,
        num_threads=threads,
        overwrite=overwrite,
    )
    seconds = time.perf_counter() - start
    size = sum(stamp[0] for stamp in done.stamps)
    typer.echo(
        f"{output}: {len(done):,} rows, {size / 1e6:,.1f} MB in {len(done.files)} file(s), {done.format.format}, "
        f"in {seconds:.1f} s ({len(done) / seconds:,.0f} rows/s)"
    )
    if key_set is not None:
        _write_keys(key_set, done, wanted)


def _narrow(data: Dataset, names: list[str]) -> Dataset:
    """Return the data set with fewer columns; a column of weights goes unless it is named."""
    from viviane.data import Dataset
    from viviane.schema import Schema

    weights = {name for name in names if name in data.schema.column_names} - {one.name for one in data.schema.columns}
    plain = data.schema.select([name for name in names if name not in weights])
    left = [name for name in plain.column_names if name not in names]
    categorical = [
        one if one.weights in weights else one.model_copy(update={"weights": None}) for one in plain.categorical
    ]
    schema = Schema(
        labels=plain.labels,
        dense=plain.dense,
        categorical=tuple(categorical),
        sample_weight=plain.sample_weight if plain.sample_weight in weights else None,
        ignored=(*plain.ignored, *left),
    )
    return Dataset(data.path, schema, data.format, stored=data.stored)


def _write_keys(path: Path, data: Dataset, wanted: Format) -> None:
    from viviane.data.formats.key_set import write_key_set

    wide = bool(getattr(wanted, "i64_input_key", False))
    count = write_key_set(path, data, i64_input_key=wide, slot_sizes=getattr(wanted, "slot_sizes", None))
    typer.echo(f"{path}: {count:,} keys of {8 if wide else 4} bytes")


def chosen_format(name: str, options: list[str], flag: str) -> Format:
    """Return a format from its name and from options written as name=value, the value in JSON or plain text."""
    from viviane.data.formats import format_of

    settings: dict[str, Any] = {"format": name}
    for one in options:
        key, equals, text = one.partition("=")
        if not equals or key == "format":
            raise ConfigError("an option is written as name=value", where=flag, value=one, allowed="check_sum=false")
        settings[key] = json_or_text(text, where=f"{flag} {key}")
    return format_of(settings, where=flag)

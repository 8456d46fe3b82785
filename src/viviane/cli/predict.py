"""`viviane predict`: probabilities for a data set or raw rows, in their order, in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from viviane.core.errors import ConfigError
from viviane.core.exchange import tidy
from viviane.core.files import replace_file
from viviane.core.locations import RemotePath, location
from viviane.core.remote.published import upload_file


def command(
    model: Annotated[Path, typer.Argument(help="A saved model, or the run folder that holds one.")],
    data: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A data set folder, or raw files; labels may be absent.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .parquet or .csv file.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Write one prediction per input row, in the order of the rows."""
    from viviane.cli.rows import open_rows
    from viviane.model import Model

    if output.suffix not in (".parquet", ".csv"):
        raise ConfigError("unknown kind of output", where="--output", value=str(output), allowed=".parquet, .csv")
    place = location(output)
    if not isinstance(place, RemotePath):
        tidy(place)
    if place.exists() and not overwrite:
        raise ConfigError("the output exists", where=str(output), fix="choose another, or pass --overwrite")
    loaded = Model.load(model, device=device)
    labels = [label.name for label in loaded.schema.labels]
    names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
    count = 0
    with open_rows(data, loaded, with_labels=False) as rows, _writer(output, names, overwrite) as write:
        for part in loaded.predict_batches(rows):
            write(part)
            count += len(part)
    typer.echo(f"{output}: {count:,} predictions")


@contextmanager
def _writer(output: Path, names: list[str], overwrite: bool) -> Iterator[Any]:
    """Yield a function that appends predictions (B, L); the file takes its name when all are written."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    schema = pa.schema([pa.field(name, pa.float32(), nullable=False) for name in names])
    place = location(output)
    kind = pyarrow.parquet.ParquetWriter if output.suffix == ".parquet" else pyarrow.csv.CSVWriter
    with ExitStack() as stack:
        if isinstance(place, RemotePath):
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="viviane-predict-"))) / output.name
        else:
            work = stack.enter_context(replace_file(place, overwrite=overwrite))
        with kind(str(work), schema) as file:
            yield lambda part: file.write_table(
                pa.table([pa.array(part[:, i]) for i in range(len(names))], schema=schema)
            )
        if isinstance(place, RemotePath):
            upload_file(work, place)

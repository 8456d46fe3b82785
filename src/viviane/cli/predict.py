"""`viviane predict`: probabilities for a data set or raw rows, in their order, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from viviane.cli.console import Quiet, say


def command(
    model: Annotated[Path, typer.Argument(help="A saved model, or the run folder that holds one.")],
    data: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A data set folder, or raw files; labels may be absent.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .parquet or .csv file.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write one prediction per input row, in the order of the rows."""
    import pyarrow as pa

    from viviane.cli.rows import open_rows
    from viviane.cli.tables import check_output, writing
    from viviane.model import Model

    check_output(output, overwrite)
    loaded = Model.load(model, device=device)
    labels = [label.name for label in loaded.schema.labels]
    names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
    schema, count = pa.schema([pa.field(name, pa.float32(), nullable=False) for name in names]), 0
    with open_rows(data, loaded, with_labels=False) as rows, writing(output, schema, overwrite=overwrite) as write:
        for part in loaded.predict_batches(rows):
            write(pa.table([pa.array(part[:, i]) for i in range(len(names))], schema=schema))
            count += len(part)
    say(f"{output}: {count:,} predictions")

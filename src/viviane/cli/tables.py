"""Tables that commands write piece by piece."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viviane.core.errors import ConfigError
from viviane.core.exchange import tidy
from viviane.core.files import replace_file
from viviane.core.locations import RemotePath, location
from viviane.core.remote.published import upload_file

if TYPE_CHECKING:
    import pyarrow as pa


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output that is neither Parquet nor CSV, or that exists.

    Raises:
        ConfigError: naming it.
    """
    if output.suffix not in (".parquet", ".csv"):
        raise ConfigError("unknown kind of output", where="--output", value=str(output), allowed=".parquet, .csv")
    place = location(output)
    if not isinstance(place, RemotePath):
        tidy(place)
    if place.exists() and not overwrite:
        raise ConfigError("the output exists", where=str(output), fix="choose another, or pass --overwrite")


@contextmanager
def writing(output: Path, schema: pa.Schema, *, overwrite: bool) -> Iterator[Callable[[pa.Table], Any]]:
    """Yield a function that appends a table; the file takes its name when all are written.

    Args:
        output: a .parquet or .csv file, or its URL.
        schema: of the tables.
        overwrite: False refuses one that exists.
    """
    import pyarrow.csv
    import pyarrow.parquet

    place = location(output)
    kind = pyarrow.parquet.ParquetWriter if output.suffix == ".parquet" else pyarrow.csv.CSVWriter
    with ExitStack() as stack:
        if isinstance(place, RemotePath):
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="viviane-output-"))) / output.name
        else:
            work = stack.enter_context(replace_file(place, overwrite=overwrite))
        with kind(str(work), schema) as file:
            yield file.write_table
        if isinstance(place, RemotePath):
            upload_file(work, place)

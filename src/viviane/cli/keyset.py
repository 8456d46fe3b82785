"""`viviane keyset`: the distinct ids of data sets, which say what rows a training pass needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from viviane.core.errors import ConfigError


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="DATA...", help="Folders of data sets, such as one a day.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the keys of one data set; else in its folder.")
    ] = None,
    hugectr: Annotated[
        bool, typer.Option("--hugectr", help="With --output: HugeCTR's raw key set, keys unique over all slots.")
    ] = False,
    i64: Annotated[bool, typer.Option("--i64", help="With --hugectr: keys of 8 bytes instead of 4.")] = False,
) -> None:
    """Write the key sets of sub-data-sets for training in passes."""
    from viviane.data import Dataset, write_key_sets
    from viviane.data.formats.key_set import write_key_set
    from viviane.data.key_sets import KEY_SETS_FILE

    if output is not None and len(folders) > 1:
        raise ConfigError("--output is for one data set", value=len(folders), fix="leave it out, or name one folder")
    if hugectr and output is None:
        raise ConfigError("--hugectr needs --output", fix="give the file, such as file_list.keyset")
    if i64 and not hugectr:
        raise ConfigError("--i64 is for --hugectr", fix="leave it out: key sets of Viviane have 8 bytes a key")
    for folder in folders:
        data, start = Dataset(folder), time.perf_counter()
        if hugectr and output is not None:
            count, place, columns = write_key_set(output, data, i64_input_key=i64), output, ""
        else:
            counts = write_key_sets(data, output)
            count, place = sum(counts.values()), output or folder / KEY_SETS_FILE
            columns = f" of {len(counts)} columns"
        seconds = time.perf_counter() - start
        typer.echo(f"{place}: {count:,} keys{columns} in {len(data):,} rows, {seconds:.1f} s")

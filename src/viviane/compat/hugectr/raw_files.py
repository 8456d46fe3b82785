"""What HugeCTR's Raw files say about themselves where a script says less, or something else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from viviane.compat.hugectr.arguments import note, say
from viviane.data.formats import RawAsyncFormat
from viviane.schema import Schema

_ROWS: Final = 4096
_SMALLEST: Final = 1 << 23
"""The bits of the smallest normal float32; what is below, and not 0, is a whole number."""


def has_float_dense(file: str | Path, schema: Schema, *, wide: bool) -> bool:
    """Say whether a RawAsync file's dense numbers are float32, by its first rows: counts have bits no float32 has.

    Args:
        file: RawAsync.
        schema: of its rows.
        wide: keys have 8 bytes.
    """
    path, width = Path(file), sum(column.dim for column in schema.dense)
    if not width or not path.is_file():
        return True
    words = RawAsyncFormat(i64_input_key=wide).record(schema).dtype.itemsize // 4
    with path.open("rb") as opened:
        found = np.fromfile(opened, "<u4", _ROWS * words)
    rows = found[: len(found) // words * words].reshape(-1, words)
    first = len(schema.labels)
    dense = rows[:, first : first + width]
    result = not bool(((dense > 0) & (dense < _SMALLEST)).any())
    note("AsyncParam", f"is_dense_float is not given, and {path.name} holds {'float32' if result else 'int32'}")
    return result


def rows_to_read(file: str | Path, row_bytes: int, num_samples: int, where: str) -> int | None:
    """Return the rows that num_samples leaves of a longer file, None where the whole file is read.

    A file that is shorter is read as it is, with a warning; one that is none of these rows is refused elsewhere.
    """
    path = Path(file)
    if not path.is_file() or not num_samples:
        return None
    rows = path.stat().st_size // row_bytes
    if rows < num_samples:
        say(f"Warning: {where}: {path} has {rows} rows, fewer than {num_samples}: all of them are read")
    return num_samples if rows > num_samples else None

"""Properties of HugeCTR's data files that a script does not specify, or specifies differently."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import numpy as np

from viviane.compat.hugectr.arguments import note, say
from viviane.compat.hugectr.listed_files import listed_files
from viviane.data.formats import RawAsyncFormat
from viviane.data.formats.file_list import is_file_list
from viviane.data.formats.norm import FIRST_HEADER, HEADER
from viviane.schema import Schema

_ROWS: Final = 4096
_SMALLEST: Final = 1 << 23
"""The bits of the smallest normal float32; a smaller non-zero value is an integer."""


def has_float_dense(file: str | Path, schema: Schema, *, wide: bool) -> bool:
    """Return whether a RawAsync file's dense values are float32, by its first rows: counts are not normal floats.

    Args:
        file: a RawAsync file.
        schema: schema of its rows.
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
    note("AsyncParam", f"is_dense_float is not set, and {path.name} contains {'float32' if result else 'int32'}")
    return result


def is_of_2_0(source: str | Path) -> bool:
    """Return whether a source's first Norm file has the header of HugeCTR 2.0, which starts with the number of records.

    Later headers start with error_check 0, or with their own length and error_check 1.
    """
    path = Path(source)
    if path.is_file() and is_file_list(path):
        path = listed_files(path)[0]
    with path.open("rb") as file:
        head = file.read(FIRST_HEADER.size)
    if len(head) < FIRST_HEADER.size:
        return False
    rows, labels, slots, reserved = FIRST_HEADER.unpack(head)
    if rows <= 0 or labels <= 0 or slots <= 0 or reserved != 0:
        return False
    length, error_check = struct.unpack_from("<iq", head)
    return (length, error_check) != (HEADER.size, 1)


def rows_to_read(file: str | Path, row_bytes: int, num_samples: int, where: str) -> int | None:
    """Return the number of rows to read of a file longer than num_samples, None to read the complete file.

    A shorter file is read completely, with a warning; a file with other rows is refused elsewhere.
    """
    path = Path(file)
    if not path.is_file() or not num_samples:
        return None
    rows = path.stat().st_size // row_bytes
    if rows < num_samples:
        say(f"Warning: {where}: {path} has {rows} rows, fewer than {num_samples}: all of them are read")
    return num_samples if rows > num_samples else None

"""HugeCTR's file lists and headers, read by its own rules, which are less strict than those of the formats.

The first line of a list is the number of files that are read; further lines are ignored. A Parquet file that is missing
is skipped (4.0 and later). Of a Norm header only the sum of label_dim and dense_dim must be that of Input.
"""

from __future__ import annotations

import struct
from pathlib import Path

from viviane.compat.hugectr.arguments import say
from viviane.data.formats import HugectrParquetFormat, NormFormat
from viviane.data.formats.file_list import is_file_list, lines_of_list, listed_file, read_file_list
from viviane.data.formats.norm import HEADER
from viviane.schema import Schema

_warned: set[str] = set()
"""The lists with missing files, which are warned of once."""


def listed_files(path: Path, *, skip_missing: bool = False) -> list[Path]:
    """Return the files of a list that are read.

    Args:
        path: the list.
        skip_missing: skip files that are not there, unless none is.

    Raises:
        DataError: see `read_file_list`.
    """
    count, names = lines_of_list(path)
    found = {name: listed_file(path, name) for name in names[:count]}
    absent = [name for name, file in found.items() if file is None]
    files = [file for name in names[:count] if (file := found[name]) is not None]
    if count < 1 or len(names) < count or not files or (absent and not skip_missing):
        return read_file_list(path)  # says what is wrong
    if absent and str(path) not in _warned:
        _warned.add(str(path))
        say(f"Warning: {path}: {len(absent)} files that are missing are skipped: {', '.join(absent[:3])}")
    return files


class ListedParquet(HugectrParquetFormat):
    """HugeCTR's Parquet, of which missing files are skipped."""

    def files_at(self, path: Path) -> list[Path]:
        """Return the files of a list, see `listed_files`."""
        if path.is_file() and is_file_list(path):
            return listed_files(path, skip_missing=True)
        return super().files_at(path)


class ListedNorm(NormFormat):
    """HugeCTR's Norm.

    Args:
        numbers: label_dim and dense_dim of the files, if they differ from Input's, but their sum does not.
    """

    numbers: tuple[int, int] | None = None

    def files_at(self, path: Path) -> list[Path]:
        """Return the files of a list, see `listed_files`."""
        return listed_files(path) if path.is_file() and is_file_list(path) else super().files_at(path)

    def expected(self, stored: Schema) -> tuple[tuple[str, int, int | None], ...]:
        """Return the fields of a header, see `NormFormat`."""
        given = dict(zip(("label_dim", "dense_dim"), self.numbers or (), strict=False))
        return tuple((name, place, given.get(name, value)) for name, place, value in super().expected(stored))


def numbers_of(path: Path, schema: Schema, *, check_sum: bool) -> tuple[int, int] | None:
    """Return label_dim and dense_dim of a source's first Norm file if only their sum is that of a schema."""
    if is_file_list(path):
        path = listed_files(path)[0]
    start = struct.calcsize("<i") if check_sum else 0
    with path.open("rb") as file:
        head = file.read(start + HEADER.size)[start:]
    if len(head) < HEADER.size:
        return None
    numbers, own = HEADER.unpack(head)[2:4], (len(schema.labels), schema.num_dense)
    return numbers if min(numbers) >= 0 and numbers != own and sum(numbers) == sum(own) else None

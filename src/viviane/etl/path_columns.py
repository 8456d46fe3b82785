"""Columns whose values are in the path of a file: its name, or folders as Hive writes them, date=2024-01-01/p.csv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from viviane.core.errors import DataError
from viviane.etl.cells import BadCell, convert
from viviane.etl.columns import InputColumn
from viviane.etl.sources import Source
from viviane.etl.text import Chunk


def in_file(wanted: tuple[InputColumn, ...], values: tuple[tuple[str, str | None], ...]) -> tuple[InputColumn, ...]:
    """Return the columns that are looked for in the file itself."""
    names = {name for name, _ in values}
    return tuple(column for column in wanted if column.name not in names)


def refuse_both(names: Sequence[str], source: Source) -> None:
    """Refuse a file with a column that its path names as well.

    Raises:
        DataError: naming the column.
    """
    for name, _ in source.path_values:
        if name in names:
            raise DataError(
                "a column is both in the file and in its path",
                where=str(source.path),
                value=name,
                fix="rename one of them, or leave out `hive_partitioning` or `file_name` in the config's `input`",
            )


def with_path_columns(
    chunk: Chunk,
    wanted: tuple[InputColumn, ...],
    values: tuple[tuple[str, str | None], ...],
    missing: tuple[str, ...],
) -> Chunk:
    """Return rows with the columns of their path, converted as those of the file are; `wanted` gives the order."""
    if not values:
        return chunk
    known = dict(values)
    columns: dict[str, Any] = {}
    bad = list(chunk.bad)
    for column in wanted:
        if column.name not in known:
            columns[column.name] = chunk.table.column(column.name)
            continue
        text = None if known[column.name] in missing else known[column.name]
        one, cells = convert(pa.array([text], pa.string()), column, missing)
        rows = chunk.table.num_rows
        columns[column.name] = one.take(pa.array([0] * rows, pa.int64()))
        bad += [
            BadCell(row, column.name, f"{cell.problem} (in the path)", cell.value)
            for cell in cells
            for row in range(rows)
        ]
    return replace(chunk, table=pa.table(columns), bad=bad)

"""Tables beside the rows, such as the properties of items: read once, looked up by key, kept with the fitted ETL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import Join, key_names
from viviane.etl.parquet import check_parquet, parquet_rows, typed_chunk
from viviane.etl.sources import Source, find_sources, text_blocks
from viviane.etl.text import Chunk, parse_block, text_layout
from viviane.etl.values import combined


@dataclass(frozen=True)
class JoinTable:
    """The table of a join, whose keys are indexed once, by the first rows that look for them.

    Args:
        rows: the key columns, then those that the join makes, under their new names.
        num_keys: how many columns are keys.
    """

    rows: pa.Table
    num_keys: int

    @cached_property
    def places(self) -> KeyPlaces:
        """Where each key is."""
        return KeyPlaces([combined(self.rows.column(i)) for i in range(self.num_keys)])


External = Mapping[str, JoinTable]
"""By name of a join, its table."""


def read_external(config: EtlConfig) -> dict[str, JoinTable]:
    """Read the table of every join.

    Raises:
        DataError: a file is missing or damaged, has a malformed row, or a key occurs twice; names file and line.
    """
    return {one.name: _read(one) for one in config.derived if isinstance(one, Join)}


def external_stamps(config: EtlConfig) -> list[Any]:
    """Return what distinguishes the files of the tables from changed ones."""
    return [source.stamp() for one in config.derived if isinstance(one, Join) for source in find_sources(one.file)]


def _read(one: Join) -> JoinTable:
    names = one.stored
    tables: list[pa.Table] = []
    places: list[tuple[str, NDArray[np.int64]]] = []
    for source in find_sources(one.file):
        for chunk in _chunks(one, source):
            tables.append(chunk.table.select(list(names)))
            places.append((f"{source.path}, {'row' if source.kind == 'parquet' else 'line'}", chunk.lines))
    if not tables:
        raise DataError("a table to join has no row", where=str(one.file))
    table = pa.concat_tables(tables)
    known = np.ones(table.num_rows, bool)
    for name in one.keys:
        known &= pc.is_valid(combined(table.column(name))).to_numpy(zero_copy_only=False)
    table, rows = table.filter(pa.array(known)), np.flatnonzero(known)
    codes = KeyPlaces([combined(table.column(name)) for name in one.keys]).codes
    first = np.unique(codes, return_index=True)[1]
    if len(first) < len(codes):
        again = int(np.setdiff1d(np.arange(len(codes)), first)[0])
        raise DataError(
            "a key occurs twice in a table to join", where=_place(places, int(rows[again])),
            value={name: table.column(name)[again].as_py() for name in one.keys},
            fix="keep one row a key, or make the other rows' values a list",
        )  # fmt: skip
    table = table.rename_columns(list(names.values())).combine_chunks()
    # As Parquet gives them back, down to the names inside lists, so that a fitted ETL saves to the same bytes again.
    kinds = [
        pa.list_(pa.field("element", kind.value_type)) if pa.types.is_list(kind) else kind
        for kind in table.schema.types
    ]
    return JoinTable(table.cast(pa.schema(list(zip(table.column_names, kinds, strict=True)))), len(one.keys))


def _chunks(one: Join, source: Source) -> Iterator[Chunk]:
    """The typed rows of a file; a malformed row is an error."""
    settings = one.input
    wanted = settings.columns
    if source.kind == "parquet":
        check_parquet(source, wanted, frozenset())
        chunks = (typed_chunk(rows, wanted, at, settings.missing) for rows, at in parquet_rows(source, wanted))
    else:
        layout = text_layout(source, settings, wanted)
        blocks = text_blocks(source, skip_bytes=layout.first_row_bytes, first_line=layout.first_line)
        chunks = (parse_block(block, layout) for block in blocks)
    unit = "row" if source.kind == "parquet" else "line"
    for chunk in chunks:
        if chunk.unparsed:
            line, problem, text = chunk.unparsed[0]
            raise DataError(f"a malformed row of a table to join: {problem}", where=f"{source.path}, {unit} {line}",
                            value=text)  # fmt: skip
        if chunk.bad:
            cell = min(chunk.bad, key=lambda bad: bad.row)
            where = f"{source.path}, {unit} {chunk.lines[cell.row]}, column {cell.column!r}"
            raise DataError(f"a malformed row of a table to join: {cell.problem}", where=where, value=cell.value)
        yield chunk


def _place(places: list[tuple[str, NDArray[np.int64]]], row: int) -> str:
    for path, lines in places:
        if row < len(lines):
            return f"{path} {lines[row]}"
        row -= len(lines)
    raise AssertionError(row)


@dataclass(frozen=True)
class KeyPlaces:
    """Finds tuples of values among known ones.

    Args:
        known: columns of equal length, without missing values.

    Example:
        >>> places = KeyPlaces([pa.array(["a", "b"]), pa.array([1, 1])])
        >>> places.find([pa.array(["b", "b", None]), pa.array([1, 2, 1])]).tolist()
        [1, -1, -1]
    """

    known: list[Any]

    @cached_property
    def _steps(self) -> tuple[list[tuple[Any, NDArray[np.int64]]], NDArray[np.int64]]:
        """The distinct values of each column, and the distinct codes after it; the code of each known tuple."""
        codes = np.zeros(len(self.known[0]), np.int64)
        steps = []
        for column in self.known:
            distinct = pc.unique(column)
            # Below 2^63: both factors are at most the number of rows.
            joined = codes * max(1, len(distinct)) + _index(column, distinct)
            found, codes = np.unique(joined, return_inverse=True)
            codes = codes.astype(np.int64)
            steps.append((distinct, found))
        return steps, codes

    @property
    def codes(self) -> NDArray[np.int64]:
        """A number for each known tuple, the same for equal ones."""
        return self._steps[1]

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        rows = np.empty(len(self.codes), np.int64)
        rows[self.codes] = np.arange(len(rows))
        return rows

    def find(self, columns: list[Any]) -> NDArray[np.int64]:
        """Return the place of each tuple among distinct known ones; -1 where it is not there or a part is missing."""
        codes = np.zeros(len(columns[0]), np.int64)
        for column, (distinct, found) in zip(columns, self._steps[0], strict=True):
            places = _index(column, distinct)
            joined = codes * max(1, len(distinct)) + places
            at = np.minimum(np.searchsorted(found, joined), max(0, len(found) - 1))
            there = (codes >= 0) & (places >= 0) & (len(found) > 0)
            there &= found[at] == joined if len(found) else False
            codes = np.where(there, at, -1)
        return np.where(codes >= 0, self._rows[np.maximum(codes, 0)], -1) if len(self._rows) else codes


def _index(column: Any, distinct: Any) -> NDArray[np.int64]:
    places = pc.fill_null(pc.index_in(column, value_set=distinct, skip_nulls=True), -1)
    found: NDArray[np.int64] = places.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def joined(one: Join, table: pa.Table, external: JoinTable) -> pa.Table:
    """Append the columns of a join, missing where the key is not in its table."""
    keys = [combined(table.column(name)) for name in key_names(one.by)]
    known = external.places
    places = known.find([key.cast(other.type) for key, other in zip(keys, known.known, strict=True)])
    rows = pa.array(np.maximum(places, 0), mask=places < 0)
    for name in one.new_names.values():
        table = table.append_column(name, combined(external.rows.column(name)).take(rows))
    return table

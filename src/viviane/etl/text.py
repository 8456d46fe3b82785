"""Lines of text to a table: fast where all is well, line by line where it is not."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from viviane.core.errors import DataError, suggest
from viviane.etl.cells import SCALARS, BadCell, cast_cells, convert, staged_type
from viviane.etl.config import Input, InputColumn
from viviane.etl.sources import Source, TextBlock, text_blocks

_BOM: Final = b"\xef\xbb\xbf"
_PIECE_BYTES: Final = 1 << 20  # parsed at once where a block need not be: what is at work stays in the cache
_UNIT: Final = b"\x1f"  # stands for a delimiter of several characters while a block is parsed


@dataclass(frozen=True)
class Chunk:
    """Rows of one file in staged types, and the rows that could not be used.

    Args:
        table: good and bad rows of `bad`.
        lines: line (text) or row (Parquet) of each row of the table, counted from 1.
        bad: cells by position in the table.
        unparsed: lines that never became a row of the table, as (line, problem, text).
    """

    table: pa.Table
    lines: NDArray[np.int64]
    bad: list[BadCell]
    unparsed: list[tuple[int, str, str]]


@dataclass(frozen=True)
class TextLayout:
    """How one text file is laid out: its settings, its names in order, the columns wanted, where rows begin."""

    input: Input
    names: tuple[str, ...]
    wanted: tuple[InputColumn, ...]
    first_row_bytes: int
    first_line: int

    @property
    def delimiter(self) -> str:
        """The single character between values once several have been replaced."""
        return self.input.delimiter if len(self.input.delimiter) == 1 else _UNIT.decode()


def text_layout(
    source: Source, settings: Input, wanted: tuple[InputColumn, ...], optional: frozenset[str] = frozenset()
) -> TextLayout:
    """Read a file's header, if it has one, and find the wanted columns in it.

    Args:
        optional: columns that may be absent (labels, when predicting): not named in the header, or, without a
            header, all of them left out of every line.

    Raises:
        DataError: a column is missing in the header, or stands twice.
    """
    first = next(text_blocks(source, block_bytes=1 << 16), None)
    line = b"" if first is None else first.data.split(b"\n", 1)[0]
    names = _split(line.removeprefix(_BOM).decode(settings.encoding, "backslashreplace").rstrip("\r"), settings)
    if not settings.header:
        in_path = {name for name, _ in source.path_values}
        every = tuple(column.name for column in settings.columns if column.name not in in_path)
        short = tuple(name for name in every if name not in optional)
        if first is not None and optional and len(names) == len(short):
            kept = tuple(column for column in wanted if column.name not in optional)
            return TextLayout(settings, short, kept, 0, 1)
        return TextLayout(settings, every, wanted, 0, 1)
    if first is None:
        raise DataError("the file is empty: not even a header", where=str(source.path))
    wanted = tuple(column for column in wanted if column.name in names or column.name not in optional)
    for column in wanted:
        if names.count(column.name) != 1:
            what = "a column is missing in the header" if column.name not in names else "a column stands twice"
            raise DataError(what, where=f"{source.path}, line 1", value=column.name, fix=suggest(column.name, names))
    return TextLayout(settings, tuple(names), wanted, len(line) + 1, 2)


def parse_block(block: TextBlock, layout: TextLayout) -> Chunk:
    """Parse the lines of a block; rows that cannot be used are named in the result."""
    data, lines, unparsed = _clean(block, layout)
    chunk = None if unparsed else _parse_fast(data, lines, layout)
    return chunk or _parse_slow(data, lines, unparsed, layout)


def _clean(block: TextBlock, layout: TextLayout) -> tuple[bytes, NDArray[np.int64], list[tuple[int, str, str]]]:
    """Bring a block to UTF-8, plain newlines and one delimiter character; take out what is no row at all."""
    data = block.data.removeprefix(_BOM) if block.first_line == 1 else block.data
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    unparsed: list[tuple[int, str, str]] = []
    lines = np.arange(block.first_line, block.first_line + block.num_lines, dtype=np.int64)
    encoding = layout.input.encoding.lower()
    if encoding not in ("utf-8", "utf8"):
        try:
            data = data.decode(encoding).encode()
        except UnicodeDecodeError:
            data, lines, unparsed = _without(data, lines, lambda line: _undecodable(line, encoding))
            data = data.decode(encoding).encode()
    if len(layout.input.delimiter) > 1:
        data = data.replace(layout.input.delimiter.encode(), _UNIT)
    return data, lines, unparsed


def _without(data: bytes, lines: NDArray[np.int64], problem_of: Any) -> tuple[bytes, Any, list[tuple[int, str, str]]]:
    rows = data.removesuffix(b"\n").split(b"\n")
    problems = [problem_of(row) for row in rows]
    if not any(problems):
        return data, lines, []
    keep = np.array([problem is None for problem in problems])
    left = b"".join(row + b"\n" for row, good in zip(rows, keep, strict=True) if good)
    bad = [
        (int(lines[i]), problem, rows[i].decode("utf-8", "backslashreplace"))
        for i, problem in enumerate(problems)
        if problem is not None
    ]
    return left, lines[keep], bad


def _parse_fast(data: bytes, lines: NDArray[np.int64], layout: TextLayout) -> Chunk | None:
    """Parse with types at once; None when any row is out of the ordinary.

    Empty lines are skipped by the parser and a quote left open joins lines, so as many rows as lines prove that
    there is neither. That holds of a block parsed as a whole: in pieces, a quote left open could end with its piece.
    """
    quote = layout.input.quote
    whole = quote is not None and quote.encode() in data
    types: dict[str, pa.DataType] = {
        column.name: SCALARS["string"] if column.is_list or column.type == "hex" else SCALARS[column.type]
        for column in layout.wanted
    }
    refused: list[Any] = []
    try:
        raw = _read_csv(data, layout, types, refused, len(data) if whole else _PIECE_BYTES)
    except pa.ArrowInvalid:
        return None
    if refused or raw.num_rows != len(lines):
        return None
    return _finish(raw, lines, [], [], layout)


def _parse_slow(
    data: bytes, lines: NDArray[np.int64], unparsed: list[tuple[int, str, str]], layout: TextLayout
) -> Chunk:
    """Parse as bytes, take out rows of another width, and convert cell by cell where a column refuses."""
    if len(layout.names) > 1:
        data, lines, empty = _without(data, lines, lambda line: None if line else "an empty line")
        unparsed = unparsed + empty
    if layout.input.quote is not None:
        data, lines, open_quotes = _without(data, lines, lambda line: _open_quote(line, layout.input))
        unparsed = unparsed + open_quotes
    refused: list[Any] = []
    types: dict[str, pa.DataType] = {column.name: pa.binary() for column in layout.wanted}
    raw = _read_csv(data, layout, types, refused, len(data)) if data else _empty(layout)
    width = len(layout.names)
    for row in refused:
        problem = f"{row.actual_columns} columns instead of {width}"
        unparsed.append((int(lines[row.number - 1]), problem, row.text.replace(_UNIT.decode(), layout.input.delimiter)))
    lines = np.delete(lines, [row.number - 1 for row in refused])
    if raw.num_rows != len(lines):
        raise DataError(
            "the lines of the file do not match its rows",
            where=f"line {lines[0] if len(lines) else '?'} and after",
            value=f"{raw.num_rows} rows, {len(lines)} lines",
            fix="set `quote` to null if quotes mean nothing in this file",
        )
    columns, bad = {}, []
    for column in layout.wanted:
        text, wrong = cast_cells(raw.column(column.name).combine_chunks(), pa.string())
        bad += [BadCell(row, column.name, "not UTF-8 text", str(raw.column(column.name)[row].as_py())) for row in wrong]
        columns[column.name] = text
    return _finish(pa.table(columns), lines, bad, unparsed, layout)


def _finish(
    raw: pa.Table,
    lines: NDArray[np.int64],
    bad: list[BadCell],
    unparsed: list[tuple[int, str, str]],
    layout: TextLayout,
) -> Chunk:
    columns = []
    for column in layout.wanted:
        array, cells = convert(raw.column(column.name), column, layout.input.missing)
        columns.append(array)
        bad = bad + cells
    schema = pa.schema([pa.field(column.name, staged_type(column)) for column in layout.wanted])
    return Chunk(pa.table(columns, schema=schema), lines, bad, sorted(unparsed))


def _empty(layout: TextLayout) -> pa.Table:
    return pa.table({column.name: pa.array([], pa.binary()) for column in layout.wanted})


def _read_csv(
    data: bytes, layout: TextLayout, types: dict[str, pa.DataType], refused: list[Any], piece_bytes: int
) -> pa.Table:
    def refuse(row: Any) -> Literal["skip"]:
        refused.append(row)
        return "skip"

    return pa_csv.read_csv(
        cast(Any, pa.BufferReader(data)),  # no copy; the stubs know files only
        pa_csv.ReadOptions(use_threads=False, column_names=list(layout.names), block_size=max(piece_bytes, 1)),
        pa_csv.ParseOptions(
            delimiter=layout.delimiter,
            quote_char=layout.input.quote or False,
            double_quote=layout.input.quote is not None,
            ignore_empty_lines=len(layout.names) > 1,  # the only column of a file may be missing
            invalid_row_handler=refuse,
        ),
        pa_csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=list(layout.input.missing),
            strings_can_be_null=True,
        ),
    )


def _split(text: str, settings: Input) -> list[str]:
    if settings.quote is None:
        return text.split(settings.delimiter)
    return next(csv.reader([text], delimiter=settings.delimiter, quotechar=settings.quote))


def _undecodable(line: bytes, encoding: str) -> str | None:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return f"not {encoding} text"
    return None


def _open_quote(line: bytes, settings: Input) -> str | None:
    """A quote that is not closed on its line; a value may not span lines."""
    if settings.quote is None or settings.quote.encode() not in line:
        return None
    text = line.decode("utf-8", "backslashreplace")
    try:
        next(csv.reader([text], delimiter=settings.delimiter, quotechar=settings.quote, strict=True))
    except (csv.Error, StopIteration):
        return "a quote is not closed on its line"
    return None

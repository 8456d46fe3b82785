"""Lines of text to a table: fast where all is well, line by line where it is not."""

from __future__ import annotations

import codecs
import csv
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from viviane.core.errors import DataError, suggest
from viviane.etl.cells import SCALARS, BadCell, cast_cells, convert, shown, staged_type
from viviane.etl.columns import Input, InputColumn
from viviane.etl.sources import Source, TextBlock, text_blocks

_BOM: Final = b"\xef\xbb\xbf"
_PIECE_BYTES: Final = 2 << 20  # parsed at once where a block need not be: what is at work stays in the cache
_LINES_LOOKED_AT: Final = 100
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
        return self.input.delimiter if len(self.input.delimiter.encode()) == 1 else _UNIT.decode()

    @cached_property
    def is_utf8(self) -> bool:
        """Whether the file's bytes are UTF-8 as they are."""
        return codecs.lookup(self.input.encoding).name == "utf-8"


def text_layout(
    source: Source, settings: Input, wanted: tuple[InputColumn, ...], optional: frozenset[str] = frozenset()
) -> TextLayout:
    """Read a file's header, if it has one, and find the wanted columns in it.

    Args:
        optional: columns that may be absent (labels, when predicting): not named in the header, or, without a
            header, all of them left out of every line.

    Raises:
        DataError: a column is missing in the header, or occurs twice.
    """
    first = next(text_blocks(source, block_bytes=1 << 16), None)
    line = b"" if first is None else first.data.split(b"\n", 1)[0]
    names = _split(shown_line(line.removeprefix(_BOM), settings.encoding), settings)
    if not settings.header:
        in_path = {name for name, _ in source.path_values}
        every = tuple(column.name for column in settings.columns if column.name not in in_path)
        short = tuple(name for name in every if name not in optional)
        if first is not None and optional and _is_short(first, settings, len(every), len(short)):
            kept = tuple(column for column in wanted if column.name not in optional)
            return TextLayout(settings, short, kept, 0, 1)
        return TextLayout(settings, every, wanted, 0, 1)
    if first is None:
        raise DataError("the file is empty: not even a header", where=str(source.path))
    if any("\r" in name for name in names):
        raise DataError(
            "a carriage return inside the header",
            where=f"{source.path}, line 1",
            value=names[0][:200],
            allowed="lines that end with a newline, or with a carriage return and a newline",
            fix="convert the line ends of the file",
        )
    wanted = tuple(column for column in wanted if column.name in names or column.name not in optional)
    for column in wanted:
        if names.count(column.name) != 1:
            what = "a column is missing in the header" if column.name not in names else "a column occurs twice"
            raise DataError(what, where=f"{source.path}, line 1", value=column.name, fix=suggest(column.name, names))
    return TextLayout(settings, tuple(names), wanted, len(line) + 1, 2)


def _is_short(block: TextBlock, settings: Input, every: int, short: int) -> bool:
    """Whether more of a file's first lines lack the optional columns than have them: one of them may be malformed."""
    lines = block.data.split(b"\n", _LINES_LOOKED_AT)[:_LINES_LOOKED_AT]
    widths = [len(_split(shown_line(line, settings.encoding), settings)) for line in lines if line]
    return widths.count(short) > widths.count(every)


def parse_block(block: TextBlock, layout: TextLayout) -> Chunk:
    """Parse the lines of a block; rows that cannot be used are named in the result."""
    data = text_of(block)
    lines = np.arange(block.first_line, block.first_line + block.num_lines, dtype=np.int64)
    plain = _plain(data, layout)
    chunk = None if plain is None else _parse_fast(plain, lines, layout)
    return chunk or _parse_slow(data, lines, layout)


def text_of(block: TextBlock) -> bytes:
    """Return a block's bytes without the mark that may begin a file."""
    return block.data.removeprefix(_BOM) if block.first_line == 1 else block.data


def shown_line(line: bytes, encoding: str) -> str:
    """Return a line as text, whatever its bytes are."""
    try:
        return line.removesuffix(b"\r").decode(encoding, "backslashreplace")
    except (UnicodeError, TypeError):  # some codecs know no replacement
        return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")


def _plain(data: bytes, layout: TextLayout) -> bytes | None:
    """Bring a block to UTF-8, newlines and one delimiter character; None where a line needs a look of its own."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        if b"\r" in data:
            return None
    if not layout.is_utf8:
        num_lines = data.count(b"\n")
        try:
            data = data.decode(layout.input.encoding).encode()
        except UnicodeError:
            return None
        if data.count(b"\n") != num_lines or b"\r" in data:
            return None
    if len(layout.input.delimiter.encode()) > 1:
        if _UNIT in data:
            return None
        data = data.replace(layout.input.delimiter.encode(), _UNIT)
    return data


def _parse_fast(data: bytes, lines: NDArray[np.int64], layout: TextLayout) -> Chunk | None:
    """Parse with types at once; None when any row is out of the ordinary.

    Empty lines are skipped by the parser and a quote left open joins lines, so as many rows as lines prove that
    there is neither. That holds of a block parsed as a whole: in pieces, a quote left open could end with its piece.
    """
    quote = layout.input.quote
    if quote is not None and quote.encode() not in data:
        quote = None  # the parser need not look for what is not there
    types = {column.name: _read_as(column) for column in layout.wanted}
    try:
        # Columns of one piece are not put together.
        num_pieces = 1 if quote is not None else max(1, len(data) // _PIECE_BYTES)
        raw = _read_csv(data, layout, types, -(-len(data) // num_pieces), quote)
    except pa.ArrowInvalid:
        return None
    return _finish(raw, lines, [], [], layout) if raw.num_rows == len(lines) else None


def _parse_slow(data: bytes, lines: NDArray[np.int64], layout: TextLayout) -> Chunk:
    """Look at each line, parse those that are a row as bytes, and convert cell by cell where a column refuses."""
    rows: list[bytes] = []
    places: list[int] = []
    unparsed: list[tuple[int, str, str]] = []
    fields = _FieldCounter(layout)
    for place, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
        try:
            rows.append(_row_of_line(line, layout, fields))
            places.append(place)
        except ValueError as problem:
            unparsed.append((int(lines[place]), str(problem), shown_line(line, layout.input.encoding)))
    lines = lines[places]
    types: dict[str, pa.DataType] = {column.name: pa.binary() for column in layout.wanted}
    data = b"".join(row + b"\n" for row in rows)
    quote = layout.input.quote
    raw = _read_csv(data, layout, types, len(data), quote) if rows else pa.schema(list(types.items())).empty_table()
    assert raw.num_rows == len(lines), "a line that was counted as a row is none to the parser"
    columns: dict[str, Any] = {}
    bad: list[BadCell] = []
    for column in layout.wanted:
        if _is_hex(column):
            columns[column.name] = raw.column(column.name)
            continue
        text, wrong = cast_cells(raw.column(column.name).combine_chunks(), pa.string())
        bad += [BadCell(row, column.name, "not UTF-8 text", shown(raw.column(column.name)[row])) for row in wrong]
        columns[column.name] = text
    return _finish(pa.table(columns), lines, bad, unparsed, layout)


def _read_as(column: InputColumn) -> pa.DataType:
    """The type that the parser gives a column of a block in which all is well."""
    if _is_hex(column):
        return pa.binary()
    return SCALARS["string"] if column.is_list or column.type == "bool" else SCALARS[column.type]


def _is_hex(column: InputColumn) -> bool:
    """Whether each value of a column is hexadecimal: digits are looked for, so that its bytes need not be text."""
    return column.type == "hex" and not column.is_list


def _row_of_line(line: bytes, layout: TextLayout, fields: _FieldCounter) -> bytes:
    """Return a line in UTF-8 with a delimiter of one character; a ValueError says why it is no row."""
    line = line.removesuffix(b"\r")
    if b"\r" in line:
        raise ValueError("a carriage return inside the line")
    if not layout.is_utf8:
        try:
            line = line.decode(layout.input.encoding).encode()
        except UnicodeDecodeError:
            raise ValueError(f"not {layout.input.encoding} text") from None
        except UnicodeError as error:
            raise ValueError(f"not {layout.input.encoding} text: {error}") from None
        if b"\n" in line or b"\r" in line:
            raise ValueError(f"a line end that is encoded in {layout.input.encoding}")
    if len(layout.input.delimiter.encode()) > 1:
        if _UNIT in line:
            raise ValueError("the control character 0x1f inside the line")
        line = line.replace(layout.input.delimiter.encode(), _UNIT)
    width = len(layout.names)
    if not line and width > 1:
        raise ValueError("an empty line")
    found = fields.of(line)
    if found is None:
        raise ValueError("a quote is not closed on its line")
    if found != width:
        raise ValueError(f"{found} columns instead of {width}")
    return line


class _FieldCounter:
    """Counts the values of a line as the parser does: a quote means something at the start of a value only."""

    def __init__(self, layout: TextLayout) -> None:
        self.delimiter = layout.delimiter.encode()
        self.quote = None if layout.input.quote is None else layout.input.quote.encode()
        if self.quote is not None:
            quote, delimiter = re.escape(self.quote), re.escape(self.delimiter)
            # Possessive: what was taken for the inside of quotes is not given back to end the value sooner.
            inside = b"(?:[^" + quote + b"]|" + quote + quote + b")*+"
            rest = b"[^" + delimiter + b"]*+"
            self._field = re.compile(quote + inside + quote + rest + b"|(?!" + quote + b")" + rest, re.DOTALL)

    def of(self, line: bytes) -> int | None:
        """Return the number of values; None where a quote is left open."""
        if self.quote is None or self.quote not in line:
            return line.count(self.delimiter) + 1
        count, place = 1, 0
        while (found := self._field.match(line, place)) is not None:
            if found.end() == len(line):
                return count
            count, place = count + 1, found.end() + 1
        return None


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


def _read_csv(
    data: bytes, layout: TextLayout, types: dict[str, pa.DataType], piece_bytes: int, quote: str | None
) -> pa.Table:
    return pa_csv.read_csv(
        cast(Any, pa.BufferReader(data)),  # no copy; the stubs know files only
        pa_csv.ReadOptions(use_threads=False, column_names=list(layout.names), block_size=max(piece_bytes, 1)),
        pa_csv.ParseOptions(
            delimiter=layout.delimiter,
            quote_char=quote or False,
            double_quote=quote is not None,
            ignore_empty_lines=len(layout.names) > 1,  # the only column of a file may be missing
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
    try:
        return next(csv.reader([text], delimiter=settings.delimiter, quotechar=settings.quote))
    except (csv.Error, StopIteration):  # a carriage return inside, an endless value, nothing at all
        return text.split(settings.delimiter)

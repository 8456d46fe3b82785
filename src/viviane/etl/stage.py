"""First pass: read raw files once into shards of typed Parquet, setting malformed rows aside.

A shard and its note (a JSON file next to it, written last) are the unit of resuming: the note records where in the raw
files the next shard begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from viviane.core.errors import DataError
from viviane.core.files import write_bytes_atomic, write_json_atomic
from viviane.core.json_files import expected_form, read_json_object
from viviane.etl.arrays import array_of
from viviane.etl.cells import shown
from viviane.etl.checks import unusable_rows
from viviane.etl.columns import InputColumn
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import EARLIER
from viviane.etl.deriving import ROW, add_row_columns
from viviane.etl.engine import Engine
from viviane.etl.external import External
from viviane.etl.folds import add_folds
from viviane.etl.limits import States
from viviane.etl.parallel import ordered_map
from viviane.etl.parquet import check_parquet, parquet_rows, read_columns, typed_chunk
from viviane.etl.path_columns import in_file, refuse_both, with_path_columns
from viviane.etl.sources import Source, TextBlock, text_blocks
from viviane.etl.splits import KEY, FileSplit, HashSplit, Split, TimeSplit, part_of_file
from viviane.etl.text import Chunk, TextLayout, parse_block, shown_line, text_layout, text_of
from viviane.etl.values import hash_values

OnBadRow = Literal["error", "reject"]
Position = dict[str, int]  # source, bytes and line (text) or row (Parquet) where reading continues
START: Final[Position] = {"source": 0, "bytes": 0, "line": 1, "row": 0}


_LINE_ENDS: Final = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # to str.splitlines, not to JSON


@dataclass(frozen=True)
class Shard:
    """Staged rows on disk."""

    file: Path
    num_rows: int
    num_rejected: int
    after: Position

    @property
    def rejects(self) -> Path:
        """The rows set aside while this shard was read; there is no such file where there are none."""
        return self.file.with_suffix(".rejects.jsonl")

    def rejected_lines(self) -> bytes:
        """Return the rows set aside while this shard was read, as lines of JSON."""
        return self.rejects.read_bytes() if self.num_rejected else b""


@dataclass(frozen=True)
class _Job:
    """A piece of a raw file: how to parse it, how to show one of its rows, and where the next one begins."""

    source: Source
    number: int
    parse: Callable[[], Chunk]
    show: Callable[[list[int]], list[str]]
    after: Position


class MalformedRowError(DataError):
    """A row of a raw file cannot be used; names file, line and column."""


class Stager:
    """Reads sources into shards.

    Args:
        folder: where shards go; those that are complete are kept.
        labels: False leaves labels out; None leaves them out where the first file has none.
        states: what operators learned, of a fitted ETL.
        external: tables of the joins.
        learning: derived columns will be learned from these rows, so they get their folds.
        numbered: keep the number of each row; needed where rows look at earlier ones.
        shard_bytes: size of a shard in memory.
        hold_bytes: shards stay in memory (`held`), without files until `flush`, unless they are larger than that
            together.
        progress: called with the number of rows after each shard.
    """

    def __init__(
        self,
        config: EtlConfig,
        sources: list[Source],
        folder: Path,
        engine: Engine,
        *,
        split: Split | None = None,
        on_bad_row: OnBadRow = "error",
        labels: bool | None = True,
        states: States | None = None,
        learning: bool = True,
        external: External | None = None,
        numbered: bool = False,
        threads: int = 1,
        shard_bytes: int = 64 << 20,
        hold_bytes: int = 0,
        progress: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self.config, self.sources, self.folder, self.engine, self.split = config, sources, folder, engine, split
        self.on_bad_row, self.threads, self.shard_bytes, self.progress = on_bad_row, threads, shard_bytes, progress
        self.hold_bytes = hold_bytes
        self.held: dict[Path, pa.Table] = {}
        self._unwritten: list[Shard] = []
        self.split_column = split.column if isinstance(split, (HashSplit, TimeSplit)) else None
        self.learning, self.states, self.external = learning, states, external or {}
        self.numbered = numbered or any(isinstance(one, EARLIER) for one in config.derived)
        used = {column.name for column in config.used} | ({self.split_column} if self.split_column else set())
        used |= config.fold_sources if learning else set()
        self.wanted = tuple(column for column in config.input.columns if column.name in used)
        self.optional = frozenset() if labels else config.label_sources
        self.with_labels = labels is not False
        self._settle_columns()

    def _settle_columns(self) -> None:
        """Look at every file before the long work begins; all of them have labels or none has."""
        found: tuple[InputColumn, ...] | None = None
        if not self.with_labels:
            self.wanted = tuple(column for column in self.wanted if column.name not in self.optional)
        for source in self.sources:
            columns = self._columns_of(source)
            if found is not None and columns != found:
                odd = {column.name for column in set(found) ^ set(columns)}
                raise DataError("some files have labels, others have none", where=source.shown, value=sorted(odd))
            found = columns
        self.wanted = found or self.wanted
        names = {column.name for column in self.wanted}
        self.with_labels = all((label.source or label.name) in names for label in self.config.labels)

    def _columns_of(self, source: Source) -> tuple[InputColumn, ...]:
        """The wanted columns that a file has, those that its path names among them."""
        wanted = in_file(self.wanted, source.path_values)
        names: Sequence[str]
        if source.kind == "parquet":
            names, found = check_parquet(source, wanted, self.optional)
        else:
            layout = self._layout(source, wanted)
            names, found = layout.names, layout.wanted
        refuse_both(names, source)
        there = {*(column.name for column in found), *(name for name, _ in source.path_values)}
        return tuple(column for column in self.wanted if column.name in there)

    def _layout(self, source: Source, wanted: tuple[InputColumn, ...]) -> TextLayout:
        return text_layout(source, self.config.input, wanted, self.optional)

    def done(self) -> list[Shard]:
        """Return the complete shards of an earlier run, in order."""
        shards: list[Shard] = []
        while (note := self.folder / f"shard-{len(shards):05}.json").exists():
            data = read_json_object(note, error=DataError)
            with expected_form(str(note), DataError):
                shard = Shard(note.with_suffix(".parquet"), data["rows"], data["rejected"], data["after"])
                size = int(data["bytes"])
            if not shard.file.exists() or shard.file.stat().st_size != size:
                break
            shards.append(shard)
        return shards

    def run(self) -> list[Shard]:
        """Stage what is not staged yet; returns all shards.

        Raises:
            DataError: a malformed row, with file, line and column, if on_bad_row is "error"; a damaged file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        shards = self.done()
        position = shards[-1].after if shards else START
        first_row = sum(shard.num_rows for shard in shards)
        tables: list[pa.Table] = []
        rejects: list[dict[str, Any]] = []
        size = 0
        for job, chunk in ordered_map(
            lambda job: (job, self._parsed(job)), self._jobs(position), self.threads, ahead=self.threads
        ):
            table, refused = self._sift(job, chunk)
            rejects += refused
            tables.append(table)
            size += table.nbytes
            position = job.after
            if size >= self.shard_bytes:
                shards.append(self._write(len(shards), tables, rejects, position, first_row))
                first_row += shards[-1].num_rows
                tables, rejects, size = [], [], 0
                self.progress(first_row)
        if tables:
            shards.append(self._write(len(shards), tables, rejects, position, first_row))
            self.progress(first_row + shards[-1].num_rows)
        return shards

    def place_of(self, before: Shard | None, row: int) -> str:
        """Return file and line of a staged row, which are found by parsing its shard once more.

        Args:
            before: the shard before that of the row; None for the first one.
            row: in its shard.
        """
        for job in self._jobs(before.after if before else START):
            chunk = self._parsed(job)
            cells = chunk.bad + unusable_rows(chunk.table, self.config, self.split_column, self.engine, self.states)
            lines = np.delete(chunk.lines, sorted({cell.row for cell in cells}))
            if row < len(lines):
                return f"{job.source.shown}, {'row' if job.source.kind == 'parquet' else 'line'} {lines[row]}"
            row -= len(lines)
        raise DataError("the input has changed since it was staged", fix="run again with resume=False")

    def _jobs(self, position: Position) -> Iterator[_Job]:
        for number in range(position["source"], len(self.sources)):
            at = position if number == position["source"] else {**START, "source": number}
            source = self.sources[number]
            yield from (
                self._parquet_jobs(source, number, at)
                if source.kind == "parquet"
                else self._text_jobs(source, number, at)
            )

    def _text_jobs(self, source: Source, number: int, at: Position) -> Iterator[_Job]:
        layout = self._layout(source, in_file(self.wanted, source.path_values))
        begin, line = (at["bytes"], at["line"]) if at["bytes"] else (layout.first_row_bytes, layout.first_line)
        for block in text_blocks(source, skip_bytes=begin, first_line=line):
            begin, line = begin + len(block.data), line + block.num_lines
            after = {"source": number, "bytes": begin, "line": line, "row": 0}
            show = partial(_lines_of, block, layout.input.encoding)
            yield _Job(source, number, partial(parse_block, block, layout), show, after)

    def _parquet_jobs(self, source: Source, number: int, at: Position) -> Iterator[_Job]:
        wanted = in_file(self.wanted, source.path_values)
        for table, row in parquet_rows(source, wanted, at["row"]):
            after = {"source": number, "bytes": 0, "line": 1, "row": row + table.num_rows}
            parse = partial(typed_chunk, table, wanted, row, self.config.input.missing)
            yield _Job(source, number, parse, partial(_rows_of, table, row + 1), after)

    def _parsed(self, job: _Job) -> Chunk:
        return with_path_columns(job.parse(), self.wanted, job.source.path_values, self.config.input.missing)

    def _sift(self, job: _Job, chunk: Chunk) -> tuple[pa.Table, list[dict[str, Any]]]:
        """Separate usable rows from the others; the number of the source is kept for a split by file."""
        cells = chunk.bad + unusable_rows(chunk.table, self.config, self.split_column, self.engine, self.states)
        found = [(line, "", problem, text) for line, problem, text in chunk.unparsed]
        found += [(int(chunk.lines[cell.row]), cell.column, cell.problem, cell.value) for cell in cells]
        table = chunk.table
        if isinstance(self.split, FileSplit):
            part = part_of_file(self.split, job.source.path)
            table = table.append_column(KEY, pa.array(np.full(table.num_rows, part, np.int64)))
        if not found:
            return table, []
        found.sort(key=lambda one: one[0])
        unit = "row" if job.source.kind == "parquet" else "line"
        if self.on_bad_row == "error":
            line, column, problem, value = found[0]
            place = f", column {column!r}" if column else ""
            raise MalformedRowError(
                f"a malformed row: {problem}",
                where=f"{job.source.shown}, {unit} {line}{place}",
                value=value,
                fix='correct it, or set malformed rows aside with on_bad_row="reject" (--on-bad-row reject)',
            )
        first = {line: (column, problem, value) for line, column, problem, value in reversed(found)}
        good = np.ones(table.num_rows, bool)
        good[[cell.row for cell in cells]] = False
        texts = job.show(sorted(first))
        entries = [
            {
                "file": job.source.shown,
                unit: line,
                "column": column,
                "problem": problem,
                "value": value,
                "text": text,
            }
            for (line, (column, problem, value)), text in zip(sorted(first.items()), texts, strict=True)
        ]
        return table.filter(pa.array(good)), entries

    def _write(
        self, number: int, tables: list[pa.Table], rejects: list[dict[str, Any]], after: Position, first_row: int
    ) -> Shard:
        table = pa.concat_tables(tables)
        tables.clear()
        key = self._key(table, first_row)
        if key is not None:
            table = table.append_column(KEY, key)
        table = self._derived(table, first_row)
        shard = Shard(self.folder / f"shard-{number:05}.parquet", table.num_rows, len(rejects), after)
        lines = "".join(json.dumps(entry, ensure_ascii=False).translate(_LINE_ENDS) + "\n" for entry in rejects)
        if lines:
            write_bytes_atomic(shard.rejects, lines.encode("utf-8", "backslashreplace"))
        self.hold_bytes -= table.nbytes
        if self.hold_bytes >= 0:
            self.held[shard.file] = table.cast(_schema_in_files(table.schema))
            self._unwritten.append(shard)
        else:
            self.flush()
            self.held.clear()
            self._save(shard, table, compression="lz4")
        return shard

    def flush(self) -> None:
        """Write the shards that are in memory alone; most of them are hardly read, so they are quickly written."""
        for shard in self._unwritten:
            self._save(shard, self.held[shard.file], compression="none")
        self._unwritten.clear()

    def _save(self, shard: Shard, table: pa.Table, compression: Literal["none", "lz4"]) -> None:
        # Rows are looked for by their part only: statistics of other columns would not be used.
        pq.write_table(
            table, shard.file, compression=compression, use_dictionary=compression != "none",
            row_group_size=131_072, write_statistics=[KEY] if KEY in table.column_names else False,
        )  # fmt: skip
        size = shard.file.stat().st_size
        note = {"rows": shard.num_rows, "rejected": shard.num_rejected, "bytes": size, "after": shard.after}
        write_json_atomic(shard.file.with_suffix(".json"), note)

    def schema_of(self, shard: Shard) -> pa.Schema:
        """Return the columns of a shard."""
        return self.held[shard.file].schema if shard.file in self.held else pq.read_schema(shard.file)

    def rows_of(self, shard: Shard, columns: list[str]) -> pa.Table:
        """Return some columns of a shard."""
        table = self.held.get(shard.file)
        return read_columns(shard.file, columns=columns) if table is None else table.select(columns)

    def take(self, shard: Shard) -> pa.Table:
        """Return a shard's rows, which are not held any longer."""
        table = self.held.pop(shard.file, None)
        return read_columns(shard.file, use_threads=False) if table is None else table

    def _derived(self, table: pa.Table, first_row: int) -> pa.Table:
        """Append what later steps derive columns from, and the columns that need one row only."""
        config = self.config
        table = add_row_columns(table, config, self.external)
        if self.numbered:
            rows = np.arange(first_row, first_row + table.num_rows, dtype=np.int64)
            table = table.append_column(ROW, pa.array(rows))
        return add_folds(table, config, self.engine, first_row) if self.learning else table

    def _key(self, table: pa.Table, first_row: int) -> Any:
        """The number per row that the split compares with its borders."""
        if self.split is None or isinstance(self.split, FileSplit):
            return None
        if isinstance(self.split, HashSplit):
            return hash_values(table.column(self.split.column), self.engine.evaluate)
        if isinstance(self.split, TimeSplit):
            return table.column(self.split.column).cast(pa.int64())
        return array_of(np.arange(first_row, first_row + table.num_rows, dtype=np.int64))


def _schema_in_files(schema: pa.Schema) -> pa.Schema:
    """Return a schema as it is read from Parquet, where the values of lists have a name of their own."""
    fields = [
        field.with_type(pa.list_(pa.field("element", field.type.value_type))) if pa.types.is_list(field.type) else field
        for field in schema
    ]
    return pa.schema(fields)


def _lines_of(block: TextBlock, encoding: str, numbers: list[int]) -> list[str]:
    lines = text_of(block).split(b"\n")
    return [shown_line(lines[number - block.first_line], encoding) for number in numbers]


def _rows_of(table: pa.Table, first_row: int, numbers: list[int]) -> list[str]:
    rows = table.take(pa.array([number - first_row for number in numbers], pa.int64()))
    try:
        values = rows.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, times beyond Python's
        names = rows.column_names
        values = [{name: shown(rows.column(name)[at]) for name in names} for at in range(rows.num_rows)]
    return [json.dumps(one, default=str, ensure_ascii=False) for one in values]

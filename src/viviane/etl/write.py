"""Write the parts of the output: row groups and files of fixed size, each file whole under its name or not there."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from viviane.core.exchange import sync_tree
from viviane.core.files import file_sha256
from viviane.etl.arrays import numbers_of
from viviane.etl.parquet import read_columns
from viviane.etl.values import combined
from viviane.schema import RESERVED, CategoricalColumn, Schema

ROWS_PER_GROUP: Final = 131_072
ROWS_PER_FILE: Final = 8 * ROWS_PER_GROUP
_FILES_OF_A_PART: Final = 8  # before files become larger
_MOST_AT_WORK: Final = 2
_COUNTED_IDS: Final = 1 << 20  # statistics count this many ids of a column one by one
_TOP_COUNTS: Final = 1000


class Sizes(NamedTuple):
    """How many rows a row group and a file have, but for the last ones."""

    rows_per_group: int
    rows_per_file: int

    @classmethod
    def of(cls, num_rows: int) -> Sizes:
        """Return the sizes for a part of this many rows.

        Row groups are encoded at the same time if they are in different files: a file has one row group while eight
        files are enough, then as many as make eight files, and eight at most.
        """
        groups_per_file = -(-num_rows // (_FILES_OF_A_PART * ROWS_PER_GROUP))
        return cls(ROWS_PER_GROUP, min(ROWS_PER_FILE, max(1, groups_per_file) * ROWS_PER_GROUP))


class Written(NamedTuple):
    """What is to be said of the rows of a part, and of its files for the manifest, in order."""

    statistics: Statistics
    files: list[dict[str, Any]]


class PartWriter:
    """Writes one part (train, say) of the output.

    Files that an interrupted run completed are kept: `done_rows` rows need not be added again. Row groups are encoded
    beside what adds them, by threads of the writer, which have two of them to do at most. Files get their names in
    order, so that those which are there are the first ones.

    Args:
        only: begin with the file of this number, whatever is there; for one that writes no other.
    """

    def __init__(self, folder: Path, schema: Schema, sizes: Sizes, *, only: int | None = None) -> None:
        self.sizes = sizes
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.schema = folder, schema
        self.statistics = Statistics(schema)
        self.files: list[dict[str, Any]] = []  # those that are whole, for the manifest
        self.done_rows = 0
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        self._encoders = ThreadPoolExecutor(_MOST_AT_WORK)
        self._at_work: deque[tuple[Future[None], _FileAtWork | None]] = deque()  # and the file that is whole then
        self._open: list[_FileAtWork] = []
        self.num_files = len(list(folder.glob("part-*.parquet"))) if only is None else only
        for number in range(self.num_files if only is None else 0):
            self.take(number)

    def take(self, number: int) -> bool:
        """Count the rows of a file that is whole already; False if there is none."""
        if not self._file(number).exists():
            return False
        table = read_columns(self._file(number), columns=[column.name for column in self.schema.categorical])
        self.statistics.add(table)
        self.done_rows += table.num_rows
        self._list(self._file(number), table.num_rows, file_sha256(self._file(number)))
        return True

    def _list(self, file: Path, num_rows: int, sha256: str) -> None:
        self.files.append({"name": file.name, "rows": num_rows, "sha256": sha256})

    def _file(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.parquet"

    def add(self, table: pa.Table) -> None:
        """Append rows."""
        self.statistics.add(table)
        start, size = 0, self.sizes.rows_per_group
        while table.num_rows - start >= size - self._num_waiting:
            end = start + size - self._num_waiting
            self._encode([*self._waiting, table.slice(start, end - start)])
            self._waiting, self._num_waiting, start = [], 0, end
        if start < table.num_rows:
            self._waiting.append(table.slice(start))
            self._num_waiting += table.num_rows - start

    def close(self, empty: Callable[[], pa.Table]) -> None:
        """Write what is left; a part without rows still gets a file, with the table that `empty` returns."""
        if self._num_waiting or (self._open and not self._open[-1].ends):
            self._encode(self._waiting, last=True)
            self._waiting = []
        self._settle(0)
        if self.num_files == 0:
            self._encode([empty()], last=True)
            self._settle(0)
        self._encoders.shutdown()

    def abandon(self) -> None:
        """Close the files at work, which keep their temporary names and are rewritten by the next run."""
        self._encoders.shutdown(cancel_futures=True)
        for file in self._open:
            file.close()

    def _encode(self, tables: list[pa.Table], *, last: bool = False) -> None:
        self._settle(_MOST_AT_WORK - 1)
        if not self._open or self._open[-1].ends:
            half = self.folder / f".part-{self.num_files + len(self._open):05}.tmp"
            self._open.append(_FileAtWork(half, self.schema))
        file = self._open[-1]
        file.num_rows += sum(table.num_rows for table in tables)
        file.ends = last or file.num_rows >= self.sizes.rows_per_file
        file.written = self._encoders.submit(file.write, tables, file.written, ends=file.ends)
        self._at_work.append((file.written, file if file.ends else None))

    def _settle(self, left: int) -> None:
        """Wait until no more than this many row groups are to be encoded; an error of theirs is raised here."""
        while len(self._at_work) > left:
            future, file = self._at_work.popleft()
            future.result()
            if file is not None:
                self._finish_file(file)

    def _finish_file(self, file: _FileAtWork) -> None:
        file.path.replace(self._file(self.num_files))
        self._list(self._file(self.num_files), file.num_rows, file.sha256)
        self._open.remove(file)
        self.num_files += 1


class _FileAtWork:
    """A file that is not whole yet: threads write its row groups, each of them after the one before.

    Attributes:
        num_rows: rows that were given to it; `ends`: whether those were all.
        written: done when they are in the file; then, if they were all, `sha256` is that of the file.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path, self.num_rows, self.ends = path, 0, False
        self.written: Future[None] | None = None
        self.sha256 = ""
        self._numbers = {column.name for column in schema.dense}
        self._writer: pq.ParquetWriter | None = None

    def write(self, tables: list[pa.Table], before: Future[None] | None, *, ends: bool) -> None:
        """Append a row group once the one before is there; flush the file to disk after its last one."""
        if before is not None:
            before.result()
        if tables:
            group = pa.concat_tables(tables).combine_chunks()
            if self._writer is None:
                self._writer = pq.ParquetWriter(
                    self.path, group.schema, compression="lz4", use_dictionary=self._repeated(group.schema),
                    write_page_checksum=True,
                )  # fmt: skip
            self._writer.write_table(group, row_group_size=max(group.num_rows, 1))
        if ends:
            self.close()
            sync_tree(self.path)
            self.sha256 = file_sha256(self.path)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _repeated(self, schema: pa.Schema) -> Any:
        """Columns whose values repeat, so that dictionary pages shrink them; numbers rarely do."""
        names = [field.name for field in schema if field.name not in self._numbers]
        return [f"{name}.list.element" if pa.types.is_list(schema.field(name).type) else name for name in names]


class Statistics:
    """Counts of ids per categorical column, for info.json; raw ids are not counted one by one."""

    def __init__(self, schema: Schema) -> None:
        self.columns = schema.categorical
        sizes = {column.name: min(column.num_ids or 0, _COUNTED_IDS) for column in self.columns}
        self._counts = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
        self._above = {column.name: 0 for column in self.columns}

    def add(self, table: pa.Table) -> None:
        """Count the ids of a table."""
        for column in self.columns:
            ids = combined(table.column(column.name))
            flat = numbers_of(pc.list_flatten(ids) if column.kind != "one_hot" else ids)
            counts = self._counts[column.name]
            if column.num_ids is None:
                self._above[column.name] += len(flat)
                continue
            if column.num_ids > len(counts):
                low = flat[flat < len(counts)]
                self._above[column.name] += len(flat) - len(low)
                flat = low
            counts += np.bincount(flat, minlength=len(counts))

    def join(self, other: Statistics) -> None:
        """Add the counts of other rows."""
        for name, counts in other._counts.items():
            self._counts[name] += counts
            self._above[name] += other._above[name]

    def to_dict(self) -> dict[str, Any]:
        """Per column: ids, missing, unknown, values, and counts by rank as [rank, count], ranks spaced evenly in log.

        Ids from 2^20 on are counted together, so ranks beyond are left out.
        """
        return {column.name: self._of(column) for column in self.columns}

    def info_json(self, about: dict[str, Any]) -> bytes:
        """Return the content of info.json, a line for each column: indented numbers would take longer than the rows."""
        lines = [f"    {json.dumps(one.name)}: {json.dumps(self._of(one))}" for one in self.columns]
        head = json.dumps(about, indent=2, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
        columns = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
        return f'{head},\n  "columns": {columns}\n}}\n'.encode()

    def _of(self, column: CategoricalColumn) -> dict[str, Any]:
        counts = self._counts[column.name]
        falling = -np.sort(-counts[RESERVED.first :])
        falling = falling[falling > 0]
        spaced = np.geomspace(1, max(len(falling), 1), _TOP_COUNTS).round().astype(np.int64)
        ranks = np.array(sorted(set(spaced.tolist())))  # np.unique would load numpy.ma
        return {
            "num_ids": column.num_ids,
            "num_missing": int(counts[RESERVED.missing]) if len(counts) > RESERVED.missing else 0,
            "num_unknown": int(counts[RESERVED.unknown]) if len(counts) > RESERVED.unknown else 0,
            "num_values": int(counts.sum()) + self._above[column.name],
            "top_counts": np.stack([ranks, falling[ranks - 1]], axis=1).tolist() if len(falling) else [],
        }

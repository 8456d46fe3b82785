"""Write the parts of the output: row groups and files of fixed size, each file whole under its name or not there."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from viviane.etl.arrays import numbers_of
from viviane.etl.parquet import read_columns
from viviane.etl.values import combined
from viviane.schema import RESERVED, CategoricalColumn, Schema

ROWS_PER_GROUP: Final = 131_072
ROWS_PER_FILE: Final = 8 * ROWS_PER_GROUP
_MOST_AT_WORK: Final = 2
_COUNTED_IDS: Final = 1 << 20  # statistics count this many ids of a column one by one
_TOP_COUNTS: Final = 1000


class PartWriter:
    """Writes one part (train, say) of the output.

    Files that an interrupted run completed are kept: `done_rows` rows need not be added again. Row groups are encoded
    beside what adds them, by a thread of the writer, which has two of them to do at most.

    Args:
        only: begin with the file of this number, whatever is there; for one that writes no other.
        sizes: rows of a row group, and of a file.
    """

    def __init__(
        self, folder: Path, schema: Schema, *, only: int | None = None, sizes: tuple[int, int] | None = None
    ) -> None:
        self.rows_per_group, self.rows_per_file = sizes or (ROWS_PER_GROUP, ROWS_PER_FILE)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.schema = folder, schema
        self.statistics = Statistics(schema)
        self.done_rows = 0
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        self._writer: pq.ParquetWriter | None = None
        self._encoder = ThreadPoolExecutor(1)
        self._at_work: deque[Future[None]] = deque()
        self._rows_in_file = 0
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
        return True

    def _file(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.parquet"

    def add(self, table: pa.Table) -> None:
        """Append rows."""
        self.statistics.add(table)
        start = 0
        while table.num_rows - start >= self.rows_per_group - self._num_waiting:
            end = start + self.rows_per_group - self._num_waiting
            self._encode([*self._waiting, table.slice(start, end - start)])
            self._waiting, self._num_waiting, start = [], 0, end
        if start < table.num_rows:
            self._waiting.append(table.slice(start))
            self._num_waiting += table.num_rows - start

    def close(self, empty: Callable[[], pa.Table]) -> None:
        """Write what is left; a part without rows still gets a file, with the table that `empty` returns."""
        if self._num_waiting:
            self._encode(self._waiting)
            self._waiting = []
        self._settle(0)
        self._encoder.shutdown()
        if self._writer is not None:
            self._finish_file()
        if self.num_files == 0:
            self._write(empty())
            self._finish_file()

    def abandon(self) -> None:
        """Close the file at work, which keeps its temporary name and is rewritten by the next run."""
        self._encoder.shutdown(cancel_futures=True)
        if self._writer is not None:
            self._writer.close()

    def _encode(self, tables: list[pa.Table]) -> None:
        self._settle(_MOST_AT_WORK - 1)
        self._at_work.append(self._encoder.submit(lambda: self._write(pa.concat_tables(tables))))

    def _settle(self, left: int) -> None:
        """Wait until no more than this many row groups are to be encoded; an error of theirs is raised here."""
        while len(self._at_work) > left:
            self._at_work.popleft().result()

    def _write(self, group: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._half(), group.schema, compression="lz4", use_dictionary=self._repeated(group.schema),
                write_page_checksum=True,
            )  # fmt: skip
        self._writer.write_table(group.combine_chunks(), row_group_size=self.rows_per_group)
        self._rows_in_file += group.num_rows
        if self._rows_in_file >= self.rows_per_file:
            self._finish_file()

    def _finish_file(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._half().replace(self._file(self.num_files))
        self._writer, self._rows_in_file = None, 0
        self.num_files += 1

    def _half(self) -> Path:
        return self.folder / f".part-{self.num_files:05}.tmp"

    def _repeated(self, schema: pa.Schema) -> Any:
        """Columns whose values repeat, so that dictionary pages shrink them; numbers rarely do."""
        numbers = {column.name for column in self.schema.dense}
        names = [field.name for field in schema if field.name not in numbers]
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
        ranks = np.unique(np.geomspace(1, max(len(falling), 1), _TOP_COUNTS).round().astype(np.int64))
        return {
            "num_ids": column.num_ids,
            "num_missing": int(counts[RESERVED.missing]) if len(counts) > RESERVED.missing else 0,
            "num_unknown": int(counts[RESERVED.unknown]) if len(counts) > RESERVED.unknown else 0,
            "num_values": int(counts.sum()) + self._above[column.name],
            "top_counts": np.stack([ranks, falling[ranks - 1]], axis=1).tolist() if len(falling) else [],
        }

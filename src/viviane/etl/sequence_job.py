"""Rows of one key to one row with lists: a stage in front of the ETL, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, DataError, VivianeError
from viviane.core.files import write_bytes_atomic, write_json_atomic
from viviane.core.json_files import expected_form, read_json_object
from viviane.etl.checks import check_threads
from viviane.etl.deriving import ROW
from viviane.etl.engine import DuckDbEngine
from viviane.etl.expressions import kept
from viviane.etl.group_lists import group_column
from viviane.etl.history import changes
from viviane.etl.sequence_config import SESSION, SequenceConfig
from viviane.etl.sources import find_sources
from viviane.etl.stage import OnBadRow, Shard, Stager
from viviane.etl.values import combined
from viviane.etl.workplace import fingerprint, parse_bytes, workplace

# Names that the ETL passes over when it reads the folder.
NOTE_FILE: Final = "_sequences.json"
REJECTS_FILE: Final = "_rejects.jsonl"
_LAYOUT: Final = 1
_ROWS_AT_ONCE: Final = 65_536
_LEAST_MEMORY_BYTES: Final = 10**9


@dataclass(frozen=True)
class SequenceSummary:
    """What was read and written.

    Args:
        rows_in: rows of the raw files, malformed ones included.
        rejected, filtered: malformed rows set aside; rows that a filter left out.
        no_key: rows with a missing key or time, which belong to no group.
        groups: rows written.
        short: groups left out for having fewer rows than min_rows.
    """

    output: str
    rows_in: int
    rejected: int
    filtered: int
    no_key: int
    groups: int
    short: int


def sequences(
    config: SequenceConfig | str | Path,
    input: str | Path | Sequence[str | Path],  # noqa: A002 - the word on the command line
    output: str | Path,
    *,
    memory_limit: str | int = "4GB",
    threads: int | None = None,
    on_bad_row: OnBadRow = "error",
    resume: bool = True,
    overwrite: bool = False,
) -> SequenceSummary:
    """Group rows by key (and session), in order of time, and write one row of lists and numbers for each group.

    Rows are sorted on disk; then they pass by once. Groups come in the order of their keys.

    Args:
        config: a SequenceConfig, or the path of its JSON file.
        input: raw files, folders or patterns, as for `viviane.etl.run`.
        output: folder of Parquet files, which `viviane.etl.run` reads; the counts are in `_sequences.json`.
        memory_limit, threads, on_bad_row, resume, overwrite: as for `viviane.etl.run`.

    Raises:
        DataError: a malformed row (file, line, column), a damaged file, a full disk, no row that belongs to a group.
        ConfigError: settings that cannot be; the output exists and is of another job.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "raw.csv").write_text("user,item,time\\nann,pen,9\\nbob,ink,5\\nann,cup,1\\n")
        >>> config = SequenceConfig(
        ...     input={"columns": [{"name": "user"}, {"name": "item"}, {"name": "time", "type": "int"}]},
        ...     by="user", order_by="time", columns=[{"name": "items", "source": "item", "last": 20}])
        >>> sequences(config, folder / "raw.csv", folder / "out").groups
        2
        >>> pq.read_table(folder / "out").to_pydict()
        {'user': ['ann', 'bob'], 'items': [['cup', 'pen'], ['ink']]}
    """
    if on_bad_row not in ("error", "reject"):
        raise ConfigError("unknown on_bad_row", value=on_bad_row, allowed="error, reject")
    check_threads(threads)
    config = config if isinstance(config, SequenceConfig) else SequenceConfig.from_json_file(config)
    output, limit = Path(output), parse_bytes(memory_limit)
    if limit < _LEAST_MEMORY_BYTES:
        raise ConfigError("too little memory to work with", value=memory_limit, allowed="1GB or more")
    files = find_sources(input, hive_partitioning=config.input.hive_partitioning, file_name=config.input.file_name)
    job = fingerprint("sequences", _LAYOUT, config.to_dict(), [one.stamp() for one in files], on_bad_row)
    note = output / NOTE_FILE
    if resume and not overwrite and note.exists():
        known = read_json_object(note, error=DataError)
        if known.pop("job", None) == job:
            with expected_form(str(note), DataError):
                return SequenceSummary(**known)
    threads = threads or os.cpu_count() or 1
    try:
        with workplace(output, job, resume=resume, overwrite=overwrite) as work:
            engine = DuckDbEngine(memory_limit_bytes=limit // 2, threads=threads, spill_folder=work / "spill")
            try:
                stager = Stager(
                    config.staging, files, work / "staged", engine, on_bad_row=on_bad_row, learning=False,
                    threads=max(1, min(threads, limit >> 27)), shard_bytes=max(8 << 20, min(64 << 20, limit // 24)),
                    numbered=True,
                )  # fmt: skip
                summary = _write(config, stager.run(), engine, work, output)
            finally:
                engine.close()
            write_json_atomic(work / "out" / NOTE_FILE, {"job": job, **asdict(summary)})
    except VivianeError:
        raise
    except OSError as error:
        raise DataError(
            "a file could not be read or written",
            where=str(error.filename or output.parent),
            value=error.strerror or str(error),
            fix="free disk space or correct the permissions, then run the same command again: it resumes",
        ) from error
    return summary


def _write(
    config: SequenceConfig, shards: list[Shard], engine: DuckDbEngine, work: Path, output: Path
) -> SequenceSummary:
    rejected, rows_in = sum(shard.num_rejected for shard in shards), sum(shard.num_rows for shard in shards)
    if not rows_in:
        raise DataError("no usable row in the input", where=str(output), value=f"{rejected} malformed rows")
    file = work / "sorted.parquet"
    if not file.exists():
        half = file.with_suffix(".tmp")
        engine.write(_sorted(config, shards, engine), half)
        half.replace(file)
    out = work / "out"
    out.mkdir(exist_ok=True)
    with pq.ParquetFile(file) as source:
        maker = _Maker(config, source.schema_arrow)
        writer: pq.ParquetWriter | None = None
        for table in maker.tables(source):
            writer = writer or pq.ParquetWriter(
                out / "part-00000.parquet", table.schema, compression="lz4", write_page_checksum=True
            )
            writer.write_table(table)
        assert writer is not None
        writer.close()
    if not maker.num_rows:
        raise DataError("no row belongs to a group", where=str(output), fix="correct the key, the time or the filters")
    lines = b"".join(shard.rejected_lines() for shard in shards)
    if lines:
        write_bytes_atomic(out / REJECTS_FILE, lines)
    unused = rows_in - maker.num_rows
    return SequenceSummary(
        str(output), rows_in + rejected, rejected, unused - maker.num_no_key, maker.num_no_key, maker.num_groups,
        maker.num_short,
    )  # fmt: skip


def _sorted(config: SequenceConfig, shards: list[Shard], engine: DuckDbEngine) -> Any:
    """Rows that the filters keep, those of no group first, then by key, time and row; with the conditions' answers."""
    import ibis

    rows = engine.open([shard.file for shard in shards], pq.read_schema(shards[0].file))
    rows = rows.filter(kept(config.filters, rows)) if config.filters else rows
    known = rows[config.order_by].notnull()
    for name in config.keys:
        known = known & rows[name].notnull()
    columns = {"known": known, **{f"key{i}": rows[name] for i, name in enumerate(config.keys)}}
    columns |= {"time": rows[config.order_by], "row": rows[ROW]}
    order = list(columns)
    for i, one in enumerate(config.columns):
        counts = kept([one.where], rows) if one.where else ibis.literal(True)
        columns |= {f"value{i}": rows[one.column], f"counts{i}": counts & rows[one.column].notnull()}
    return rows.select(**columns).order_by(order)


class _Maker:
    """Sorted rows, a piece after the other, to rows of the result."""

    def __init__(self, config: SequenceConfig, schema: pa.Schema) -> None:
        self.config = config
        self.keys = [f"key{i}" for i in range(len(config.keys))]
        self.columns = [group_column(one, schema.field(f"value{i}").type) for i, one in enumerate(config.columns)]
        self.num_rows = self.num_no_key = self.num_groups = self.num_short = 0
        self._open: pa.Table | None = None  # the last row so far, whose group may continue
        self._size, self._session = 0, 0  # of the open group

    def tables(self, source: pq.ParquetFile) -> Iterator[pa.Table]:
        """Yield the groups of the whole file, at least one table, perhaps empty."""
        for batch in source.iter_batches(_ROWS_AT_ONCE):
            rows = pa.Table.from_batches([batch])
            good = rows.filter(rows.column("known"))
            self.num_no_key += rows.num_rows - good.num_rows
            if good.num_rows:
                yield self._groups(good)
        yield self._last(source.schema_arrow)

    def _groups(self, rows: pa.Table) -> pa.Table:
        """Return the groups that end in a piece: the open one is group 0 and the piece's last one stays open."""
        new_key = changes(rows.select(self.keys), self._open)
        new_group = new_key | self._pauses(rows)
        first = self._open is None
        before = rows.slice(0, 1) if self._open is None else self._open
        heads = np.flatnonzero(new_group)
        groups = np.cumsum(new_group) - int(first)
        num_groups = int(groups[-1]) + 1
        sessions = self._sessions(new_key, new_group, first)
        keys = pa.concat_tables([before, rows.take(heads[int(first) :])]).select(self.keys)
        table = self._table(rows, groups, num_groups, keys.slice(0, num_groups - 1), sessions[:-1])
        sizes = np.bincount(groups, minlength=num_groups)
        sizes[0] += self._size
        self._open, self._size, self._session = rows.slice(rows.num_rows - 1), int(sizes[-1]), int(sessions[-1])
        self.num_rows += rows.num_rows
        return self._long(table, sizes[:-1])

    def _last(self, schema: pa.Schema) -> pa.Table:
        """Close the open group, by a piece without rows that begins another."""
        rows = schema.empty_table()
        num_groups = 1 if self._open is None else 2
        keys = (rows if self._open is None else self._open).select(self.keys)
        sessions = np.full(num_groups - 1, self._session, np.int64)
        table = self._table(rows, np.zeros(0, np.int64), num_groups, keys, sessions)
        return self._long(table, np.full(num_groups - 1, self._size))

    def _table(
        self, rows: pa.Table, groups: NDArray[np.int64], num_groups: int, keys: pa.Table, sessions: NDArray[np.int64]
    ) -> pa.Table:
        found: dict[str, Any] = dict(zip(self.config.keys, keys.columns, strict=True))
        if self.config.gap is not None:
            found[SESSION] = pa.array(sessions)
        for i, (one, column) in enumerate(zip(self.config.columns, self.columns, strict=True)):
            counts: Any = combined(rows.column(f"counts{i}"))
            values = combined(rows.column(f"value{i}")).filter(counts)
            found[one.name] = column.add(values, groups[counts.to_numpy(zero_copy_only=False)], num_groups)
        return pa.table(found).combine_chunks()

    def _long(self, table: pa.Table, sizes: NDArray[np.int64]) -> pa.Table:
        good = sizes >= self.config.min_rows
        self.num_groups += int(good.sum())
        self.num_short += int(len(good) - good.sum())
        return table if good.all() else table.filter(pa.array(good))

    def _pauses(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Whether a row comes more than `gap` after the one before."""
        if self.config.gap is None:
            return np.zeros(rows.num_rows, bool)
        times = combined(rows.column("time"))
        first = times.slice(0, 1) if self._open is None else combined(self._open.column("time"))
        times = pa.concat_arrays([first, times])
        unit = 1e6 if pa.types.is_timestamp(times.type) else 1.0
        numbers = times.cast(pa.int64()) if pa.types.is_timestamp(times.type) else times
        pauses = np.diff(numbers.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
        return np.asarray(pauses > self.config.gap * unit)

    def _sessions(self, new_key: NDArray[np.bool_], new_group: NDArray[np.bool_], first: bool) -> NDArray[np.int64]:
        """Number of each group's session: from 0 for each key; the open group keeps its own."""
        starts = new_key[new_group]  # of the groups that begin here
        begun = np.arange(len(starts))
        origin = np.maximum.accumulate(np.where(starts, begun, -1)) if len(starts) else begun
        own = np.where(origin >= 0, begun - origin, self._session + 1 + begun)
        return own if first else np.concatenate([[self._session], own])

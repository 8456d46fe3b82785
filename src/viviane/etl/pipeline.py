"""From raw files to data set folders: stage, learn, apply, publish; each step resumes where a run was cut off."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.core.errors import ConfigError, DataError
from viviane.core.files import file_sha256, write_bytes_atomic, write_json_atomic
from viviane.core.logging import get_logger
from viviane.etl.apply import Applier
from viviane.etl.archive import load_learned, save_learned
from viviane.etl.config import EtlConfig
from viviane.etl.derive import derive
from viviane.etl.engine import DuckDbEngine
from viviane.etl.fitting import Fitter
from viviane.etl.groups import Groups
from viviane.etl.learned import Learned
from viviane.etl.parallel import ordered_map
from viviane.etl.partition import Partition
from viviane.etl.sources import find_sources
from viviane.etl.splits import Split, check_split, parse_split, part_names
from viviane.etl.stage import OnBadRow, Shard, Stager
from viviane.etl.workplace import SUMMARY_FILE, fingerprint, finished, parse_bytes, workplace
from viviane.etl.write import PartWriter

ETL_FILE: Final = "etl.zip"
REJECTS_FILE: Final = "rejects.jsonl"
_LEAST_MEMORY_BYTES: Final = 10**9
_LAYOUT: Final = 1  # of the work folder; raised when it changes, so that old unfinished work is not taken up
_logger = get_logger("etl")

Progress = Callable[[str, int, int], None]
"""Called with the step's name, how much is done, and of how much (0 where unknown)."""


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Args:
        rows_in: rows of the raw files, malformed ones included.
        rejected, filtered: malformed rows set aside; rows that a filter left out.
        rows: rows written, by part.
        num_ids: ids by categorical column, the reserved ones included; columns of raw ids are left out.
        num_cut: lists longer than max_length that were cut, by column.
        seconds: by step; of this process only, where a run was resumed.
    """

    output: str
    rows_in: int
    rejected: int
    filtered: int
    rows: dict[str, int]
    num_ids: dict[str, int]
    num_cut: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)


def run_job(
    what: EtlConfig | Learned,
    sources: str | Path | Sequence[str | Path],
    output: Path,
    *,
    split: Split | str | None = None,
    memory_limit: str | int = "4GB",
    threads: int | None = None,
    on_bad_row: OnBadRow = "error",
    resume: bool = True,
    overwrite: bool = False,
    labels: bool | None = None,
    progress: Progress = lambda step, done, total: None,
) -> Summary:
    """Learn (from a config) or only apply (what was learned), and write; see `viviane.etl.run`."""
    if on_bad_row not in ("error", "reject"):
        raise ConfigError("unknown on_bad_row", value=on_bad_row, allowed="error, reject")
    limit = parse_bytes(memory_limit)
    if limit < _LEAST_MEMORY_BYTES:
        raise ConfigError("too little memory to work with", value=memory_limit, allowed="1GB or more")
    split = parse_split(split) if isinstance(split, str) else split
    config = what if isinstance(what, EtlConfig) else what.config
    check_split(split, config)
    files = find_sources(sources)
    learned_part = None if isinstance(what, EtlConfig) else _digest(what, output)
    job = fingerprint(
        _LAYOUT, config.to_dict(), learned_part, [one.stamp() for one in files],
        None if split is None else split.to_dict(), on_bad_row, labels,
    )  # fmt: skip
    if resume and not overwrite and (earlier := finished(output, job)) is not None:
        _logger.info("%s is complete already: nothing to do", output)
        return Summary(**{key: value for key, value in earlier.items() if key != "job"})
    run = _Run(what, config, split, limit, threads or os.cpu_count() or 1, progress)
    try:
        with workplace(output, job, resume=resume, overwrite=overwrite) as work, run.engine(work):
            stager = Stager(
                config, files, work / "staged", run.duckdb,
                split=split, on_bad_row=on_bad_row, threads=run.parse_threads, shard_bytes=run.shard_bytes,
                labels=labels if isinstance(what, Learned) else True, learning=isinstance(what, EtlConfig),
                progress=lambda rows: progress("read", rows, 0),
            )  # fmt: skip
            summary = run.steps(stager, work, output, job)
    except OSError as error:
        raise DataError(
            "a file could not be read or written",
            where=str(error.filename or output.parent),
            value=error.strerror or str(error),
            fix="make room or correct the permissions, then run the same command again: it resumes",
        ) from error
    for name, num in summary.num_cut.items():
        if num:
            _logger.info("column %s: %d lists were longer than max_length and were cut", name, num)
    _logger.info("%d rows rejected, %d filtered, %s written", summary.rejected, summary.filtered, summary.rows)
    return summary


def _digest(learned: Learned, output: Path) -> str:
    file = output.parent / f".{output.name}.{os.getpid()}.etl.zip"
    try:
        return file_sha256(save_learned(learned, file))
    finally:
        file.unlink(missing_ok=True)


class _Run:
    """One job under way."""

    def __init__(
        self,
        what: EtlConfig | Learned,
        config: EtlConfig,
        split: Split | None,
        limit_bytes: int,
        threads: int,
        progress: Progress,
    ) -> None:
        self.what, self.config, self.split, self.threads, self.progress = what, config, split, threads, progress
        # Half for the engine; of the rest, a staged shard and its output are held about six times at the worst.
        self.engine_bytes = limit_bytes // 2
        self.shard_bytes = max(8 << 20, min(64 << 20, limit_bytes // 24))
        self.parse_threads = max(1, min(threads, limit_bytes >> 27))  # each holds a few blocks of text
        self.seconds: dict[str, float] = {}
        self.duckdb: DuckDbEngine

    @contextmanager
    def engine(self, work: Path) -> Iterator[None]:
        """Open the engine for the length of the job; it spills into the work folder."""
        self.duckdb = DuckDbEngine(
            memory_limit_bytes=self.engine_bytes, threads=self.threads, spill_folder=work / "spill"
        )
        try:
            yield
        finally:
            self.duckdb.close()

    def steps(self, stager: Stager, work: Path, output: Path, job: str) -> Summary:
        """Do everything up to the finished `out` folder."""
        with self._timed("read"):
            shards = stager.run()
        rejected = sum(shard.num_rejected for shard in shards)
        if not any(shard.num_rows for shard in shards):
            raise DataError("no usable row in the input", where=str(output), value=f"{rejected} malformed rows")
        with self._timed("split"):
            names = part_names(self.split, "train" if isinstance(self.what, EtlConfig) else "")
            partition = Partition(self.config, self.split, names, self.duckdb, shards)
        with self._timed("derive"):
            known = self.what.groups if isinstance(self.what, Learned) else None
            full, groups = derive(self.config, partition, self.duckdb, shards, work / "derived", known, self.progress)
        with self._timed("learn"):
            learned = self._learn(partition, groups, work)
        with self._timed("write"):
            writers, num_cut = self._write(learned, partition, full, work / "out")
            save_learned(learned, work / "out" / ETL_FILE)
            for name, writer in writers.items():
                self._complete(writer, learned, work / "out", name, [str(one.path) for one in stager.sources])
        lines = b"".join(shard.rejects.read_bytes() for shard in shards)
        if lines:
            write_bytes_atomic(work / "out" / REJECTS_FILE, lines)
        rows = {name or output.name: int(num) for name, num in zip(names, partition.totals, strict=True)}
        summary = Summary(
            output=str(output),
            rows_in=sum(shard.num_rows for shard in shards) + rejected,
            rejected=rejected,
            filtered=partition.num_filtered,
            rows=rows,
            num_ids={one.name: one.num_ids for one in learned.schema.categorical if one.num_ids is not None},
            num_cut=num_cut,
        )
        write_json_atomic(work / "out" / SUMMARY_FILE, {"job": job, **asdict(summary)})
        return Summary(**{**asdict(summary), "seconds": self.seconds})

    def _learn(self, partition: Partition, groups: Mapping[str, Groups], work: Path) -> Learned:
        if isinstance(self.what, Learned):
            return self.what
        file = work / ETL_FILE
        if not file.exists():
            total = len({spec.table for spec in self.config.categorical})
            done = lambda count: self.progress("learn", count, total)  # noqa: E731
            fitter = Fitter(self.config, partition.training_rows(), self.duckdb, work / "learned", done)
            save_learned(replace(fitter.run(), groups=groups), file)
        return load_learned(file)

    def _write(
        self, learned: Learned, partition: Partition, shards: list[Shard], folder: Path
    ) -> tuple[dict[str, PartWriter], dict[str, int]]:
        """Apply to each shard that is not wholly in finished files, and write its rows to their parts."""
        writers = {name: PartWriter(folder / name, learned.schema) for name in partition.names}
        applier = Applier(learned, self.duckdb, self.threads)
        done = [writer.done_rows for writer in writers.values()]
        todo = [n for n in range(len(shards)) if (partition.starts[n] + partition.counts[n] > done).any()]

        def transform(number: int) -> tuple[int, list[pa.Table]]:
            staged = pq.ParquetFile(shards[number].file).read(use_threads=False)
            return number, [applier.table(part) for part in partition.parts_of(staged)]

        try:
            for number, tables in ordered_map(transform, todo, min(2, self.threads)):
                for part, (writer, table) in enumerate(zip(writers.values(), tables, strict=True)):
                    writer.add(table.slice(max(0, done[part] - int(partition.starts[number][part]))))
                self.progress("write", number + 1, len(shards))
            empty = applier.table(pq.read_table(shards[0].file).slice(0, 0))
            for writer in writers.values():
                writer.close(empty)
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
        return writers, applier.num_cut

    def _complete(self, writer: PartWriter, learned: Learned, out: Path, name: str, sources: list[str]) -> None:
        learned.schema.save(writer.folder)
        if writer.folder != out:
            write_bytes_atomic(writer.folder / ETL_FILE, (out / ETL_FILE).read_bytes())
        rows = sum(pq.ParquetFile(file).metadata.num_rows for file in sorted(writer.folder.glob("part-*.parquet")))
        info = {"rows": rows, "part": name, "source": sources, "columns": writer.statistics.to_dict()}
        write_json_atomic(writer.folder / "info.json", info)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start

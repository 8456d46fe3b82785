"""From raw files to data set folders: stage, learn, apply, publish; each step resumes where a run was cut off."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import pyarrow as pa

from viviane.config.base import Settings
from viviane.core.data_manifest import write_data_manifest
from viviane.core.errors import ConfigError, DataError, VivianeError, expect
from viviane.core.files import file_sha256, write_bytes_atomic, write_json_atomic
from viviane.core.json_files import expected_form
from viviane.core.locations import AnyPath, RemotePath
from viviane.core.logging import get_logger
from viviane.core.remote.published import upload_folder
from viviane.core.threads import short_switch_interval
from viviane.etl.apply import Applier
from viviane.etl.archive import load_learned, save_learned
from viviane.etl.checks import check_threads
from viviane.etl.columns import OutputSpec
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import History
from viviane.etl.derive import derive
from viviane.etl.engine import DuckDbEngine, Engine
from viviane.etl.external import External, external_stamps, read_external
from viviane.etl.file_tasks import Mapper, write_files
from viviane.etl.fitting import Fitter, drop_low_cardinality, settle_hotness
from viviane.etl.given import digest_of, given_vocabularies
from viviane.etl.groups import Groups
from viviane.etl.held import HeldRows
from viviane.etl.learned import Learned
from viviane.etl.limits import beyond_limits
from viviane.etl.parallel import ordered_map
from viviane.etl.partition import Partition
from viviane.etl.sources import Source, find_sources
from viviane.etl.splits import FileSplit, RowSplit, Split, check_split, parse_split, part_names
from viviane.etl.stage import OnBadRow, Shard, Stager
from viviane.etl.workplace import (
    SUMMARY_FILE,
    fingerprint,
    finished,
    parse_bytes,
    refuse_existing,
    working_place,
    workplace,
)
from viviane.etl.write import PartWriter, Sizes, Written

ETL_FILE: Final = "etl.zip"
REJECTS_FILE: Final = "rejects.jsonl"
_LEAST_MEMORY_BYTES: Final = 10**9
_LAYOUT: Final = 2  # of the work folder; raised when it changes, so that old unfinished work is not taken up
_logger = get_logger("etl")

EngineName = Literal["duckdb", "spark", "gpu"]
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
        dropped: categorical columns that have fewer values than `min_cardinality`.
    """

    output: str
    rows_in: int
    rejected: int
    filtered: int
    rows: dict[str, int]
    num_ids: dict[str, int]
    num_cut: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def run_job(
    what: EtlConfig | Learned,
    sources: str | AnyPath | Sequence[str | AnyPath],
    output: AnyPath,
    *,
    split: Split | str | None = None,
    memory_limit: str | int = "4GB",
    threads: int | None = None,
    on_bad_row: OnBadRow = "error",
    resume: bool = True,
    overwrite: bool = False,
    labels: bool | None = None,
    engine: EngineName = "duckdb",
    master: str | None = None,
    spark: Mapping[str, str] | None = None,
    device: str | None = None,
    progress: Progress = lambda step, done, total: None,
    given_as: str = "",
) -> Summary:
    """Learn (from a config) or only apply (what was learned), and write; see `viviane.etl.run`."""
    if on_bad_row not in ("error", "reject"):
        raise ConfigError("unknown on_bad_row", value=on_bad_row, allowed="error, reject")
    check_threads(threads)
    expect("progress", progress, Callable)  # type: ignore[arg-type]
    if split is not None:
        expect("split", split, str, Settings)
    make = _maker(engine, master, spark, device)
    limit = parse_bytes(memory_limit)
    if limit < _LEAST_MEMORY_BYTES:
        raise ConfigError("too little memory to work with", value=memory_limit, allowed="1GB or more")
    split = parse_split(split) if isinstance(split, str) else split
    config = what if isinstance(what, EtlConfig) else what.config
    check_split(split, config)
    files = _files(config, sources, given_as)
    here = working_place(output)
    learned_part = None if isinstance(what, EtlConfig) else _digest(what)
    given = given_vocabularies(config) if isinstance(what, EtlConfig) else {}
    stamps = external_stamps(config) if isinstance(what, EtlConfig) else []
    job = fingerprint(
        _LAYOUT, config.to_dict(), learned_part, [one.stamp() for one in files],
        None if split is None else split.to_dict(), on_bad_row, labels, *digest_of(given), *stamps,
    )  # fmt: skip
    if resume and not overwrite and (earlier := finished(output, job)) is not None:
        _logger.info("%s is complete already: nothing to do", output)
        with expected_form(str(output), DataError):
            return Summary(**{key: value for key, value in earlier.items() if key != "job"})
    refuse_existing(output, overwrite=overwrite)
    # Half for the engine, where Spark's heap shares it with DuckDB.
    run = _Run(what, config, split, limit, threads or os.cpu_count() or 1, progress)
    run.given = given
    run.external = read_external(config) if isinstance(what, EtlConfig) else what.external
    run.make, run.engine_bytes = make, limit // (4 if engine == "spark" else 2)
    try:
        with workplace(here, job, resume=resume, overwrite=overwrite or here is not output) as work, run.engine(work):
            stager = Stager(
                config, files, work / "staged", run.chosen,
                split=split, on_bad_row=on_bad_row, threads=run.parse_threads, shard_bytes=run.shard_bytes,
                hold_bytes=0 if engine == "spark" else run.hold_bytes,  # Spark's workers read files
                labels=labels if isinstance(what, Learned) else True, learning=isinstance(what, EtlConfig),
                states=what.states if isinstance(what, Learned) else None, external=run.external,
                progress=lambda rows: progress("read", rows, 0),
            )  # fmt: skip
            summary = run.steps(stager, work, output, job)
    except VivianeError:
        raise
    except OSError as error:
        raise DataError(
            "a file could not be read or written",
            where=str(error.filename or here.parent),
            value=error.strerror or str(error),
            fix="free disk space or correct the permissions, then run the same command again: it resumes",
        ) from error
    if isinstance(output, RemotePath):
        upload_folder(here, output)
        shutil.rmtree(here)
    for name, num in summary.num_cut.items():
        if num:
            _logger.info("column %s: %d lists were longer than max_length and were cut", name, num)
    _logger.info("%d rows rejected, %d filtered, %s written", summary.rejected, summary.filtered, summary.rows)
    return summary


def _files(config: EtlConfig, sources: str | AnyPath | Sequence[str | AnyPath], given_as: str) -> list[Source]:
    found = find_sources(sources, hive_partitioning=config.input.hive_partitioning, file_name=config.input.file_name)
    return [replace(one, given_as=given_as) for one in found]


def _maker(
    engine: str, master: str | None, spark: Mapping[str, str] | None, device: str | None
) -> Callable[..., Engine]:
    """Return what opens an engine, given a share of memory, threads and a folder to spill into."""
    if engine not in get_args(EngineName):
        raise ConfigError("no such engine", value=engine, allowed=", ".join(get_args(EngineName)))
    if engine != "spark" and (master or spark):
        raise ConfigError(
            "master and settings are Spark's", fix='choose engine="spark" (--engine spark), or leave them out'
        )
    if engine != "gpu" and device:
        raise ConfigError("a device is the GPU engine's", fix='choose engine="gpu" (--engine gpu), or leave it out')
    if engine == "spark":
        from viviane.etl.spark import SparkEngine  # for few runs

        return partial(SparkEngine, master=master, settings=spark)
    if engine == "gpu":
        from viviane.etl.gpu import GpuEngine  # loads torch

        return partial(GpuEngine, device=device or "cuda")
    return DuckDbEngine


def _digest(learned: Learned) -> str:
    with tempfile.TemporaryDirectory(prefix="viviane-etl-") as folder:
        return file_sha256(Path(str(save_learned(learned, Path(folder) / ETL_FILE))))


class _Run:
    """One job in progress."""

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
        # Of what the engine leaves, a staged shard and its output are held about six times at the worst.
        self.shard_bytes = max(8 << 20, min(64 << 20, limit_bytes // 24))
        if listed := sum(one.last for one in config.derived if isinstance(one, History)):
            # A row's lists come to weigh more than the row: keep what is held of a shard as it was.
            self.shard_bytes = max(1 << 20, self.shard_bytes // (1 + listed // 4))
        # A small input is not read back: what is held comes to no more than the shards that writing has in progress.
        self.hold_bytes = 0 if config.derived else 3 * self.shard_bytes
        self.parse_threads = max(1, min(threads, limit_bytes >> 27))  # each holds a few blocks of text
        self.seconds: dict[str, float] = {}
        self.given: Mapping[str, Any] = {}
        self.external: External = {}
        self.make: Callable[..., Engine]
        self.engine_bytes: int
        self.chosen: Engine

    @contextmanager
    def engine(self, work: Path) -> Iterator[None]:
        """Open the engine for the length of the job; it spills into the work folder."""
        self.chosen = self.make(memory_limit_bytes=self.engine_bytes, threads=self.threads, spill_folder=work / "spill")
        if self._needs_expressions:
            self.chosen.expect_expressions()
        try:
            yield
        finally:
            self.chosen.close()

    @property
    def _needs_expressions(self) -> bool:
        """Whether the job surely computes with the engine: a small one of plain columns ends without."""
        config = self.config
        specs: list[OutputSpec] = [*config.labels, *config.dense, *config.categorical]
        learns = isinstance(self.what, EtlConfig) and any(one.wanted() for spec in specs for one in spec.operators)
        computed = config.derived or config.filters or not all(spec.is_plain for spec in config.categorical)
        by_value = self.split is not None and not isinstance(self.split, (RowSplit, FileSplit))
        return bool(learns or computed or by_value)

    @short_switch_interval()  # threads come back from Arrow again and again
    def steps(self, stager: Stager, work: Path, output: AnyPath, job: str) -> Summary:
        """Do everything up to the finished `out` folder."""
        with self._timed("read"):
            shards = stager.run()
        rejected = sum(shard.num_rejected for shard in shards)
        if not any(shard.num_rows for shard in shards):
            place = ", ".join(source.shown for source in stager.sources[:5])
            if not rejected:
                raise DataError("the input has no rows", where=place)
            raise DataError("no usable row in the input", where=place, value=f"{rejected} malformed rows")
        with self._timed("split"):
            names = part_names(self.split, "train" if isinstance(self.what, EtlConfig) else "")
            partition = Partition(self.config, self.split, names, self.chosen, stager, shards)
        with self._timed("derive"):
            known = self.what.groups if isinstance(self.what, Learned) else None
            full, groups = derive(self.config, partition, self.chosen, shards, work / "derived", known, self.progress)
        with self._timed("learn"):
            learned = self._learn(partition, groups, full, stager, work)
        with self._timed("write"), ThreadPoolExecutor(self.threads) as pool:
            folders = {name: work / "out" / name for name in partition.names}
            # Files are small and flushed each: that is waited for while rows are written.
            saving = pool.submit(self._save, learned, work, list(folders.values()))
            complete = partial(self._complete, learned, folders, [one.shown for one in stager.sources])
            if isinstance(self.chosen, Mapper):
                saving.result()  # its workers read it
                written, num_cut = write_files(
                    self.chosen, learned, work / ETL_FILE, partition, full, folders, self.progress
                )
                list(pool.map(complete, written, written.values()))
            else:
                num_cut = self._write(learned, partition, full, stager, folders, complete)
            saving.result()
        lines = b"".join(shard.rejected_lines() for shard in shards)
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
            dropped=[
                one.name
                for one in self.config.categorical
                if one.name not in {spec.name for spec in learned.config.categorical}
            ],
        )
        write_json_atomic(work / "out" / SUMMARY_FILE, {"job": job, **asdict(summary)})
        return Summary(**{**asdict(summary), "seconds": self.seconds})

    def _learn(
        self,
        partition: Partition,
        groups: Mapping[str, Groups],
        shards: list[Shard],
        stager: Stager,
        work: Path,
    ) -> Learned:
        if isinstance(self.what, Learned):
            return self.what
        file = work / ETL_FILE
        if not file.exists():
            total = len({spec.table for spec in self.config.categorical})
            done = lambda count: self.progress("learn", count, total)  # noqa: E731
            settled = settle_hotness(self.config, partition.written_rows, self.chosen)
            with self._counted(partition, shards, stager) as (counted, in_memory):
                fitted = Fitter(
                    self.config, partition.training_rows, self.chosen, work / "learned", done,
                    counted=counted, in_memory=in_memory, given=self.given, threads=self.threads,
                ).run()  # fmt: skip
            fitted = replace(fitted, config=settled, groups=groups, external=self.external)
            return drop_low_cardinality(fitted)[0]
        return load_learned(file)

    def _save(self, learned: Learned, work: Path, folders: list[Path]) -> None:
        """Save what was learned for a resumed run and, with its schema, for everything that is written."""
        file = work / ETL_FILE
        if not file.exists():
            save_learned(learned, file)
        out = work / "out"
        for folder in dict.fromkeys([out, *folders]):
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(folder / ETL_FILE, file.read_bytes())
        for folder in folders:
            learned.schema.save(folder)

    @contextmanager
    def _counted(
        self, partition: Partition, shards: list[Shard], stager: Stager
    ) -> Iterator[tuple[Callable[[], Any], HeldRows | None]]:
        """The training rows from memory, where all are held: sums of floats are not to be taken of them, whose bits
        may depend on how an engine cuts rows into pieces. As an ibis table, and as they are."""
        chosen = self.chosen
        if not isinstance(chosen, DuckDbEngine) or not all(shard.file in stager.held for shard in shards):
            yield partition.training_rows, None
            return
        tables = [stager.held[shard.file] for shard in shards]
        with ExitStack() as stack:
            rows = cache(lambda: partition.training_rows(stack.enter_context(chosen.held(pa.concat_tables(tables)))))
            held = HeldRows(tables, [partition.is_training(table) for table in tables])
            yield rows, held
        for number, shard in enumerate(shards):
            stager.held[shard.file] = held.with_ids(number, tables[number])

    def _write(
        self,
        learned: Learned,
        partition: Partition,
        shards: list[Shard],
        stager: Stager,
        folders: Mapping[str, Path],
        complete: Callable[[str, Written], None],
    ) -> dict[str, int]:
        """Apply to each shard that is not wholly in finished files, write its rows to their parts, and call `complete`
        for each part; returns how many lists were cut, by column."""
        sizes = [Sizes.of(total) for total in partition.totals.tolist()]
        writers = {
            name: PartWriter(folder, learned.schema, size)
            for (name, folder), size in zip(folders.items(), sizes, strict=True)
        }
        num_at_once = min(2, self.threads)
        applier = Applier(learned, self.chosen, -(-self.threads // num_at_once))
        done = [writer.done_rows for writer in writers.values()]
        schema = stager.schema_of(shards[0])
        todo = [n for n in range(len(shards)) if (partition.starts[n] + partition.counts[n] > done).any()]

        def transform(number: int) -> tuple[int, dict[int, pa.Table]]:
            staged = stager.take(shards[number])
            try:
                parts = partition.parts_of(staged)
                return number, {n: applier.table(part) for n, part in enumerate(parts) if part.num_rows}
            except Exception as error:
                self._refuse_huge(staged, learned, stager, shards[number - 1] if number else None, error)
                raise

        def end(name: str) -> None:
            writers[name].close(lambda: applier.table(schema.empty_table()))
            complete(name, Written(writers[name].statistics, writers[name].files))

        try:
            for number, tables in ordered_map(transform, todo, num_at_once):
                for part, table in tables.items():
                    first = max(0, done[part] - int(partition.starts[number][part]))
                    writers[partition.names[part]].add(table.slice(first))
                self.progress("write", number + 1, len(shards))
            with ThreadPoolExecutor(self.threads) as pool:  # most parts have their last row group before them
                list(pool.map(end, writers))
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
        return applier.num_cut

    def _refuse_huge(
        self, staged: pa.Table, learned: Learned, stager: Stager, before: Shard | None, cause: Exception
    ) -> None:
        """Name the line of a number that operators made too large by what they learned, if there is one."""
        cells = beyond_limits(staged, learned.config, self.chosen, learned.states)
        if cells:
            cell = cells[0]
            raise DataError(
                f"after its operators {cell.problem}",
                where=f"{stager.place_of(before, cell.row)}, column {cell.column!r}", value=cell.value,
                fix="clip the column, or take its logarithm, before it is standardized; or leave the line out",
            ) from cause  # fmt: skip

    def _complete(
        self, learned: Learned, folders: Mapping[str, Path], sources: list[str], name: str, written: Written
    ) -> None:
        """Describe a part whose files are whole."""
        about = {"rows": sum(one["rows"] for one in written.files), "part": name, "source": sources}
        write_bytes_atomic(folders[name] / "info.json", written.statistics.info_json(about))
        write_data_manifest(folders[name], {"format": "parquet"}, learned.schema.to_dict(), written.files)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start

"""Output files as tasks that know nothing of one another, for an engine whose workers are elsewhere.

A file holds rows k n to (k + 1) n of its part. Which staged shards they lie in is known in advance, so that a worker
reads those, applies what was learned, and writes the file that one process writing everything would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from viviane.etl.apply import Applier
from viviane.etl.archive import load_learned
from viviane.etl.derivations import Computed
from viviane.etl.engine import DuckDbEngine
from viviane.etl.functions import register_absent
from viviane.etl.learned import Learned
from viviane.etl.parquet import read_columns
from viviane.etl.partition import Partition
from viviane.etl.stage import Shard
from viviane.etl.write import PartWriter, Sizes, Statistics, Written


@runtime_checkable
class Mapper(Protocol):
    """An engine that runs tasks on workers."""

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yield work(item) in the order of items."""


@dataclass(frozen=True)
class FileTask:
    """One output file.

    Args:
        part, number: which part of the output, and which of its files.
        sources: staged files, and the rows of each, among those of the part, that the file holds: (file, from, to).
    """

    part: int
    number: int
    sources: tuple[tuple[Path, int, int], ...]


class FileWork:
    """What a worker does with a task.

    Args:
        partition: where rows belong.
        learned: a file with the fitted ETL; every worker sees it, the staged files and `folders` under these paths.
        folders: of each part.
        functions: registered functions that the ETL names; their columns are in the staged files.
    """

    def __init__(
        self, partition: Partition, learned: Path, folders: list[Path], functions: tuple[str, ...] = ()
    ) -> None:
        self.functions = functions
        self.partition, self.learned, self.folders = partition.detached(), learned, folders
        self.sizes = _sizes(partition)

    def __call__(self, task: FileTask) -> tuple[FileTask, Written, dict[str, int]]:
        """Write the file, unless it is there; return what was written and how many lists were cut."""
        register_absent(self.functions)
        learned = load_learned(self.learned)
        writer = PartWriter(self.folders[task.part], learned.schema, self.sizes[task.part], only=task.number)
        if writer.take(task.number):
            return task, Written(writer.statistics, writer.files), {}
        engine = DuckDbEngine()
        self.partition.engine = engine
        try:
            applier = Applier(learned, engine, threads=1)
            for file, start, stop in task.sources:
                staged = read_columns(file, use_threads=False)
                rows = self.partition.parts_of(staged)[task.part].slice(start, stop - start)
                writer.add(applier.table(rows))
            writer.close(lambda: applier.table(read_columns(task.sources[0][0]).slice(0, 0)))
        except BaseException:
            writer.abandon()
            raise
        finally:
            engine.close()
        return task, Written(writer.statistics, writer.files), applier.num_cut


def file_tasks(partition: Partition, shards: list[Shard]) -> list[FileTask]:
    """Return the files of all parts; a part without rows still has one."""
    tasks: list[FileTask] = []
    for part, (total, sizes) in enumerate(zip(partition.totals.tolist(), _sizes(partition), strict=True)):
        size = sizes.rows_per_file
        starts, counts = partition.starts[:, part], partition.counts[:, part]
        for number in range(max(1, -(-total // size))):
            first, last = number * size, min(total, (number + 1) * size)
            tasks.append(FileTask(part, number, _sources(shards, starts, counts, first, last)))
    return tasks


def _sizes(partition: Partition) -> list[Sizes]:
    return [Sizes.of(total) for total in partition.totals.tolist()]


def _sources(
    shards: list[Shard], starts: NDArray[np.int64], counts: NDArray[np.int64], first: int, last: int
) -> tuple[tuple[Path, int, int], ...]:
    found = []
    for shard, start, count in zip(shards, starts.tolist(), counts.tolist(), strict=True):
        low, high = max(first, start), min(last, start + count)
        if low < high:
            found.append((shard.file, low - start, high - start))
    return tuple(found) or ((shards[0].file, 0, 0),)


def write_files(
    engine: Mapper,
    learned: Learned,
    learned_file: Path,
    partition: Partition,
    shards: list[Shard],
    folders: Mapping[str, Path],
    progress: Callable[[str, int, int], None],
) -> tuple[dict[str, Written], dict[str, int]]:
    """Write every part into its folder; returns what was written of each, and how many lists were cut, by column."""
    written = {name: Written(Statistics(learned.schema), []) for name in folders}
    num_cut = {spec.name: 0 for spec in learned.config.categorical if spec.max_length}
    tasks = file_tasks(partition, shards)
    functions = tuple(one.function for one in learned.config.derived if isinstance(one, Computed))
    work = FileWork(partition, learned_file, list(folders.values()), functions)
    for done, (task, found, cut) in enumerate(engine.map(work, tasks)):
        part = written[partition.names[task.part]]
        part.statistics.join(found.statistics)
        part.files.extend(found.files)
        for name, count in cut.items():
            num_cut[name] += count
        progress("write", done + 1, len(tasks))
    return written, num_cut

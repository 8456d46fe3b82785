"""The step between split and learning: staged shards to shards that hold every derived column.

A shard is written under a temporary name and renamed: those that an interrupted run completed are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from viviane.etl.config import EtlConfig
from viviane.etl.derivations import ROW_DERIVATIONS, DifferenceLag
from viviane.etl.deriving import add_group_columns, lag_build
from viviane.etl.engine import Engine
from viviane.etl.group_fitting import GroupFitter
from viviane.etl.groups import Groups
from viviane.etl.partition import Partition
from viviane.etl.stage import Shard

Progress = Callable[[str, int, int], None]


def derive(
    config: EtlConfig,
    partition: Partition,
    engine: Engine,
    shards: list[Shard],
    folder: Path,
    groups: Mapping[str, Groups] | None,
    progress: Progress,
) -> tuple[list[Shard], Mapping[str, Groups]]:
    """Write the shards with their derived columns.

    Args:
        folder: where they go.
        groups: what a fitted ETL knows; None learns it from the training rows.

    Returns:
        The new shards, or the old ones if staging computed all there is; what was learned.
    """
    if all(isinstance(one, ROW_DERIVATIONS) for one in config.derived):
        return shards, {}
    folder.mkdir(parents=True, exist_ok=True)
    num = len(config.derived)
    learning = groups is None
    if groups is None:
        groups = GroupFitter(config, partition, engine, shards, folder).run(lambda done: progress("derive", done, num))
    lags = [one for one in config.derived if isinstance(one, DifferenceLag)]
    readers = {one.name: RowReader(_lag_file(one, partition, engine, folder)) for one in lags}
    found: list[Shard] = []
    first_row = 0
    for shard in shards:
        new = replace(shard, file=folder / shard.file.name)
        if not new.file.exists():
            staged = pq.read_table(shard.file)
            for name, reader in readers.items():
                staged = staged.append_column(name, reader.rows(first_row, staged.num_rows))
            training = partition.is_training(staged) if learning else None
            staged = add_group_columns(staged, config, groups, engine, training)
            half = new.file.with_suffix(".tmp")
            pq.write_table(staged, half, compression="lz4", row_group_size=131_072)
            half.replace(new.file)
        found.append(new)
        first_row += shard.num_rows
        progress("derive", len(found), len(shards))
    partition.reopen(found)
    return found, groups


def _lag_file(one: DifferenceLag, partition: Partition, engine: Engine, folder: Path) -> Path:
    file = folder / f"lag-{one.name.encode().hex()}.parquet"
    if not file.exists():
        half = file.with_suffix(".tmp")
        engine.write(partition.rows.select(**lag_build(one)(partition.rows)).order_by("row").select("value"), half)
        half.replace(file)
    return file


class RowReader:
    """Reads any range of rows of a Parquet file with one column, by row groups."""

    def __init__(self, file: Path) -> None:
        self._file = pq.ParquetFile(file)
        metadata = self._file.metadata
        self._sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def rows(self, first: int, num: int) -> Any:
        """Return rows first to first + num."""
        wanted, skipped, at = [], 0, 0
        for number, size in enumerate(self._sizes):
            if at + size <= first:
                skipped += size
            elif at < first + num:
                wanted.append(number)
            at += size
        table = self._file.read_row_groups(wanted)
        return table.column(0).slice(first - skipped, num)

"""The step between split and learning: staged shards to shards that hold every derived column.

A shard is written under a temporary name and renamed: those that an interrupted run completed are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.etl.config import EtlConfig
from viviane.etl.derivations import EARLIER, ROW_DERIVATIONS, Earlier, History, key_names
from viviane.etl.deriving import add_group_columns, history_build, lag_build
from viviane.etl.engine import Engine
from viviane.etl.group_fitting import GroupFitter
from viviane.etl.groups import Groups
from viviane.etl.history import HistoryMaker
from viviane.etl.parquet import read_columns
from viviane.etl.partition import Partition
from viviane.etl.stage import Shard

Progress = Callable[[str, int, int], None]
_ROWS_AT_ONCE: Final = 65_536


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
        groups: statistics of a fitted ETL; None: learned from the training rows.

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
    earlier = [one for one in config.derived if isinstance(one, EARLIER)]
    readers = {one.name: RowReader(_earlier_file(one, partition, engine, shards, folder)) for one in earlier}
    found: list[Shard] = []
    first_row = 0
    for shard in shards:
        new = replace(shard, file=folder / shard.file.name)
        if not new.file.exists():
            staged = read_columns(shard.file)
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


def _earlier_file(one: Earlier, partition: Partition, engine: Engine, shards: list[Shard], folder: Path) -> Path:
    """Write the values of all rows, in the order of the rows."""
    file = folder / f"lag-{one.name.encode().hex()}.parquet"
    if not file.exists():
        half = file.with_suffix(".tmp")
        if isinstance(one, History):
            _write_history(one, partition, engine, shards, half)
        else:
            engine.write(partition.rows.select(**lag_build(one)(partition.rows)).order_by("row").select("value"), half)
        half.replace(file)
    return file


def _write_history(one: History, partition: Partition, engine: Engine, shards: list[Shard], file: Path) -> None:
    """Sort by key and time, list, and sort back by row: the engine's sorts spill, the lists pass through."""
    columns = history_build(one)(partition.rows)
    order = [name for name in columns if name not in ("value", "counts")]
    by_key, listed = file.with_suffix(".sorted.tmp"), file.with_suffix(".listed.tmp")
    engine.write(partition.rows.select(**columns).order_by(order), by_key)
    maker = HistoryMaker(one.last, len(key_names(one.by)))
    writer: pq.ParquetWriter | None = None
    try:
        with pq.ParquetFile(by_key) as source:
            for batch in source.iter_batches(_ROWS_AT_ONCE):
                lists = maker.add(pa.Table.from_batches([batch]))
                writer = writer or pq.ParquetWriter(listed, lists.schema, compression="lz4")
                writer.write_table(lists)
    finally:
        if writer is not None:
            writer.close()
    rows = engine.open([listed], pq.read_schema(listed))
    engine.write(rows.order_by("row").select("value"), file)
    partition.reopen(shards)
    by_key.unlink()
    listed.unlink()


class RowReader:
    """Reads ranges of rows of a Parquet file with one column; the groups at work stay in memory."""

    def __init__(self, file: Path) -> None:
        self._file = pq.ParquetFile(file)
        metadata = self._file.metadata
        self._sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._held: dict[int, Any] = {}

    def rows(self, first: int, num: int) -> Any:
        """Return rows first to first + num."""
        wanted: list[int] = []
        skipped = at = 0
        for number, size in enumerate(self._sizes):
            if at + size <= first:
                skipped += size
            elif at < first + num:
                wanted.append(number)
            at += size
        self._held = {n: self._held[n] if n in self._held else self._file.read_row_group(n).column(0) for n in wanted}
        pieces = [chunk for column in self._held.values() for chunk in column.chunks]
        return pa.chunked_array(pieces, self._file.schema_arrow.field(0).type).slice(first - skipped, num)

"""Statistics of the raw columns: how many values, how many missing, how many distinct, and where numbers lie."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from viviane.core.errors import ConfigError, DataError
from viviane.core.locations import AnyPath
from viviane.etl.checks import check_threads
from viviane.etl.columns import InputColumn
from viviane.etl.config import EtlConfig
from viviane.etl.engine import DuckDbEngine
from viviane.etl.fitting import order_statistics
from viviane.etl.sources import find_sources
from viviane.etl.stage import OnBadRow, Stager
from viviane.etl.workplace import parse_bytes

_LEAST_MEMORY_BYTES: Final = 10**9


@dataclass(frozen=True)
class ColumnStatistics:
    """Of one raw column; of a list column, `missing` and lengths are those of lists, the rest that of their values.

    Args:
        name, type: as in the config; "list of int" for a list.
        rows, missing: rows that are no malformed ones; those without a value.
        values: that are there; in lists, all of them together.
        distinct: different values.
        mean, std, median: of numbers; std is that of the population, the median the upper one.
        min, max: least and greatest number or time, shortest and longest text; None where there is no value.
        shortest, longest: list.
    """

    name: str
    type: str
    rows: int
    missing: int
    values: int
    distinct: int
    mean: float | None = None
    std: float | None = None
    median: float | None = None
    min: float | str | None = None
    max: float | str | None = None
    shortest: int | None = None
    longest: int | None = None


def statistics(
    config: EtlConfig,
    input: str | AnyPath | Sequence[str | AnyPath],  # noqa: A002 - the word on the command line
    *,
    memory_limit: str | int = "4GB",
    threads: int | None = None,
    on_bad_row: OnBadRow = "error",
) -> list[ColumnStatistics]:
    """Return statistics of every column in the config's `input`, exact, out of core; nothing is written or learned.

    Args:
        config: only its `input` counts.
        input: raw files, folders or patterns.
        memory_limit, threads, on_bad_row: as for `run`.

    Raises:
        DataError: a malformed row, with file, line and column; a damaged file; no row.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "raw.csv").write_text("price,item\\n1,pen\\n4,ink\\n,pen\\n")
        >>> config = EtlConfig(
        ...     input={"columns": [{"name": "price", "type": "int"}, {"name": "item"}]}, categorical=[{"name": "item"}])
        >>> price, item = statistics(config, folder / "raw.csv")
        >>> price.missing, price.mean, item.distinct, item.max
        (1, 2.5, 2, 3.0)
    """
    if on_bad_row not in ("error", "reject"):
        raise ConfigError("unknown on_bad_row", value=on_bad_row, allowed="error, reject")
    check_threads(threads)
    limit = parse_bytes(memory_limit)
    if limit < _LEAST_MEMORY_BYTES:
        raise ConfigError("too little memory to work with", value=memory_limit, allowed="1GB or more")
    files = find_sources(
        input, hive_partitioning=config.input.hive_partitioning, file_name=config.input.file_name
    )  # fmt: skip
    nothing: dict[str, Any] = {"derived": (), "labels": (), "dense": (), "categorical": (), "filters": ()}
    every = tuple(column.name for column in config.input.columns)
    raw = config.model_copy(update={**nothing, "sample_weight": None, "ignored": every})
    with tempfile.TemporaryDirectory(prefix="viviane-etl-") as name:
        folder, cores = Path(name), threads or os.cpu_count() or 1
        engine = DuckDbEngine(memory_limit_bytes=limit // 2, threads=cores, spill_folder=folder / "spill")
        try:
            stager = Stager(
                raw, files, folder / "staged", engine, on_bad_row=on_bad_row, learning=False,
                threads=max(1, min(cores, limit >> 27)), shard_bytes=max(8 << 20, min(64 << 20, limit // 24)),
            )  # fmt: skip
            shards = [shard for shard in stager.run() if shard.num_rows]
            if not shards:
                raise DataError("no usable row in the input", where=str(input))
            rows = engine.open([shard.file for shard in shards], pq.read_schema(shards[0].file))
            total = sum(shard.num_rows for shard in shards)
            return [_of_column(column, rows, engine, total) for column in config.input.columns]
        finally:
            engine.close()


def _of_column(column: InputColumn, rows: Any, engine: DuckDbEngine, total: int) -> ColumnStatistics:
    x = rows[column.name]
    of_lists: dict[str, Any] = {"there": x.count()}
    if column.is_list:
        of_lists |= {"shortest": x.length().min(), "longest": x.length().max()}
    found = engine.run(rows.aggregate(**of_lists)).to_pylist()[0]
    values = rows.select(value=x.unnest() if column.is_list else x)
    values = values.filter(values["value"].notnull())
    value = values["value"]
    wanted = {"values": value.count(), "distinct": value.nunique()}
    if column.is_number:
        wanted |= {"mean": value.mean(), "std": value.std(how="pop"), "min": value.min(), "max": value.max()}
    elif column.type == "timestamp":
        wanted |= {"min": value.min().cast("string"), "max": value.max().cast("string")}
    elif column.type == "string":
        wanted |= {"min": value.length().min(), "max": value.length().max()}
    found |= engine.run(values.aggregate(**wanted), in_order=True).to_pylist()[0]
    if column.is_number and found["values"]:
        found["median"] = float(order_statistics(engine, values, [(1, 2)])[0])
    there = found.pop("there")
    kind = f"list of {column.type}" if column.is_list else column.type
    return ColumnStatistics(name=column.name, type=kind, rows=total, missing=total - there, **_plain(found))


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Counts and lengths as int, other numbers as float, whichever of them the engine answers with."""
    wholes = ("values", "distinct", "shortest", "longest")
    return {
        name: value if value is None or isinstance(value, str) else int(value) if name in wholes else float(value)
        for name, value in found.items()
    }

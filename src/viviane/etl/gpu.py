"""A GPU as an engine of the ETL: it counts values and finds their ids, with the output of DuckDB byte for byte.

DuckDB reads, splits, filters and computes what depends on one row, and streams the values of a column to the device in
shards; `viviane.etl.device_counts` counts them there. Whole numbers, times and text are the device's work. Floats stay
with DuckDB, whose rules for NaN and for zeros of two signs they follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import ConfigError, DataError
from viviane.etl.device_counts import SEEDS, Counts, DeviceIndex, SharedHashError, Tally, count_keys, count_texts
from viviane.etl.device_texts import Texts
from viviane.etl.engine import DuckDbEngine, Lookup

SHARD_ROWS: Final = 1 << 18


class GpuEngine(DuckDbEngine):
    """DuckDB, with counting and looking up on a device.

    Args:
        device: such as "cuda" or "cuda:1"; "cpu" computes the same there, for tests.
        memory_limit_bytes, threads, spill_folder: of DuckDB. On the device, the distinct values of one column and
            twice their counts have to fit.

    Raises:
        ConfigError: there is no such device.

    Example:
        >>> engine = GpuEngine(device="cpu")
        >>> engine.lookup(pa.array(["pen", "ink"]))(pa.array(["ink", None, "cup", "pen"])).tolist()
        [1, -1, -1, 0]
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        memory_limit_bytes: int = 1 << 30,
        threads: int = 1,
        spill_folder: Path | None = None,
    ) -> None:
        self.device = _device(device)
        super().__init__(memory_limit_bytes=memory_limit_bytes, threads=threads, spill_folder=spill_folder)

    def count(
        self, values: Any, *, by_value: bool = False, min_count: int = 1, max_values: int | None = None
    ) -> pa.Table:
        """Count values on the device.

        Raises:
            DataError: the distinct values do not fit into the device's memory.
        """
        if not _is_key(values.schema().to_pyarrow().field("value").type):
            return super().count(values, by_value=by_value, min_count=min_count, max_values=max_values)
        with _memory():
            counts, kind = self._counted(self._text(values))
            counts = counts.at_least(min_count)
            if counts.texts is None:
                counts = counts.ordered(by_value=by_value, unsigned=pa.types.is_uint64(kind))
            table = pa.table({"value": _to_arrow(counts, kind), "count": pa.array(counts.counts.cpu().numpy())})
        if counts.texts is not None:
            table = table.sort_by("value" if by_value else [("count", "descending"), ("value", "ascending")])
        return table if max_values is None else table.slice(0, max_values)

    def lookup(self, known: Any) -> Lookup:
        """Return what finds places among known values, whose index stays on the device.

        Raises:
            DataError: the known values do not fit into the device's memory.
        """
        if not _is_key(known.type):
            return super().lookup(known)
        with _memory():
            index = DeviceIndex(_keys(known, self.device))

        def find(values: Any) -> NDArray[np.integer[Any]]:
            with _memory():
                places = index.find(_keys(values.cast(known.type), self.device)).to(torch.int32).cpu().numpy()
            if values.null_count:
                places[pc.is_null(values).to_numpy(zero_copy_only=False)] = -1
            return places

        return find

    def _counted(self, sql: str) -> tuple[Counts, pa.DataType]:
        for seed in SEEDS:
            tally = Tally()
            try:
                kind = self._stream(sql, tally, seed)
                total = tally.total()
            except SharedHashError:
                continue  # two texts of the column have one hash with this seed; another tells them apart
            if total is not None:
                return total, kind
            return count_keys(torch.empty(0, dtype=torch.int64, device=self.device)), kind
        raise SharedHashError("no hash seed distinguishes all texts of a column", fix='choose engine="duckdb"')

    def _stream(self, sql: str, tally: Tally, seed: int) -> pa.DataType:
        try:
            with self._connection.sql(sql).to_arrow_reader(SHARD_ROWS) as shards:
                for shard in shards:
                    keys = _keys(shard.column(0), self.device)
                    tally.add(count_texts(keys, seed) if isinstance(keys, Texts) else count_keys(keys))
                kind: pa.DataType = shards.schema.field(0).type
                return kind
        except (self._error, pa.ArrowException) as error:
            raise self._explain(error) from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "cpu":
            return device
        if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
            return torch.device("cuda", device.index or 0)
    except RuntimeError:  # torch raises it for an unknown device
        pass
    raise ConfigError(
        "no such device here", where="device", value=name, allowed=f"{torch.cuda.device_count()} of cuda, or cpu",
        fix='choose engine="duckdb" (--engine duckdb): the output is the same',
    )  # fmt: skip


def _is_key(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind) for is_kind in (pa.types.is_int64, pa.types.is_uint64, pa.types.is_timestamp, pa.types.is_string)
    )


def _keys(column: Any, device: torch.device) -> Tensor | Texts:
    """Copy a column to the device; the content at missing values is irrelevant."""
    if pa.types.is_string(column.type):
        return Texts.of_arrow(column, device)
    values = column.buffers()[1]
    whole = np.empty(0, np.int64) if values is None else np.frombuffer(values, np.int64)
    return torch.from_numpy(whole[column.offset : column.offset + len(column)].copy()).to(device)


def _to_arrow(counts: Counts, kind: pa.DataType) -> Any:
    if counts.texts is not None:
        return counts.texts.to_arrow()
    return pa.array(counts.keys.cpu().numpy()).view(kind) if not pa.types.is_string(kind) else pa.array([], kind)


@contextmanager
def _memory() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise DataError(
            "the distinct values of a column do not fit into the device's memory", value=str(error).partition(".")[0],
            fix='choose engine="duckdb" (--engine duckdb), which spills to disk: the output is the same',
        ) from error  # fmt: skip

"""Staged rows that are all in memory: values are counted and numbered in one pass over them, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.arrays import array_of, numbers_of, scalar_of
from viviane.etl.columns import RESERVED_PREFIX, CategoricalSpec
from viviane.etl.values import combined
from viviane.schema import RESERVED

IDS: Final = f"{RESERVED_PREFIX}ids:"
"""Begins the name of a staged column that holds the ids of an output column, int32."""

_PROBED_ROWS: Final = 1 << 15
_HASH_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the upper bits of the product are the hash


class Counting(NamedTuple):
    """The columns of a vocabulary, and which of their values it takes."""

    specs: Sequence[CategoricalSpec]
    min_count: int
    max_values: int | None


class HeldRows:
    """The rows of all shards.

    Each column is hashed once: its dictionary is counted by bins, and the order of the counts gives the ids.

    Args:
        tables: a table for each shard.
        training: for each shard, which of its rows are learned from.
    """

    def __init__(self, tables: Sequence[pa.Table], training: Sequence[NDArray[np.bool_]]) -> None:
        self._tables, self._training = list(tables), list(training)
        self._ids: dict[str, list[Any]] = {}  # by output column, for each shard

    def counts(self, wanted: Counting) -> pa.Table:
        """Count the values that columns of one vocabulary have in training rows, as `Engine.count` does."""
        specs = wanted.specs
        columns = [[combined(table.column(spec.sources[0])) for table in self._tables] for spec in specs]
        parts = [one for column in columns for one in column]
        inside = self._training * len(specs)
        listed = any(pa.types.is_list(one.type) for one in parts)
        if listed:
            parts = [_flat(one.filter(pa.array(rows))) for one, rows in zip(parts, inside, strict=True)]
            inside = [np.ones(len(one), np.bool_) for one in parts]
        values, codes = _encoded(combined(pa.chunked_array(parts)), wanted.min_count)
        learned = codes if all(rows.all() for rows in inside) else codes[np.concatenate(inside)]
        numbers = np.bincount(learned, minlength=len(values) + 2)[: len(values)]
        kept = np.flatnonzero(numbers >= max(wanted.min_count, 1))
        table = pa.table({"value": values.take(array_of(kept)), "count": array_of(numbers[kept])})
        order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")])[: wanted.max_values]
        if not listed:
            ids = np.full(len(values) + 2, RESERVED.unknown, np.int32)
            ids[-1] = RESERVED.missing
            ids[kept[numbers_of(order)]] = np.arange(RESERVED.first, RESERVED.first + len(order), dtype=np.int32)
            self._keep(specs, np.split(ids[codes], np.cumsum([len(one) for one in parts])[:-1]))
        return table.take(order)

    def _keep(self, specs: Sequence[CategoricalSpec], ids: Sequence[NDArray[np.int32]]) -> None:
        """Remember the ids of rows: of the first column's shards, of the second's, and so on."""
        each = len(self._tables)
        for number, spec in enumerate(specs):
            self._ids[spec.name] = [array_of(one) for one in ids[number * each : (number + 1) * each]]

    def with_ids(self, shard: int, table: pa.Table) -> pa.Table:
        """Return a shard's table with the ids of the columns whose values were counted."""
        for name, shards in self._ids.items():
            table = table.append_column(IDS + name, shards[shard])
        return table


def counts_of_all(rows: HeldRows, wanted: Mapping[str, Counting], threads: int) -> dict[str, pa.Table]:
    """Count vocabularies on several threads."""
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(rows.counts, wanted.values()), strict=True))


def _encoded(column: Any, min_count: int) -> tuple[Any, NDArray[np.int32]]:
    """Return distinct values of a column, those that occur `min_count` times at least among them, and the place of each
    row's value among them, (B,): their number N stands for any other value, N + 1 for a missing one."""
    rows = _rows_of_frequent(column, min_count)
    encoded = (column if rows is None else column.take(array_of(rows))).dictionary_encode()
    values, indices = encoded.dictionary, encoded.indices
    if indices.null_count:
        indices = pc.fill_null(indices, scalar_of(len(values) + 1, indices.type))
    codes: NDArray[np.int32] = numbers_of(indices)
    if rows is not None:
        found, codes = codes, np.full(len(column), len(values), np.int32)
        codes[rows] = found
        if column.null_count:
            codes[numbers_of(pc.is_null(column))] = len(values) + 1
    return values, codes


def _rows_of_frequent(column: Any, min_count: int) -> NDArray[np.int64] | None:
    """Return rows, those of every value that occurs `min_count` times at least among them; None for all rows.

    A dictionary of mostly rare values is larger than the processor's cache, and so is its hash table. Values are
    counted by hash beforehand: what is in a bucket of fewer than `min_count` rows is rare.
    """
    if min_count <= 1 or not pa.types.is_integer(column.type) or column.type.bit_width != 64:
        return None
    if len(column) <= _PROBED_ROWS or 2 * len(column.slice(0, _PROBED_ROWS).unique()) < _PROBED_ROWS:
        return None
    keys = np.frombuffer(column.buffers()[1], np.uint64, len(column), 8 * column.offset)
    num_bits = len(column).bit_length() - 1
    buckets = ((keys * _HASH_FACTOR) >> np.uint64(64 - num_bits)).view(np.int64)
    counts = np.bincount(buckets, minlength=1 << num_bits)
    rows: NDArray[np.int64] = np.flatnonzero(counts[buckets] >= min_count)
    return rows


def _flat(column: Any) -> Any:
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column

"""Staged rows that are all in memory: values are counted and numbered in one pass over them, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.arrays import array_of, neighbours, numbers_of, scalar_of
from viviane.etl.columns import RESERVED_PREFIX, CategoricalSpec
from viviane.etl.values import combined
from viviane.schema import RESERVED

IDS: Final = f"{RESERVED_PREFIX}ids:"
"""Begins the name of a staged column that holds the ids of an output column, int32."""

_PROBED_ROWS: Final = 1 << 15
_PIECE_ROWS: Final = 1 << 16
_HASH_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the upper bits of the product are the hash


class Counting(NamedTuple):
    """The columns of a vocabulary, and which of their values it takes."""

    specs: Sequence[CategoricalSpec]
    min_count: int
    max_values: int | None


class _Scratch(threading.local):
    """Memory that a thread uses for one column after the other; the kernel would have to clear new memory."""

    def __init__(self) -> None:
        self._numbers = np.empty(0, np.uint64)

    def numbers(self, count: int) -> NDArray[np.uint64]:
        """Return an array of any content."""
        if len(self._numbers) < count:
            self._numbers = np.empty(count, np.uint64)
        return self._numbers[:count]


class HeldRows:
    """The rows of all shards.

    Each column is hashed once: its dictionary is counted by bins, and the order of the counts gives the ids.

    Args:
        tables: a table for each shard.
        training: for each shard, which of its rows are learned from.
    """

    def __init__(self, tables: Sequence[pa.Table], training: Sequence[NDArray[np.bool_]]) -> None:
        self._tables, self._training = list(tables), list(training)
        self._learned = neighbours(np.concatenate(self._training))
        self._ids: dict[str, list[Any]] = {}  # by output column, for each shard
        self._scratch = _Scratch()

    def counts(self, wanted: Counting) -> pa.Table:
        """Count the values that columns of one vocabulary have in training rows, as `Engine.count` does."""
        specs = wanted.specs
        columns = [[table.column(spec.sources[0]) for table in self._tables] for spec in specs]
        parts = [one for column in columns for one in column]
        listed = any(pa.types.is_list(one.type) for one in parts)
        learned: slice | NDArray[np.bool_] = slice(None)
        if listed:
            chosen = zip(parts, self._training * len(specs), strict=True)
            parts = [_flat(combined(one).filter(pa.array(rows))) for one, rows in chosen]
        elif len(specs) == 1:
            learned = self._learned
        else:
            learned = np.tile(np.concatenate(self._training), len(specs))
        values, codes = _encoded(_joined(parts), learned, wanted.min_count, self._scratch)
        numbers = _bincount(numbers_of(codes)[learned], len(values) + 2)[: len(values)]
        kept = np.flatnonzero(numbers >= max(wanted.min_count, 1))
        table = pa.table({"value": values.take(array_of(kept)), "count": array_of(numbers[kept])})
        order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")])[: wanted.max_values]
        if not listed:
            ids = np.full(len(values) + 2, RESERVED.unknown, np.int32)
            ids[-1] = RESERVED.missing
            ids[kept[numbers_of(order)]] = np.arange(RESERVED.first, RESERVED.first + len(order), dtype=np.int32)
            self._keep(specs, array_of(ids).take(codes))
        return table.take(order)

    def _keep(self, specs: Sequence[CategoricalSpec], ids: Any) -> None:
        """Remember the ids of rows: of the first column's shards, of the second's, and so on."""
        start = 0
        for spec in specs:
            self._ids[spec.name] = []
            for table in self._tables:
                self._ids[spec.name].append(ids.slice(start, table.num_rows))
                start += table.num_rows

    def with_ids(self, shard: int, table: pa.Table) -> pa.Table:
        """Return a shard's table with the ids of the columns whose values were counted."""
        for name, shards in self._ids.items():
            table = table.append_column(IDS + name, shards[shard])
        return table


def counts_of_all(rows: HeldRows, wanted: Mapping[str, Counting], threads: int) -> dict[str, pa.Table]:
    """Count vocabularies on several threads."""
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(rows.counts, wanted.values()), strict=True))


def _encoded(column: Any, learned: slice | NDArray[np.bool_], min_count: int, scratch: _Scratch) -> tuple[Any, Any]:
    """Return distinct values of a column and the place of each row's value among them, (B,) int32: their number N
    stands for any other value, N + 1 for a missing one. Values that learned rows have `min_count` times are there."""
    frequent = _frequent(column, learned, min_count, scratch)
    encoded = (column if frequent is None else column.filter(array_of(frequent))).dictionary_encode()
    chunks: list[Any] = encoded.chunks or [pa.nulls(0, column.type).dictionary_encode()]
    values, codes = chunks[0].dictionary, pa.concat_arrays([chunk.indices for chunk in chunks])
    if codes.null_count:
        codes = pc.fill_null(codes, scalar_of(len(values) + 1, codes.type))
    if frequent is None:
        return values, codes
    every = np.full(len(column), len(values), np.int32)
    every[frequent] = numbers_of(codes)
    if column.null_count:
        every[numbers_of(combined(pc.is_null(column)))] = len(values) + 1
    return values, array_of(every)


def _frequent(
    column: Any, learned: slice | NDArray[np.bool_], min_count: int, scratch: _Scratch
) -> NDArray[np.bool_] | None:
    """Return which rows to look at, those of every value that learned rows have `min_count` times among them; None for
    all rows.

    A dictionary of mostly rare values is larger than the processor's cache, and so is its hash table. Values are
    counted by hash beforehand: what is in a bucket of fewer than `min_count` rows is rare.
    """
    if min_count <= 1 or not pa.types.is_integer(column.type) or column.type.bit_width != 64:
        return None
    if len(column) <= _PROBED_ROWS or 2 * len(column.slice(0, _PROBED_ROWS).unique()) < _PROBED_ROWS:
        return None
    num_bits = len(column).bit_length() - 1
    buckets = scratch.numbers(len(column))
    start = 0
    for chunk in (one for one in column.chunks if len(one)):
        keys = np.frombuffer(chunk.buffers()[1], np.uint64, len(chunk), 8 * chunk.offset)
        part = buckets[start : start + len(chunk)]
        np.multiply(keys, _HASH_FACTOR, out=part)
        part >>= np.uint64(64 - num_bits)
        start += len(chunk)
    places = buckets.view(np.int64)
    enough: NDArray[np.bool_] = np.bincount(places[learned], minlength=1 << num_bits) >= min_count
    return enough[places]


def _bincount(places: NDArray[np.int32], length: int) -> NDArray[np.int64]:
    """As `numpy.bincount`, which makes 64-bit numbers of all places at once: in pieces that stay in the cache."""
    counts = np.zeros(length, np.int64)
    step = max(_PIECE_ROWS, 4 * length)
    for start in range(0, len(places), step):
        counts += np.bincount(places[start : start + step], minlength=length)
    return counts


def _joined(columns: Sequence[Any]) -> Any:
    chunks = [chunk for one in columns for chunk in (one.chunks if isinstance(one, pa.ChunkedArray) else [one])]
    return pa.chunked_array(chunks, columns[0].type)


def _flat(column: Any) -> Any:
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column

"""Staged rows that are all in memory: values are counted and numbered by their dictionaries, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.columns import RESERVED_PREFIX, CategoricalSpec
from viviane.etl.values import combined

DICTIONARY: Final = f"{RESERVED_PREFIX}dictionary:"
"""Begins the name of a staged column whose values are also there as a dictionary."""


class Counting(NamedTuple):
    """The columns of a vocabulary, and which of their values it takes."""

    specs: Sequence[CategoricalSpec]
    min_count: int
    max_values: int | None


class HeldRows:
    """The rows of all shards.

    Each column is hashed once: its dictionary is counted by bins, and ids are found for the distinct values only.

    Args:
        tables: a table for each shard.
        training: for each shard, which of its rows are learned from.
    """

    def __init__(self, tables: Sequence[pa.Table], training: Sequence[NDArray[np.bool_]]) -> None:
        self._tables, self._training = list(tables), list(training)
        self._encoded: dict[str, list[Any]] = {}

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
        encoded = combined(pa.chunked_array(parts).dictionary_encode())
        if not listed:
            starts = np.cumsum([0, *map(len, parts)])
            for number, spec in enumerate(specs):
                places = range(number * len(self._tables), (number + 1) * len(self._tables))
                self._encoded[spec.sources[0]] = [encoded.slice(starts[i], len(parts[i])) for i in places]
        values, indices = encoded.dictionary, encoded.indices
        codes = (pc.fill_null(indices, len(values)) if indices.null_count else indices).to_numpy()
        if not all(rows.all() for rows in inside):
            codes = codes[np.concatenate(inside)]
        numbers = np.bincount(codes, minlength=len(values) + 1)[: len(values)]
        kept = np.flatnonzero(numbers >= max(wanted.min_count, 1))
        table = pa.table({"value": values.take(pa.array(kept)), "count": pa.array(numbers[kept])})
        table = table.sort_by([("count", "descending"), ("value", "ascending")])
        return table if wanted.max_values is None else table.slice(0, wanted.max_values)

    def with_dictionaries(self, shard: int, table: pa.Table) -> pa.Table:
        """Return a shard's table, with the columns that were counted once more, as dictionaries."""
        for name, chunks in self._encoded.items():
            table = table.append_column(DICTIONARY + name, chunks[shard])
        return table


def counts_of_all(rows: HeldRows, wanted: Mapping[str, Counting], threads: int) -> dict[str, pa.Table]:
    """Count vocabularies on several threads."""
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(rows.counts, wanted.values()), strict=True))


def _flat(column: Any) -> Any:
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column

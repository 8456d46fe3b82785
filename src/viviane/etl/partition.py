"""Staged rows by part of the output: borders, counts and the training rows, once staging is complete."""

from __future__ import annotations

import copy
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, DataError
from viviane.etl.arrays import array_of, neighbours, numbers_of
from viviane.etl.conditions import Filter
from viviane.etl.config import EtlConfig
from viviane.etl.engine import Engine
from viviane.etl.expressions import kept
from viviane.etl.fitting import order_statistics
from viviane.etl.splits import KEY, FileSplit, HashSplit, RowSplit, Split, TimeSplit, cumulative, share_borders
from viviane.etl.stage import Shard, Stager
from viviane.etl.values import combined


class Partition:
    """Which staged row goes where. Parts are P, shards S.

    Attributes:
        counts: rows of each shard in each part, (S, P); `starts`: rows of each part before each shard, (S, P).
        totals: rows of each part, (P,).
        num_filtered: rows that a filter left out.
    """

    def __init__(
        self,
        config: EtlConfig,
        split: Split | None,
        names: list[str],
        engine: Engine,
        stager: Stager,
        shards: list[Shard],
    ) -> None:
        self.names, self.engine, self.split = names, engine, split
        self._stager, self._shards, self._rows = stager, shards, None
        schema = stager.schema_of(shards[0])
        self.filters = tuple(one for one in config.filters if one.column in schema.names)
        self._kept = partial(_kept, self.filters)
        self.borders = self._borders(sum(shard.num_rows for shard in shards))
        self.counts = np.zeros((len(shards), len(names)), np.int64)
        for number, shard in enumerate(shards):
            if self.needed:
                places = self._places(stager.rows_of(shard, list(self.needed)))
                self.counts[number] = np.bincount(places[places >= 0], minlength=len(names))
            else:
                self.counts[number, 0] = shard.num_rows
        self.totals = self.counts.sum(axis=0)
        self.starts = np.cumsum(self.counts, axis=0) - self.counts
        self.num_filtered = sum(shard.num_rows for shard in shards) - int(self.totals.sum())
        if not self.totals[0]:
            raise DataError(
                "the first part of the split has no rows" if split else "no row is left after the filters",
                value=names[0] or None,
                fix="correct the split or the filters",
            )

    @property
    def rows(self) -> Any:
        """All staged rows, as an ibis table over files, which are written for the first that wants it."""
        if self._rows is None:
            self._stager.flush()
            self.reopen(self._shards)
        return self._rows

    @property
    def training_part(self) -> int:
        """Position of the part named train, else of the first."""
        return self.names.index("train") if "train" in self.names else 0

    def training_rows(self, rows: Any = None) -> Any:
        """The rows of the training part, as an ibis table; of `rows`, if all the rows are in another one."""
        part = self.training_part
        rows = self.rows if rows is None else rows
        if self.split is not None:
            if part > 0:
                rows = rows.filter(rows[KEY] >= self.borders[part - 1])
            if part < len(self.borders):
                rows = rows.filter(rows[KEY] < self.borders[part])
        return rows.filter(kept(self.filters, rows)) if self.filters else rows

    def written_rows(self) -> Any:
        """The rows of every part, as an ibis table."""
        return self.rows.filter(kept(self.filters, self.rows)) if self.filters else self.rows

    @property
    def needed(self) -> tuple[str, ...]:
        """Staged columns that say where a row belongs."""
        return (*dict.fromkeys(one.column for one in self.filters), *([KEY] if self.split else []))

    def is_training(self, staged: pa.Table) -> NDArray[np.bool_]:
        """Whether each staged row is one that is learned from."""
        inside: NDArray[np.bool_] = self._places(staged) == self.training_part
        return inside

    def reopen(self, shards: list[Shard]) -> None:
        """Go on with the same rows in other files, which hold more columns."""
        self._rows = self.engine.open([shard.file for shard in shards], pq.read_schema(shards[0].file))

    def detached(self) -> Partition:
        """Return one without engine and rows, for `parts_of` in another process, which gives it an engine."""
        other = copy.copy(self)
        del other.engine, other._stager, other._rows
        return other

    def parts_of(self, staged: pa.Table) -> list[pa.Table]:
        """Divide a staged table, keeping the order of rows."""
        if self.split is None and not self.filters:
            return [staged]
        places = self._places(staged)
        return [_chosen(staged, places == part) for part in range(len(self.names))]

    def _places(self, staged: pa.Table) -> NDArray[np.int64]:
        """The part of each row, -1 where a filter leaves it out."""
        places = np.zeros(staged.num_rows, np.int64)
        if self.split is not None:
            keys, borders = numbers_of(combined(staged.column(KEY))), np.array(self.borders, np.int64)
            if isinstance(self.split, RowSplit):  # rows are numbered in their order: borders are looked up, not rows
                ends = [*np.searchsorted(keys, borders), len(keys)]
                places = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
            else:
                places = np.searchsorted(borders, keys, side="right")
        if self.filters:
            columns = staged.select(list(dict.fromkeys(one.column for one in self.filters)))
            good = combined(self.engine.evaluate(columns, self._kept).column("kept"))
            places[~good.to_numpy(zero_copy_only=False)] = -1
        return places

    def _borders(self, num_rows: int) -> list[int]:
        split = self.split
        if isinstance(split, HashSplit):
            return share_borders(split)
        if isinstance(split, RowSplit):
            return share_borders(split, num_rows)
        if isinstance(split, FileSplit):
            return list(range(1, len(self.names)))
        if isinstance(split, TimeSplit):
            return self._time_borders(split)
        return []

    def _time_borders(self, split: TimeSplit) -> list[int]:
        if split.parts is not None:
            whole = 1_000_000
            shares = [(round(border * whole), whole) for border in cumulative(split.parts)]
            return [
                int(value) for value in order_statistics(self.engine, self.rows.select(value=self.rows[KEY]), shares)
            ]
        borders = [_moment(value, split.column) for value in (split.starts or {}).values()]
        if borders != sorted(set(borders)):
            raise ConfigError("the starts of a time split must rise", value=str(split.starts))
        return borders


def _chosen(staged: pa.Table, inside: NDArray[np.bool_]) -> pa.Table:
    chosen = neighbours(inside)
    if isinstance(chosen, slice):
        return staged.slice(chosen.start, chosen.stop - chosen.start)
    return staged.filter(array_of(chosen))


def _kept(filters: tuple[Filter, ...], table: Any) -> dict[str, Any]:
    return {"kept": kept(filters, table)}


def _moment(value: int | str, column: str) -> int:
    """A start as the staged column has it: a whole number, or microseconds since 1970 for a written date."""
    if isinstance(value, int):
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigError(
            "a start is neither a whole number nor a date", where=f"column {column!r}", value=value
        ) from None
    return int(np.datetime64(moment.replace(tzinfo=None), "us").astype(np.int64))

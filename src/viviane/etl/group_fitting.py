"""Learn group derivations from the training rows, shard by shard.

The engine finds the distinct keys, out of core; sums are then added up here one row after another, so that they do not
depend on threads, shards or the memory limit. Memory: 8 bytes for each key, statistic and fold; a median sorts the
numbers of as many keys at a time as have `_SORTED_AT_ONCE` of them, and reads the shards once for each such range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from viviane.etl.cells import list_parts
from viviane.etl.columns import LabelSpec
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import CountEncode, GroupDerivation, GroupStatistics, TargetEncode, key_names
from viviane.etl.deriving import key_build, keys_of
from viviane.etl.engine import Build, Engine
from viviane.etl.expressions import exploded, number_of
from viviane.etl.folds import fold_column
from viviane.etl.groups import Groups, encode_targets, medians, place_of
from viviane.etl.parquet import read_columns
from viviane.etl.partition import Partition
from viviane.etl.stage import Shard
from viviane.etl.values import combined

_SORTED_AT_ONCE: Final = 1 << 24  # numbers, 16 bytes each; those of one key are sorted at once, however many

_Numbers = NDArray[np.float64]
_Rows = tuple[pa.Table, NDArray[np.int64]]


class GroupFitter:
    """Learns what the group derivations of a config ask for.

    Args:
        folder: finished ones are kept here, so that an interrupted run resumes.
    """

    def __init__(
        self, config: EtlConfig, partition: Partition, engine: Engine, shards: list[Shard], folder: Path
    ) -> None:
        self.config, self.partition, self.engine, self.shards, self.folder = config, partition, engine, shards, folder

    def run(self, progress: Callable[[int], None]) -> dict[str, Groups]:
        """Learn each, in order; `progress` is called with the number done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Groups] = {}
        wanted = [one for one in self.config.derived if isinstance(one, (CountEncode, GroupStatistics, TargetEncode))]
        for number, one in enumerate(wanted):
            file = self.folder / f"groups-{number:05}.parquet"
            if not file.exists():
                half = file.with_suffix(".tmp")
                pq.write_table(self._learn(one).to_table(folds=True), half)
                half.replace(file)
            found[one.name] = Groups.of_table(read_columns(file))
            progress(number + 1)
        return found

    def _learn(self, one: GroupDerivation) -> Groups:
        names = key_names(one.by)
        rows = self.partition.training_rows()
        kind: Any = pq.read_schema(self.shards[0].file).field(names[0]).type if len(names) == 1 else pa.string()
        kind = kind.value_type if pa.types.is_list(kind) else kind
        values = self.engine.project(exploded(rows, names), key_build(names))
        values = values.filter(values["key"].notnull()).select(value=values["key"])
        table = self.engine.count(values, by_value=True)
        keys = combined(table.column("value").cast(kind))
        keys = keys if isinstance(keys, pa.Array) else pa.array([], kind)
        if isinstance(one, CountEncode):
            count = combined(table.column("count").cast(pa.float64()))
            return Groups(keys, {one.name: np.append(np.asarray(count.to_numpy()), 0.0)})
        if isinstance(one, GroupStatistics):
            return Groups(keys, self._statistics(one, keys))
        values_of: dict[str, _Numbers] = {}
        folds_of: dict[str, _Numbers] = {}
        for column, label in one.targets.items():
            values_of[column], folds_of[column] = self._encoded(one, label, keys)
        return Groups(keys, values_of, folds_of)

    def _training(self, one: GroupDerivation, keys: Any, more: list[str]) -> Iterator[_Rows]:
        """Training rows of each shard, in order, with the place of their key."""
        columns = list(dict.fromkeys([*key_names(one.by), *more, *self.partition.needed]))
        for shard in self.shards:
            staged = read_columns(shard.file, columns=columns)
            if self.partition.needed:
                staged = staged.filter(pa.array(self.partition.is_training(staged)))
            found = keys_of(one.by, staged, self.engine)
            if pa.types.is_list(found.type):  # each value of a list is a row of its own
                offsets, found = list_parts(found)
                staged = staged.take(np.repeat(np.arange(staged.num_rows), np.diff(offsets)))
            yield staged, place_of(found, keys)

    def _statistics(self, one: GroupStatistics, keys: Any) -> dict[str, _Numbers]:
        found: dict[str, _Numbers] = {}
        for of in key_names(one.of):
            every = self._sums(one, keys, of) if set(one.statistics) - {"nunique"} else {}
            if "median" in one.statistics:
                every["median"] = self._medians(one, keys, of, every["count"])
            if "nunique" in one.statistics:
                every["nunique"] = self._distinct(one, keys, of)
            found |= {f"{one.name}_{of}_{statistic}": every[statistic] for statistic in one.statistics}
        return found

    def _sums(self, one: GroupStatistics, keys: Any, of: str) -> dict[str, _Numbers]:
        """The statistics that are added up, one row after another."""
        size = len(keys) + 1
        count, total, spread = np.zeros(size), np.zeros(size), np.zeros(size)
        least, most = np.full(size, np.inf), np.full(size, -np.inf)
        for at, x in self._present(one, keys, of):
            np.add.at(count, at, 1.0)
            np.add.at(total, at, x)
            np.minimum.at(least, at, x)
            np.maximum.at(most, at, x)
        seen = np.where(count > 0, count, np.nan)
        mean = total / seen
        if {"std", "var"} & set(one.statistics):  # squares of differences, in a second pass: nothing cancels
            for at, x in self._present(one, keys, of):
                np.add.at(spread, at, (x - mean[at]) ** 2)
        found = {"count": count, "sum": total, "mean": mean, "std": np.sqrt(spread / seen), "var": spread / seen}
        return found | {"min": np.where(count > 0, least, np.nan), "max": np.where(count > 0, most, np.nan)}

    def _medians(self, one: GroupStatistics, keys: Any, of: str, count: _Numbers) -> _Numbers:
        found = np.full(len(count), np.nan)
        before = np.concatenate([[0.0], np.cumsum(count)])  # numbers of the keys before each
        first = 0
        while before[first] < before[-1]:
            fits = int(np.searchsorted(before, before[first] + _SORTED_AT_ONCE, side="right")) - 1
            end = max(fits, first + 1)
            places, numbers = [], []
            for at, x in self._present(one, keys, of):
                inside = (at >= first) & (at < end)
                places.append(at[inside] - first)
                numbers.append(x[inside])
            found[first:end] = medians(np.concatenate(places), np.concatenate(numbers), end - first)
            first = end
        return found

    def _distinct(self, one: GroupStatistics, keys: Any, of: str) -> _Numbers:
        """Number of distinct values of each key, which the engine counts, out of core."""
        names = key_names(one.by)
        rows = exploded(self.partition.training_rows(), list(dict.fromkeys([*names, of])))
        pairs = self.engine.project(rows, partial(_pair, names, of))
        pairs = pairs.filter(pairs["key"].notnull() & pairs["value"].notnull()).distinct()
        table = self.engine.count(pairs.select(value=pairs["key"]), by_value=True)
        found = np.zeros(len(keys) + 1)
        if table.num_rows:
            places = place_of(combined(table.column("value").cast(keys.type)), keys)
            found[places] = combined(table.column("count")).to_numpy(zero_copy_only=False)
        return found

    def _present(self, one: GroupStatistics, keys: Any, of: str) -> Iterator[tuple[NDArray[np.int64], _Numbers]]:
        """Place of the key and number, of numbers that are there."""
        for staged, places in self._training(one, keys, [of]):
            at, column = places, combined(staged.column(of))
            if pa.types.is_list(column.type):  # each value of a list is a number of the row's key
                offsets, column = list_parts(column)
                at = np.repeat(at, np.diff(offsets))
            column = column.cast(pa.float64(), safe=False)
            good = pc.is_valid(column).to_numpy(zero_copy_only=False) & (at < len(keys))
            yield at[good], pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False)[good]

    def _encoded(self, one: TargetEncode, label: str, keys: Any) -> tuple[_Numbers, _Numbers]:
        """What other rows take, (K + 1,), and what the rows of each fold take, (folds, K + 1)."""
        spec = next(spec for spec in self.config.labels if spec.name == label)
        shape = (one.folds, len(keys) + 1)
        counts, sums = np.zeros(shape), np.zeros(shape)
        num_rows, totals = np.zeros(one.folds), np.zeros(one.folds)
        build = _target_build(spec)
        for staged, at in self._training(one, keys, [spec.source or spec.name, fold_column(one.name)]):
            target = combined(self.engine.evaluate(staged.select([spec.source or spec.name]), build).column("target"))
            y = target.to_numpy(zero_copy_only=False)
            fold = combined(staged.column(fold_column(one.name))).to_numpy(zero_copy_only=False)
            there = pc.is_valid(target).to_numpy(zero_copy_only=False)  # a row without an optional label does not count
            y, fold, places = y[there], fold[there], at[there]
            np.add.at(num_rows, fold, 1.0)
            np.add.at(totals, fold, y)
            np.add.at(counts, (fold, places), 1.0)
            np.add.at(sums, (fold, places), y)
        counts[:, -1], sums[:, -1] = 0.0, 0.0  # a missing key is no group
        every = list(range(one.folds))

        def encoded(folds: list[int]) -> _Numbers:
            # Other folds are added up, never the own one taken off a total: not even its rounding may remain.
            rows = sum(num_rows[fold] for fold in folds)
            prior = one.prior if one.prior is not None else sum(totals[fold] for fold in folds) / rows if rows else 0.0
            return encode_targets(
                np.sum([sums[fold] for fold in folds], axis=0),
                np.sum([counts[fold] for fold in folds], axis=0),
                one.smoothing,
                float(prior),
            )

        return encoded(every), np.stack([encoded([other for other in every if other != fold]) for fold in every])


def _pair(names: tuple[str, ...], of: str, table: Any) -> dict[str, Any]:
    return {**key_build(names)(table), "value": table[of]}


def _target_build(spec: LabelSpec) -> Build:
    return lambda table: {"target": number_of(spec, table[spec.source or spec.name], {}).cast("float64")}

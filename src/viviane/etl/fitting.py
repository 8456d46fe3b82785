"""Learn from staged training rows: statistics of numbers, borders, vocabularies. Every query is an ibis expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from viviane.core.errors import DataError
from viviane.etl.columns import Bucketize, CategoricalSpec, Categorify, OutputSpec
from viviane.etl.config import EtlConfig
from viviane.etl.engine import Engine
from viviane.etl.expressions import exploded, value_of
from viviane.etl.held import Counting, HeldRows, counts_of_all
from viviane.etl.learned import Learned, Vocabulary
from viviane.etl.operators import State, chain
from viviane.etl.parquet import read_columns


class Fitter:
    """Learns what a config asks for.

    Args:
        rows: returns an ibis table of the training rows.
        folder: finished vocabularies are kept here, so that an interrupted run resumes.
        progress: called with the number of columns done.
        counted: the same rows as `rows`, where they are soonest read; used where their order does not matter.
        in_memory: all staged rows, if they are in memory: values that are counted as they are need no expression.
        threads: for counting in memory.
        given: values of vocabularies that are not learned, see `given_vocabularies`.
    """

    def __init__(
        self,
        config: EtlConfig,
        rows: Callable[[], Any],
        engine: Engine,
        folder: Path,
        progress: Callable[[int], None],
        *,
        counted: Callable[[], Any],
        in_memory: HeldRows | None = None,
        threads: int = 1,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.rows, self.engine, self.folder, self.progress = config, rows, engine, folder, progress
        self.counted, self.in_memory, self.given, self.threads = counted, in_memory, given or {}, threads

    def run(self) -> Learned:
        """Learn everything.

        Raises:
            DataError: a column that statistics are wanted of has no value in the training rows.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        states = self._states()
        borders: dict[str, tuple[float, ...]] = {}
        vocabularies: dict[str, Vocabulary] = {}
        tables = list(dict.fromkeys(spec.table for spec in self.config.categorical))
        plain = self._plain_counts(tables)
        for number, table in enumerate(tables):
            specs = [spec for spec in self.config.categorical if spec.table == table]
            encoding = specs[0].encoding
            if isinstance(encoding, Bucketize):
                borders[table] = encoding.borders or self._quantiles(table, specs, encoding.quantiles or 0, states)
            elif table in self.given:
                values = self.given[table]
                vocabularies[table] = Vocabulary(values, pa.array(np.zeros(len(values), np.int64)))
            elif isinstance(encoding, Categorify):
                counts = plain[table] if table in plain else self._counts(specs, encoding, states)
                values, count = (_one(counts.column(name)) for name in ("value", "count"))
                vocabularies[table] = Vocabulary(values, count.cast(pa.int64()))
            self.progress(number + 1)
        return Learned(self.config, states, borders, vocabularies)

    def _states(self) -> dict[str, dict[int, State]]:
        """Statistics of operators, in rounds: an operator's come after those of the operators before it."""
        specs: list[OutputSpec] = [*self.config.labels, *self.config.dense, *self.config.categorical]
        specs += [self.config.sample_weight] if self.config.sample_weight else []
        pending = {
            spec.name: (spec, [at for at, one in enumerate(spec.operators) if one.wanted()])
            for spec in specs
            if any(one.wanted() for one in spec.operators)
        }
        states: dict[str, dict[int, State]] = {name: {} for name in pending}
        while pending:
            scalar = {name: one for name, one in pending.items() if not self._is_list(one[0])}
            every = self.rows()
            found = self._moments(every, {name: (spec, left[0]) for name, (spec, left) in scalar.items()}, states)
            for name, (spec, left) in pending.items():
                if name not in scalar:
                    rows = every.select(**{_source(spec): every[_source(spec)].unnest()})
                    found |= self._moments(rows, {name: (spec, left[0])}, states)
            for name, state in found.items():
                states[name][pending[name][1].pop(0)] = state
            pending = {name: one for name, one in pending.items() if one[1]}
        return states

    def _is_list(self, spec: OutputSpec) -> bool:
        return self.config.column(_source(spec)).is_list

    def _moments(
        self, rows: Any, wanted: dict[str, tuple[OutputSpec, int]], states: dict[str, dict[int, State]]
    ) -> dict[str, State]:
        if not wanted:
            return {}
        names = list(wanted)
        columns = rows.select(
            **{
                f"c{i}": chain(rows[_source(spec)], spec.operators[:at], states[name])
                for i, (name, (spec, at)) in enumerate(wanted.items())
            }
        )
        sums: dict[str, Any] = {}
        for i in range(len(names)):
            x = columns[f"c{i}"]
            sums |= {f"mean{i}": x.mean(), f"std{i}": x.std(how="pop"), f"min{i}": x.min(), f"max{i}": x.max()}
        row = self.engine.run(columns.aggregate(**sums), in_order=True).to_pylist()[0]
        found: dict[str, State] = {}
        for i, (name, (spec, at)) in enumerate(wanted.items()):
            if row[f"mean{i}"] is None:
                raise DataError("no value in the training rows to learn from", where=f"column {name!r}")
            state = {stat: row[f"{stat}{i}"] for stat in ("mean", "std", "min", "max")}
            operator = spec.operators[at]
            if "median" in operator.wanted():
                build = partial(_chained, spec, at, states[name])
                values = self.engine.project(rows.select(_source(spec)), build)
                state["median"] = order_statistics(self.engine, values, [(1, 2)])[0]
            found[name] = {stat: float(state[stat]) for stat in operator.wanted()}
        return found

    def _quantiles(
        self, table: str, specs: Sequence[CategoricalSpec], shares: int, states: dict[str, dict[int, State]]
    ) -> tuple[float, ...]:
        values = order_statistics(self.engine, self._values(specs, states), [(i, shares) for i in range(shares)])
        if not values:
            raise DataError("no value in the training rows to learn borders from", where=f"column {table!r}")
        lowest, *borders = dict.fromkeys(float(value) for value in values)
        return tuple(borders) or (lowest,)

    def _values(self, specs: Sequence[CategoricalSpec], states: dict[str, dict[int, State]]) -> Any:
        """One ibis column `value` with the values of all columns of a vocabulary."""
        parts = []
        for place, spec in enumerate(specs):
            rows = self.engine.pick(self.counted(), spec.sources, place)
            rows = exploded(rows, rows.columns)
            parts.append(self.engine.project(rows, partial(_valued, spec, states.get(spec.name, {}))))
        total = parts[0]
        for part in parts[1:]:
            total = total.union(part)
        return total.filter(total["value"].notnull())

    def _plain_counts(self, tables: Sequence[str]) -> dict[str, pa.Table]:
        """The counts of vocabularies whose values are in memory and need no computation."""
        if self.in_memory is None:
            return {}
        wanted: dict[str, Counting] = {}
        for table in tables:
            specs = [spec for spec in self.config.categorical if spec.table == table]
            encoding = specs[0].encoding
            if isinstance(encoding, Categorify) and all(spec.is_plain for spec in specs):
                wanted[table] = Counting(specs, encoding.min_count, encoding.max_values or None)
        return counts_of_all(self.in_memory, wanted, self.threads)

    def _counts(
        self, specs: Sequence[CategoricalSpec], encoding: Categorify, states: dict[str, dict[int, State]]
    ) -> pa.Table:
        """Values by falling count, ties by value."""
        file = self.folder / f"{list(self.config.categorical).index(specs[0]):05}.parquet"
        if file.exists():
            return read_columns(file)
        values = self._values(specs, states)
        table = self.engine.count(values, min_count=encoding.min_count, max_values=encoding.max_values or None)
        half = file.with_suffix(".tmp")
        pq.write_table(table, half)
        half.replace(file)
        return table


def settle_hotness(config: EtlConfig, written_rows: Callable[[], Any], engine: Engine) -> EtlConfig:
    """Return the config with each hotness "auto" as the one length that a column's lists have, or without it.

    Args:
        written_rows: returns an ibis table of all rows that are written, of every part; missing lists do not count.
    """
    wanted = {spec.name: config.lists_of(spec)[0] for spec in config.categorical if spec.hotness == "auto"}
    if not wanted:
        return config
    rows = written_rows()
    lengths: dict[str, Any] = {}
    for place, name in enumerate(wanted.values()):
        length, there = rows[name].length(), rows[name].notnull()
        lengths |= {f"low{place}": length.min(where=there), f"high{place}": length.max(where=there)}
    row = engine.run(rows.aggregate(**lengths)).to_pylist()[0]
    found: dict[str, int | None] = {}
    for place, name in enumerate(wanted):
        ends = [row[f"{end}{place}"] for end in ("low", "high")]
        limit = next(spec.max_length for spec in config.categorical if spec.name == name)
        ends = [None if end is None else min(end, limit or end) for end in ends]
        found[name] = int(ends[0]) if ends[0] and ends[0] == ends[1] else None
    settled = tuple(
        spec.model_copy(update={"hotness": found[spec.name]}) if spec.name in found else spec
        for spec in config.categorical
    )
    return config.model_copy(update={"categorical": settled})


def drop_low_cardinality(learned: Learned) -> tuple[Learned, list[str]]:
    """Leave out categorical columns of fewer values than `min_cardinality`; returns their names, too.

    Raises:
        DataError: no column is left.
    """
    config = learned.config
    few = [
        spec.name for spec in config.categorical if isinstance(spec.encoding, Categorify)
        and len(learned.vocabularies[spec.table].values) < config.min_cardinality
    ]  # fmt: skip
    if not few:
        return learned, []
    left = tuple(spec for spec in config.categorical if spec.name not in few)
    if not left and not config.dense:
        raise DataError(
            "every column has fewer values than min_cardinality", value=config.min_cardinality,
            fix="lower min_cardinality, or give dense columns",
        )  # fmt: skip
    tables = {spec.table for spec in left}
    return Learned(
        config.model_copy(update={"categorical": left}),
        {name: one for name, one in learned.states.items() if name not in few},
        learned.borders,
        {name: one for name, one in learned.vocabularies.items() if name in tables},
        learned.groups,
        learned.external,
    ), few


def order_statistics(engine: Engine, values: Any, shares: list[tuple[int, int]]) -> list[Any]:
    """Return the value at place floor(n i / k), from 0, of the n sorted values of an ibis column, for each (i, k).

    Values are counted, and the counts summed up in order, so that memory depends on distinct values and can spill.
    """
    import ibis

    values = values.filter(values["value"].notnull())
    counts = values.group_by("value").aggregate(count=values.count())
    window = ibis.cumulative_window(order_by="value")
    upto = counts.mutate(upto=counts["count"].sum().over(window).cast("int64"))
    total = engine.run(values.aggregate(n=values.count())).to_pylist()[0]["n"]
    if not total:
        return []
    wanted = {f"q{i}": upto["value"].min(where=upto["upto"] > total * i0 // k) for i, (i0, k) in enumerate(shares)}
    row = engine.run(upto.aggregate(**wanted)).to_pylist()[0]
    return [row[f"q{i}"] for i in range(len(shares))]


def _chained(spec: OutputSpec, at: int, state: dict[int, State], rows: Any) -> dict[str, Any]:
    return {"value": chain(rows[_source(spec)], spec.operators[:at], state)}


def _valued(spec: CategoricalSpec, state: dict[int, State], rows: Any) -> dict[str, Any]:
    return {"value": value_of(spec, [rows[name] for name in rows.columns], state)}


def _source(spec: OutputSpec) -> str:
    return spec.sources[0] if isinstance(spec, CategoricalSpec) else spec.source or spec.name


def _one(column: Any) -> Any:
    column = column.combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) and column.num_chunks else column

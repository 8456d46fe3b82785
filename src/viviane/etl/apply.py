"""Second pass: staged rows to rows of the data set, with what was learned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.etl.arrays import array_of, numbers_of
from viviane.etl.cells import make_list
from viviane.etl.columns import Bucketize, CategoricalSpec, DenseSpec, HashTo, LabelSpec, OutputSpec, RawIds
from viviane.etl.engine import Build, Engine, Lookup
from viviane.etl.expressions import bucket, value_of
from viviane.etl.held import IDS
from viviane.etl.learned import Learned
from viviane.etl.values import ListShape, combined, hash_values, missing_together, number_column, raw_ids
from viviane.schema import RESERVED


class Applier:
    """Turns staged tables into output tables, row by row and in order.

    Numbers are computed with Arrow, other computed values by the engine, ids are looked up: column by column, on
    several threads.
    """

    def __init__(self, fitted: Learned, engine: Engine, threads: int) -> None:
        self.fitted, self.engine, self.threads = fitted, engine, threads
        self.num_cut: dict[str, int] = {spec.name: 0 for spec in fitted.config.categorical if spec.max_length}
        self._lock = threading.Lock()
        self._builds: dict[Any, Build] = {}
        self._lookups: dict[str, Lookup] = {}

    def table(self, staged: pa.Table, *, keep_ignored: bool = True) -> pa.Table:
        """Return the output columns; labels and the sample weight only where their source is there.

        Raises:
            DataError: a number is still missing, or does not fit float32; names the column.
        """
        columns: dict[str, Any] = {}
        for found in self._each(lambda spec: self._column(spec, staged), self._specs(staged)):
            columns.update(found)
        names = [name for name in self.fitted.schema.column_names if name in columns]
        if keep_ignored:
            for name in self.fitted.config.ignored:
                if name in staged.column_names:
                    columns[name] = staged.column(name)
                    names.append(name)
        table = pa.table({name: columns[name] for name in names})
        fields = [pa.field(f.name, f.type, nullable=f.name in self.fitted.config.ignored) for f in table.schema]
        return table.cast(pa.schema(fields))

    def _each(self, work: Callable[[OutputSpec], dict[str, Any]], specs: list[OutputSpec]) -> Iterable[dict[str, Any]]:
        if self.threads == 1:
            return map(work, specs)
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(work, specs))

    def _specs(self, staged: pa.Table) -> list[OutputSpec]:
        """What is to be computed; of labels, dense columns and the sample weight what is there."""
        config = self.fitted.config
        numbers: list[LabelSpec | DenseSpec] = [*config.labels, *config.dense]
        numbers += [config.sample_weight] if config.sample_weight else []
        there = set(staged.column_names)
        return [*(spec for spec in numbers if (spec.source or spec.name) in there), *config.categorical]

    def _column(self, spec: OutputSpec, staged: pa.Table) -> dict[str, Any]:
        if isinstance(spec, CategoricalSpec):
            return self._ids(spec, staged)
        column = combined(staged.column(spec.source or spec.name))
        if isinstance(spec, DenseSpec) and spec.dim > 1:
            return {spec.name: self._vector(spec, column)}
        return {spec.name: self._checked(spec.name, self._float32(spec, column))}

    def _float32(self, spec: LabelSpec | DenseSpec, values: Any) -> Any:
        numbers = number_column(spec, values, self.fitted.states.get(spec.name, {})).cast(pa.float32(), safe=False)
        return pc.fill_null(numbers, -1.0) if isinstance(spec, LabelSpec) and spec.optional else numbers

    def _vector(self, spec: DenseSpec, lists: Any) -> Any:
        """A list column of dim numbers; a missing list is dim missing numbers."""
        null = pc.is_null(lists).to_numpy(zero_copy_only=False)
        places = np.repeat(np.cumsum(~null) - 1, spec.dim) * spec.dim + np.tile(np.arange(spec.dim), len(lists))
        flat = pc.list_flatten(lists).take(pa.array(places, mask=np.repeat(null, spec.dim)))
        return pa.FixedSizeListArray.from_arrays(self._checked(spec.name, self._float32(spec, flat)), spec.dim)

    def _checked(self, name: str, values: Any) -> Any:
        if values.null_count:
            raise DataError(
                "missing values remain in a column of numbers",
                where=f"column {name!r}",
                value=f"{values.null_count} of {len(values)}",
                fix='begin its operators with {"type": "fill", "value": 0}',
            )
        numbers = numbers_of(values)
        if len(numbers) and not np.isfinite(numbers).all():
            raise DataError(
                "a number does not fit float32", where=f"column {name!r}", fix="clip it, or take its logarithm"
            )
        return values

    def _ids(self, spec: CategoricalSpec, staged: pa.Table) -> dict[str, Any]:
        if staged.schema.get_field_index(IDS + spec.name) >= 0:
            known = combined(staged.column(IDS + spec.name))
            return {spec.name: known if spec.dtype == "int32" else known.cast(pa.int64())}
        columns = [combined(staged.column(name)) for name in spec.sources]
        if spec.kind == "one_hot":
            return {spec.name: self._numbered(spec, columns)}
        columns = missing_together(columns)
        listed = [pa.types.is_list(column.type) for column in columns]
        hotness = spec.hotness if isinstance(spec.hotness, int) else None
        shape = ListShape(columns[listed.index(True)], spec.max_length, spec.keep, hotness or 1)
        if hotness is not None:
            _check_hotness(spec.name, hotness, np.diff(shape.offsets))
        if shape.num_cut:
            with self._lock:
                self.num_cut[spec.name] += shape.num_cut
        ids = self._numbered(
            spec,
            [shape.flat(one) if is_list else shape.spread(one) for one, is_list in zip(columns, listed, strict=True)],
        )
        found = {spec.name: make_list(shape.offsets, ids)}
        if spec.weights:
            flat = shape.flat(combined(staged.column(spec.weights)))
            weights = pc.fill_null(flat.cast(pa.float64()), 1.0).cast(pa.float32(), safe=False)  # a missing bag: [1.0]
            found[spec.weights] = make_list(shape.offsets, self._checked(spec.weights, weights))
        return found

    def _numbered(self, spec: CategoricalSpec, columns: list[Any]) -> Any:
        """Ids of scalar values, (rows,)."""
        values = columns[0]
        if len(columns) > 1 or spec.operators:
            names = [f"value{i}" for i in range(len(columns))]
            build = self._build(("value", spec.name), lambda: partial(_value, spec, self.fitted.states))
            values = combined(self._evaluate(pa.table(dict(zip(names, columns, strict=True))), build).column("value"))
        if isinstance(spec.encoding, RawIds):
            return self._raw(spec, spec.encoding, values)
        dtype = np.int32 if spec.dtype == "int32" else np.int64
        if isinstance(spec.encoding, HashTo):
            codes = _filled(hash_values(values, self._evaluate))
            ids = codes % (spec.encoding.num_ids - RESERVED.first) + RESERVED.first
        elif isinstance(spec.encoding, Bucketize):
            build = self._build(("bucket", spec.name), lambda: partial(_bucket, self.fitted.borders[spec.table]))
            codes = _filled(combined(self._evaluate(pa.table({"value": values}), build).column("bucket")))
            ids = codes + RESERVED.first
        else:
            known = self.fitted.vocabularies[spec.table].values
            ids = self._lookup(spec.table)(values) + RESERVED.first
            others = ids < RESERVED.first
            ids[others] = RESERVED.unknown
            if spec.encoding.unknown_buckets and others.any():
                codes = _filled(hash_values(values.filter(pa.array(others)), self._evaluate))
                ids[others] = codes % spec.encoding.unknown_buckets + RESERVED.first + len(known)
        if values.null_count:
            ids[numbers_of(pc.is_null(values))] = RESERVED.missing
        return array_of(ids.astype(dtype, copy=False))

    def _raw(self, spec: CategoricalSpec, encoding: RawIds, values: Any) -> Any:
        if values.null_count and encoding.missing is None:
            raise DataError(
                "missing values remain in a column of raw ids",
                where=f"column {spec.name!r}",
                value=f"{values.null_count} of {len(values)}",
                fix='set the id they get: "encoding": {"type": "raw", "missing": -1}',
            )
        return pc.fill_null(raw_ids(values, self._evaluate), encoding.missing or 0)

    def _evaluate(self, table: pa.Table, build: Build) -> pa.Table:
        return self.engine.evaluate(table, build)

    def _lookup(self, table: str) -> Lookup:
        with self._lock:
            if table not in self._lookups:
                self._lookups[table] = self.engine.lookup(self.fitted.vocabularies[table].values)
            return self._lookups[table]

    def _build(self, key: Any, make: Any) -> Build:
        """One function object per use, so that the engine plans it once."""
        with self._lock:
            build: Build = self._builds.setdefault(key, make())
            return build


def _check_hotness(name: str, hotness: int, lengths: NDArray[np.int64]) -> None:
    """Lists from a function; those of the raw files are checked while they are read, with file and line."""
    wrong = np.flatnonzero(lengths != hotness)
    if len(wrong):
        raise DataError(
            "a list is not as long as the hotness of its column",
            where=f"column {name!r}, row {wrong[0]} of {len(lengths)} rows read together",
            value=int(lengths[wrong[0]]),
            allowed=str(hotness),
            fix="let the function return lists of that length, or leave out hotness",
        )


def _value(spec: CategoricalSpec, states: Mapping[str, Any], table: Any) -> dict[str, Any]:
    columns = [table[f"value{i}"] for i in range(len(spec.sources))]
    return {"value": value_of(spec, columns, states.get(spec.name, {}))}


def _bucket(borders: tuple[float, ...], table: Any) -> dict[str, Any]:
    return {"bucket": bucket(table["value"], borders)}


def _filled(codes: Any) -> NDArray[Any]:
    filled = pc.fill_null(codes, 0) if codes.null_count else codes
    return np.array(filled.to_numpy(zero_copy_only=False))

"""Values that parsed but are too large for their later use: beyond float32, or no time of the calendar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.cells import BadCell, list_parts, shown
from viviane.etl.columns import CategoricalSpec, LabelSpec
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import DatePart, DifferenceLag, GroupStatistics, Neighbour, key_names
from viviane.etl.engine import Engine
from viviane.etl.operators import Operator, State, chain
from viviane.etl.values import combined

_MOST: Final = float(np.finfo(np.float32).max)
_ORDINARY: Final = 1e30  # operators with numbers up to here make no number beyond float32 of one up to here
_LEAST_STD: Final = 1e-6
_SECONDS: Final = (-62_135_596_800, 253_402_300_799)  # of the years 1 to 9999
_PER_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000}

States = Mapping[str, Mapping[int, State]]


def beyond_limits(table: pa.Table, config: EtlConfig, engine: Engine, states: States | None) -> list[BadCell]:
    """Return the rows of a staged table with a value that is too large.

    Args:
        states: what operators learned, where that is known already: values are looked at after all operators, else up
            to the first one that learns, whose statistics a huge value would spoil.
    """
    specs: list[Any] = [*config.labels, *config.dense, *config.categorical]
    specs += [config.sample_weight] if config.sample_weight else []
    bad: list[BadCell] = []
    there = set(table.column_names)
    for spec in specs:
        is_id = isinstance(spec, CategoricalSpec)
        name = spec.sources[0] if is_id else spec.source or spec.name
        learning = [place for place, one in enumerate(spec.operators) if one.wanted()]
        is_text = isinstance(spec, LabelSpec) and bool(spec.positive)
        if name not in there or is_text or (is_id and not learning):
            continue
        known = dict((states or {}).get(spec.name, {}))
        first = learning[0] if learning and states is None else len(spec.operators)
        bad += _beyond(table, name, engine, spec.operators[:first], known)
    for spec in config.categorical:
        if spec.weights:
            bad += _beyond(table, spec.weights, engine)
    for one in config.derived:
        if isinstance(one, DifferenceLag):
            bad += _beyond(table, one.source, engine, most=_MOST / 2)  # the difference of two has to fit
        elif isinstance(one, (GroupStatistics, Neighbour)):
            for name in key_names(one.of) if isinstance(one, GroupStatistics) else (one.source,):
                if config.column(name).is_number:
                    bad += _beyond(table, name, engine)
        elif isinstance(one, DatePart) and one.unit is not None and one.source in table.column_names:
            bad += _no_times(table, one.source, one.unit)
    return bad


def _beyond(
    table: pa.Table,
    name: str,
    engine: Engine,
    operators: Sequence[Operator] = (),
    states: dict[int, State] | None = None,
    most: float = _MOST,
) -> list[BadCell]:
    if table.schema.get_field_index(name) < 0:  # derived later, or a label that is absent
        return []
    column = combined(table.column(name))
    listed = pa.types.is_list(column.type)
    offsets, values = list_parts(column) if listed else (None, column)
    if not pa.types.is_float64(values.type) or not len(values):
        return []
    # What lies under missing values only makes for a closer look.
    numbers = np.frombuffer(values.buffers()[1], np.float64, len(values), 8 * values.offset)
    largest = max(abs(float(numbers.min())), abs(float(numbers.max())))
    if largest <= _ORDINARY and _ordinary(operators, states or {}):
        return []
    numbers = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)
    if operators:
        chosen, known = tuple(operators), states or {}
        made = engine.evaluate(pa.table({"value": values}), lambda rows: {"value": chain(rows["value"], chosen, known)})
        numbers = pc.fill_null(combined(made.column("value")), 0.0).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~(np.abs(numbers) <= most))
    rows = wrong if offsets is None else np.unique(np.searchsorted(offsets, wrong, side="right") - 1)
    return _cells(rows, name, "a number that does not fit float32", column)


def _ordinary(operators: Sequence[Operator], states: Mapping[int, State]) -> bool:
    """Whether operators make ordinary numbers of ordinary ones."""
    given = _given_numbers(tuple(operators))
    learned = [value for state in states.values() for value in state.values()]
    spread = [state["std"] for state in states.values() if state.get("std")]
    return all(abs(value) <= _ORDINARY for value in given + learned) and all(value >= _LEAST_STD for value in spread)


@cache
def _given_numbers(operators: tuple[Operator, ...]) -> list[float]:
    return [value for one in operators for value in one.to_dict().values() if isinstance(value, (int, float))]


def _no_times(table: pa.Table, name: str, unit: str) -> list[BadCell]:
    column = combined(table.column(name))
    listed = pa.types.is_list(column.type)
    offsets, values = list_parts(column) if listed else (None, column)
    low, high = (edge * _PER_SECOND[unit] for edge in _SECONDS)
    numbers: NDArray[np.int64] = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero((numbers < low) | (numbers > high))
    rows = wrong if offsets is None else np.unique(np.searchsorted(offsets, wrong, side="right") - 1)
    return _cells(rows, name, f"not a time in {unit} since 1970 of the years 1 to 9999", column)


def _cells(rows: NDArray[np.int64], name: str, problem: str, column: Any) -> list[BadCell]:
    return [BadCell(int(row), name, problem, shown(column[int(row)])) for row in rows]

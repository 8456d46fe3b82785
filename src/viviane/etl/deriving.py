"""Derived columns computed: row by row, by the rows before, and by what was learned of a key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.cells import list_parts, make_list
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import (
    Computed,
    CountEncode,
    DatePart,
    DifferenceLag,
    GroupStatistics,
    History,
    Join,
    ListSlice,
    MissingIndicator,
    Names,
    Neighbour,
    TargetEncode,
    ValueMap,
    key_names,
)
from viviane.etl.engine import Build, Engine
from viviane.etl.expressions import crossed, kept
from viviane.etl.external import External, joined
from viviane.etl.folds import fold_column
from viviane.etl.functions import call_function
from viviane.etl.groups import Groups
from viviane.etl.history import HistoryMaker
from viviane.etl.values import combined

ROW: Final = "__row"  # number of a row among all usable rows of the run
_TYPES: Final[dict[str, pa.DataType]] = {"float": pa.float64(), "int": pa.int64(), "string": pa.string()}


def add_row_columns(table: pa.Table, config: EtlConfig, external: External) -> pa.Table:
    """Append the columns of derivations that look at one row only, and at a table beside it."""
    for one in config.derived:
        if isinstance(one, Computed):
            kind: Any = _TYPES[one.result]
            columns = [combined(table.column(name)) for name in one.inputs]
            kind = pa.list_(kind) if one.list else kind
            table = table.append_column(one.name, call_function(one.function, columns, kind, one.name))
        elif isinstance(one, Join):
            table = joined(one, table, external[one.name])
        elif isinstance(one, ListSlice):
            table = table.append_column(one.name, _sliced(one, combined(table.column(one.source))))
        elif isinstance(one, (ValueMap, DatePart, MissingIndicator)):
            source = combined(table.column(one.source))
            table = table.append_column(one.name, _of_rows(one, source))
    return table


def add_earlier(table: pa.Table, config: EtlConfig, engine: Engine) -> pa.Table:
    """Append lags, leads and histories among the rows of a table in memory."""
    for one in config.derived:
        if isinstance(one, History):
            rows = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
            rows = engine.evaluate(rows.select([*dict.fromkeys(one.inputs), ROW]), history_build(one))
            rows = rows.sort_by([(name, "ascending") for name in rows.column_names if name not in ("value", "counts")])
            found = HistoryMaker(one.last, len(key_names(one.by))).add(rows)
            table = table.append_column(one.name, combined(found.sort_by("row").column("value")))
        elif isinstance(one, (DifferenceLag, Neighbour)):
            names = list(dict.fromkeys(one.inputs))
            rows = table.select(names).append_column(ROW, pa.array(np.arange(table.num_rows)))
            found = engine.evaluate(rows, lag_build(one))  # a window may change the order of rows
            order = np.argsort(combined(found.column("row")).to_numpy(zero_copy_only=False))
            table = table.append_column(one.name, combined(found.column("value")).take(pa.array(order)))
    return table


def add_group_columns(
    table: pa.Table,
    config: EtlConfig,
    groups: Mapping[str, Groups],
    engine: Engine,
    training: NDArray[np.bool_] | None = None,
) -> pa.Table:
    """Append what was learned of each row's key.

    Args:
        training: rows of the training part; their target encodings come from the other folds.
    """
    for one in config.derived:
        if one.name in groups:
            assert isinstance(one, (CountEncode, GroupStatistics, TargetEncode))
            folds = None
            if isinstance(one, TargetEncode) and training is not None:
                numbers = combined(table.column(fold_column(one.name))).to_numpy(zero_copy_only=False)
                folds = np.where(training, numbers, -1)
            for name, column in groups[one.name].columns(keys_of(one.by, table, engine), folds).items():
                table = table.append_column(name, column)
    return table


def keys_of(by: Names, table: pa.Table, engine: Engine) -> Any:
    """The key of each row: a column as it is, or one text for the tuple of several; missing if a part is.

    Where a column is a list, a list of keys: one for each of its values, with the row's single values next to it.
    """
    names = key_names(by)
    if len(names) == 1:
        return combined(table.column(names[0]))
    listed = next((name for name in names if pa.types.is_list(table.schema.field(name).type)), None)
    if listed is None:
        return combined(engine.evaluate(table.select(list(names)), key_build(names)).column("key"))
    lists = combined(table.column(listed))
    offsets, flat = list_parts(lists)
    row_of = pa.array(np.repeat(np.arange(len(lists)), np.diff(offsets)))
    parts = {name: flat if name == listed else combined(table.column(name)).take(row_of) for name in names}
    keys = combined(engine.evaluate(pa.table(parts), key_build(names)).column("key"))
    return make_list(offsets, keys, pc.is_null(lists))


@cache
def key_build(names: tuple[str, ...]) -> Build:
    """One function object per key, so that an engine plans it once."""
    return partial(_key, names)


@cache
def lag_build(one: DifferenceLag | Neighbour) -> Build:
    """The same for a lag or lead."""
    return partial(_lag, one)


@cache
def history_build(one: History) -> Build:
    """The same for a history."""
    return partial(_history, one)


def _key(names: tuple[str, ...], table: Any) -> dict[str, Any]:
    return {"key": crossed([table[name] for name in names]) if len(names) > 1 else table[names[0]]}


def _lag(one: DifferenceLag | Neighbour, table: Any) -> dict[str, Any]:
    """Row number and value or difference, as expressions over rows that carry their number."""
    import ibis

    names = key_names(one.by)
    known = table[one.order_by].notnull()
    for name in names:
        known = known & table[name].notnull()
    window = ibis.window(group_by=[*(table[name] for name in names), known], order_by=[table[one.order_by], table[ROW]])
    x = table[one.source]
    if isinstance(one, Neighbour):
        value = (x.lag if one.type == "lag" else x.lead)(one.shift).over(window)
        return {"row": table[ROW], "value": ibis.ifelse(known, value, ibis.null())}  # Spark has no uint64 to cast to
    if x.type().is_integer():
        x = x.cast("decimal(38, 0)")  # exact beyond 2^53, and no overflow
    before = x.lag(one.shift).over(window)
    change = x.delta(before, unit="microsecond").cast("float64") / 1e6 if x.type().is_timestamp() else x - before
    return {"row": table[ROW], "value": ibis.ifelse(known, change.cast("float64"), ibis.null("float64"))}


def _history(one: History, table: Any) -> dict[str, Any]:
    """What `HistoryMaker` reads, in the order in which rows are sorted for it."""
    import ibis

    names = key_names(one.by)
    known = table[one.order_by].notnull()
    for name in names:
        known = known & table[name].notnull()
    counts = known & table[one.source].notnull() & (kept([one.where], table) if one.where else ibis.literal(True))
    keys = {f"key{place}": table[name] for place, name in enumerate(names)}
    moment = {"known": known, **keys, "time": table[one.order_by], "row": table[ROW]}
    return {**moment, "value": table[one.source], "counts": counts}


def _of_rows(one: ValueMap | DatePart | MissingIndicator, column: Any) -> Any:
    """The values of a derivation of one row; of a list column, of each element."""
    if isinstance(one, MissingIndicator) and not one.elements:
        return pc.is_null(column).cast(pa.int64())
    if pa.types.is_list(column.type):
        offsets, flat = list_parts(column)
        return make_list(offsets, _of_values(one, flat), pc.is_null(column))
    return _of_values(one, column)


def _of_values(one: ValueMap | DatePart | MissingIndicator, column: Any) -> Any:
    if isinstance(one, MissingIndicator):
        return pc.is_null(column).cast(pa.int64())
    return _date_part(one, column) if isinstance(one, DatePart) else _mapped(one, column)


def _sliced(one: ListSlice, lists: Any) -> Any:
    """A part of each list, padded; a missing list stays missing."""
    offsets, flat = list_parts(lists)
    lengths = np.diff(offsets)
    first, end = (
        np.clip(np.where(place < 0, lengths + place, place), 0, lengths)
        for place in (np.full(len(lists), one.start), lengths if one.end is None else np.full(len(lists), one.end))
    )
    kept = np.maximum(end - first, 0)
    null = pc.is_null(lists).to_numpy(zero_copy_only=False)
    added = np.where(null, 0, np.maximum((one.pad_to or 0) - kept, 0))
    new = np.concatenate([[0], np.cumsum(kept + added)]).astype(np.int64)
    within = np.arange(new[-1]) - np.repeat(new[:-1], kept + added)  # place in the new list
    within -= np.repeat(added, kept + added) if one.pad_side == "left" else 0
    padding = (within < 0) | (within >= np.repeat(kept, kept + added))
    places = np.repeat(offsets[:-1] + first, kept + added) + within
    values = flat.take(pa.array(np.where(padding, 0, places), mask=padding))
    if one.pad_value is not None:
        values = pc.if_else(pa.array(padding), pa.scalar(one.pad_value, values.type), values)
    return make_list(new, values, pc.is_null(lists))


def _date_part(one: DatePart, times: Any) -> Any:
    if one.unit is not None:
        times = times.cast(pa.timestamp(one.unit))
    if one.part == "weekend":
        return pc.divide(pc.day_of_week(times), 5)  # Saturday 5 and Sunday 6 give 1
    function: Any = pc.day_of_week if one.part == "weekday" else getattr(pc, one.part)
    return function(times).cast(pa.int64())


def _mapped(one: ValueMap, column: Any) -> Any:
    whole = pa.types.is_integer(column.type)
    target: Any = _TYPES[one.result] if one.result else column.type
    old: Any = pa.array([int(text) if whole else text for text in one.values], column.type)
    new: Any = pa.array(list(one.values.values()), target)
    places = pc.index_in(column, value_set=old, skip_nulls=True)
    rest = column if one.others == "keep" else pa.nulls(len(column), target)
    mapped = pc.if_else(pc.is_valid(places), new.take(places), rest)
    if one.missing is None:
        return mapped
    return pc.if_else(pc.is_null(column), pa.scalar(one.missing, target), mapped)

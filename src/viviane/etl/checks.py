"""Rows that parsed but cannot be used (no label, lists whose lengths disagree), and arguments that cannot be."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from viviane.core.errors import ConfigError, expect
from viviane.etl.arrays import array_of, scalar_of
from viviane.etl.cells import BadCell, shown
from viviane.etl.columns import CategoricalSpec
from viviane.etl.config import EtlConfig
from viviane.etl.engine import Engine
from viviane.etl.limits import States, beyond_limits

_MOST_THREADS: Final = 4096


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that no engine takes; None is every core.

    Raises:
        ConfigError: it is no whole number, or out of range.
    """
    if threads is not None:
        expect("threads", threads, int)
        if not 1 <= threads <= _MOST_THREADS:
            raise ConfigError("threads must be at least 1", value=threads, allowed=f"1 to {_MOST_THREADS}")


def unusable_rows(
    table: pa.Table, config: EtlConfig, split_column: str | None, engine: Engine, states: States | None
) -> list[BadCell]:
    """Return the rows of a staged table that cannot be used, with the reason; labels only where the table has them.

    Args:
        engine, states: see `beyond_limits`.
    """
    bad: list[BadCell] = []
    for label in config.labels:
        source = label.source or label.name
        if source in table.column_names:
            column: Any = table.column(source)
            if not label.optional and (not label.operators or label.operators[0].type != "fill"):
                bad += _where(pc.is_null(column), source, "the label is missing", column)
            if label.negative:
                known = pa.array([*label.positive, *label.negative], pa.string())
                wrong: Any = pc.and_(pc.is_valid(column), pc.invert(pc.is_in(column, value_set=known)))
                allowed = ", ".join(map(repr, known.to_pylist()))
                bad += _where(wrong, source, f"a label is none of {allowed}", column)
            elif label.task == "binary" and not label.operators and not label.positive:
                filled: Any = pc.fill_null(column, scalar_of(0, column.type)) if column.null_count else column
                wrong = pc.invert(pc.is_in(filled, value_set=array_of(np.array([0, 1])).cast(column.type)))
                bad += _where(wrong, source, "a binary label is neither 0 nor 1", column)
    for dense in config.dense:
        if dense.dim > 1:
            root = config.list_root(dense.source or dense.name)
            if root is None:  # padded to the dim
                continue
            name, column = root, table.column(root)
            lengths = pc.fill_null(pc.list_value_length(column), dense.dim)
            wrong = pc.not_equal(lengths, pa.scalar(dense.dim, lengths.type))
            bad += _where(wrong, name, f"not {dense.dim} numbers", column)
    for spec in config.categorical:
        if spec.kind != "one_hot":
            bad += _wrong_lengths(table, config, spec)
    weight = config.sample_weight
    if weight is not None and not weight.operators and (weight.source or weight.name) in table.column_names:
        column = table.column(weight.source or weight.name)
        wrong = pc.fill_null(pc.less(column, pa.scalar(0, column.type)), True)
        bad += _where(wrong, weight.source or weight.name, "the sample weight is missing or negative", column)
    if split_column is not None:
        column = table.column(split_column)
        bad += _where(pc.is_null(column), split_column, "the split's column is missing", column)
    return bad + beyond_limits(table, config, engine, states)


def _wrong_lengths(table: pa.Table, config: EtlConfig, spec: CategoricalSpec) -> list[BadCell]:
    """Rows whose lists disagree with their weights, with the lists they are crossed with, or with the hotness."""
    roots = dict.fromkeys(config.list_root(name) for name in config.lists_of(spec))
    names = [name for name in roots if name is not None]  # lists from a function are checked when they are used
    if not names:
        return []
    bad: list[BadCell] = []
    first: Any = table.column(names[0])
    lengths: Any = pc.list_value_length(first)
    if spec.weights:
        column: Any = table.column(spec.weights)
        both = [pc.fill_null(one, -1) for one in (lengths, pc.list_value_length(column))]
        problem = f"not one weight for each value of {names[0]!r}"
        bad += _where(pc.not_equal(*both), spec.weights, problem, column)
        bad += _null_weights(column, spec.weights)
    for name in names[1:]:
        column = table.column(name)
        wrong = pc.fill_null(pc.not_equal(lengths, pc.list_value_length(column)), False)
        bad += _where(wrong, name, f"not as many values as {names[0]!r}, which {spec.name!r} crosses it with", column)
    if isinstance(spec.hotness, int):
        kept: Any = lengths if spec.max_length is None else pc.min_element_wise(lengths, spec.max_length)
        wrong = pc.fill_null(pc.not_equal(kept, pa.scalar(spec.hotness, kept.type)), False)
        bad += _where(wrong, names[0], f"not {spec.hotness} values, the hotness of {spec.name!r}", first)
    return bad


def _null_weights(column: Any, name: str) -> list[BadCell]:
    flat = pc.list_flatten(column)
    if not flat.null_count:
        return []
    parents = pc.list_parent_indices(column).to_numpy()
    rows = np.unique(parents[pc.is_null(flat).to_numpy()])
    return [BadCell(int(row), name, "a weight is missing", shown(column[int(row)])) for row in rows]


def _where(mask: Any, name: str, problem: str, column: Any) -> list[BadCell]:
    if not pc.any(mask).as_py():
        return []
    rows = np.flatnonzero(mask.to_numpy())
    return [BadCell(int(row), name, problem, shown(column[int(row)])) for row in rows]

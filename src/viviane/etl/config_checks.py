"""Checks of the columns of a config against each other: types, lists, what may be derived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from viviane.core.errors import suggest
from viviane.etl.derivations import ROW_DERIVATIONS, History, TargetEncode

if TYPE_CHECKING:
    from viviane.etl.config import CategoricalSpec, DenseSpec, EtlConfig, InputColumn, LabelSpec


def check_derived(config: EtlConfig) -> None:
    """What derived columns may be made of and used for; `EtlConfig.derived_columns` has checked their types.

    Raises:
        ValueError: naming the derived column and what to do.
    """
    derived = config.derived_columns
    labels = {spec.name: spec for spec in config.labels}
    label_columns = {spec.source or spec.name for spec in config.labels}
    raw_only = [*label_columns, *(one.weights for one in config.categorical if one.weights)]
    raw_only += [config.sample_weight.source or config.sample_weight.name] if config.sample_weight else []
    # Of these, lists made value by value from a raw column will do: their lengths are checked there.
    lists = [one.source or one.name for one in config.dense if one.dim > 1]
    lists += [name for one in config.categorical if one.weights for name in config.lists_of(one)]
    raw_only += [name for name in lists if config.list_root(name) is None]
    late = [one for one in config.derived if not isinstance(one, ROW_DERIVATIONS)]
    late_names = {name for one in late for name, _, _ in one.made(config.column)}
    wrong = [name for name in raw_only if name in derived]
    for name in [*wrong, *(one.column for one in config.filters if one.column in late_names)]:
        raise ValueError(f"{name!r} is derived: labels, weights, vectors and filters need input columns here")
    for one in config.derived:
        # Earlier rows may show their labels: a row does not see its own.
        leaking = [] if isinstance(one, History) else sorted(label_columns & set(one.inputs))
        if leaking:
            raise ValueError(f"{one.name!r} would hold the label of column {leaking[0]!r}: use target_encode")
        if isinstance(one, TargetEncode):
            for name in one.targets.values():
                if name not in labels:
                    raise ValueError(f"{one.name!r}: no label {name!r}; {suggest(name, list(labels))}")
                if any(step.wanted() for step in labels[name].operators):
                    raise ValueError(f"{one.name!r}: label {name!r} has an operator that learns: use another label")
            if one.fold_by in label_columns:
                raise ValueError(f"{one.name!r}: folds by the label would show it: use another fold_by")
            if one.fold_by is not None and (one.fold_by in derived or config.column(one.fold_by).is_list):
                raise ValueError(f"{one.name!r}: fold_by {one.fold_by!r} must be a single-valued input column")


def check_number(spec: LabelSpec | DenseSpec, column: InputColumn) -> None:
    """The type of the source of a label or dense column.

    Raises:
        ValueError: naming the column and what it is.
    """
    dim = getattr(spec, "dim", 1)  # a label is one number
    if not column.is_number:
        raise ValueError(f"{spec.name!r} needs numbers, but input column {column.name!r} is of type {column.type}")
    if column.is_list != (dim > 1):
        raise ValueError(f"{spec.name!r} has dim {dim}, but input column {column.name!r} is {_shape(column)}")


def check_categorical(spec: CategoricalSpec, config: EtlConfig) -> None:
    """Types and lists of a categorical column's sources.

    Raises:
        ValueError: naming the column and what to do.
    """
    columns = [config.column(name) for name in spec.sources]
    lists = [column for column in columns if column.is_list]
    if lists and spec.kind == "one_hot":
        raise ValueError(f"{spec.name!r} is one_hot, but input column {lists[0].name!r} is a list: make it multi_hot")
    if spec.kind != "one_hot" and not lists:
        named = f"input column {columns[0].name!r} is" if len(columns) == 1 else "each of its columns is"
        raise ValueError(f"{spec.name!r} is {spec.kind}, but {named} a single value")
    for column in columns:
        if column.type == "timestamp" or (len(columns) > 1 and column.type == "float"):
            raise ValueError(f"{spec.name!r}: ids are not made from {column.type} column {column.name!r} this way")
        if (spec.operators or spec.encoding.type == "bucketize") and not column.is_number:
            raise ValueError(f"{spec.name!r} computes with column {column.name!r}, which is of type {column.type}")
        if spec.encoding.type == "raw" and (spec.operators or column.type == "float"):
            raise ValueError(f"{spec.name!r}: raw ids are whole numbers or texts, without operators")
    if spec.weights and not (config.column(spec.weights).is_list and config.column(spec.weights).is_number):
        raise ValueError(f"weights {spec.weights!r} of {spec.name!r} must be a list of numbers")
    for name in config.lists_of(spec):
        if config.list_root(name) is None and len(lists) > 1:
            raise ValueError(
                f"{spec.name!r} crosses several lists, but how long those of {name!r} are is not known when rows are "
                "read: cross it with single values only"
            )
        if spec.hotness and any(one.name == name and isinstance(one, History) for one in config.derived):
            raise ValueError(f"{spec.name!r} has hotness, but {name!r} is a history, which begins empty: leave it out")


def check_shared(config: EtlConfig) -> None:
    """Columns of one vocabulary have one encoding and type of value.

    Raises:
        ValueError: naming two that differ.
    """
    first: dict[str, CategoricalSpec] = {}
    for spec in config.categorical:
        other = first.setdefault(spec.table, spec)
        if other.encoding != spec.encoding or _value_type(config, other) != _value_type(config, spec):
            raise ValueError(f"{other.name!r} and {spec.name!r} share a vocabulary but differ in type or encoding")


def _value_type(config: EtlConfig, spec: CategoricalSpec) -> str:
    if len(spec.sources) > 1:
        return "string"
    return "float" if spec.operators else config.column(spec.sources[0]).type


def _shape(column: InputColumn) -> str:
    return "a list" if column.is_list else "a single value"

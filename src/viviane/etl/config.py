"""The declarative file: what the raw files hold, what is derived from them, and what is written."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from viviane.config.base import Settings
from viviane.core.errors import suggest
from viviane.etl.columns import CategoricalSpec, DenseSpec, Input, InputColumn, LabelSpec, refuse_repeated
from viviane.etl.conditions import Filter
from viviane.etl.derivations import ELEMENTWISE, ROW_DERIVATIONS, Derivation, History, ListSlice, TargetEncode
from viviane.etl.saved import without


class EtlConfig(Settings):
    """Everything `viviane etl` does to raw files, but where they are.

    Args:
        min_cardinality: a categorical column that is numbered by its values in the training rows (`categorify`) and has
            fewer of them is left out of the data set and of what is fitted.

    Example:
        >>> config = EtlConfig(
        ...     input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
        ...     labels=[{"name": "click"}], categorical=[{"name": "item"}])
        >>> config.categorical[0].encoding.type
        'categorify'
    """

    format: Literal["viviane-etl"] = "viviane-etl"
    version: Literal[1] = 1
    input: Input
    derived: tuple[Derivation, ...] = ()
    labels: tuple[LabelSpec, ...] = ()
    dense: tuple[DenseSpec, ...] = ()
    categorical: tuple[CategoricalSpec, ...] = ()
    sample_weight: DenseSpec | None = None
    ignored: tuple[str, ...] = ()
    filters: tuple[Filter, ...] = ()
    min_cardinality: int = Field(default=0, ge=0)

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "derived", "min_cardinality")

    def column(self, name: str) -> InputColumn:
        """Return a raw or derived column."""
        for column in (*self.input.columns, *self.derived_columns.values()):
            if column.name == name:
                return column
        raise ValueError(_no_column(name, [*self.input.columns, *self.derived_columns.values()]))

    def staged_column(self, name: str) -> InputColumn:
        """Return a column as it is once it is read."""
        return self.column(name).staged

    @cached_property
    def derived_columns(self) -> dict[str, InputColumn]:
        """Columns that derivations make, by name: from raw ones and from what earlier row derivations made."""
        known = {column.name: column.staged for column in self.input.columns}
        made: dict[str, InputColumn] = {}

        def find(name: str) -> InputColumn:
            if name not in known:
                raise ValueError(_no_column(name, list(known.values())))
            return known[name]

        # Stable: row derivations come first, in their order.
        for one in sorted(self.derived, key=lambda one: not isinstance(one, ROW_DERIVATIONS)):
            for name, kind, is_list in one.made(find):
                if name in known or name in made:
                    raise ValueError(f"the derived column {name!r} occurs twice, or is a raw one: rename it")
                made[name] = InputColumn(name=name, type=kind, list=is_list)
                known |= {name: made[name]} if isinstance(one, ROW_DERIVATIONS) else {}
        return made

    def _raw(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.derived_columns]

    def lists_of(self, spec: CategoricalSpec) -> tuple[str, ...]:
        """Those of a categorical column's sources that are lists."""
        return tuple(name for name in spec.sources if self.column(name).is_list)

    def list_root(self, name: str) -> str | None:
        """The raw column whose lists are as long, row by row, as those of a list column; None if no raw column is."""
        name = self._root(name)
        return None if name in self.derived_columns else name

    def padded_length(self, name: str) -> int | None:
        """The length to which the lists of a derived column are padded; None where they are not."""
        root = self._root(name)
        return next((one.pad_to for one in self.derived if isinstance(one, ListSlice) and one.name == root), None)

    def _root(self, name: str) -> str:
        sources = {one.name: one.source for one in self.derived if isinstance(one, ELEMENTWISE)}
        while name in sources:
            name = sources[name]
        return name

    @property
    def label_sources(self) -> frozenset[str]:
        """Raw columns that only labels need: they may be absent when predicting."""
        return frozenset(spec.source or spec.name for spec in self.labels) - frozenset(self.feature_sources)

    @property
    def feature_sources(self) -> tuple[str, ...]:
        """Raw columns that features need, each once."""
        names = [spec.source or spec.name for spec in self.dense]
        for spec in self.categorical:
            names += [*spec.sources, *([spec.weights] if spec.weights else [])]
        names += [name for one in self.derived for name in one.inputs]
        return tuple(dict.fromkeys(self._raw(names)))

    @property
    def fold_sources(self) -> frozenset[str]:
        """Raw columns that only the folds of training rows need."""
        return frozenset(one.fold_by for one in self.derived if isinstance(one, TargetEncode) and one.fold_by)

    @property
    def used(self) -> tuple[InputColumn, ...]:
        """Raw columns that anything needs, in the order of the input."""
        wanted = {*self.feature_sources, *self.label_sources, *self.ignored, *(one.column for one in self.filters)}
        wanted |= {self.sample_weight.source or self.sample_weight.name} if self.sample_weight else set()
        return tuple(column for column in self.input.columns if column.name in wanted)

    @model_validator(mode="after")
    def _check(self) -> EtlConfig:
        specs: list[Any] = [*self.labels, *self.dense, *self.categorical]
        specs += [self.sample_weight] if self.sample_weight else []
        weights = [spec.weights for spec in self.categorical if spec.weights]
        refuse_repeated([spec.name for spec in specs] + weights + list(self.ignored), "output column")
        refuse_repeated([one.name for one in self.derived], "derivation")
        if not self.dense and not self.categorical:
            raise ValueError("nothing to write: give dense or categorical columns")
        numbers: list[LabelSpec | DenseSpec] = [*self.labels, *self.dense]
        for number in numbers + ([self.sample_weight] if self.sample_weight else []):
            _check_number(number, self.column(number.source or number.name))
        for spec in self.categorical:
            _check_categorical(spec, self)
        for name in [*self.ignored, *(one.column for one in self.filters)]:
            self.column(name)
        _check_shared(self)
        _check_derived(self)
        return self


def _no_column(name: str, known: list[InputColumn]) -> str:
    return f"no input column {name!r}; {suggest(name, [column.name for column in known])}"


def _check_leaks(config: EtlConfig, label_columns: set[str]) -> None:
    """Refuse features that would hold the label of their own row.

    Raises:
        ValueError: naming the feature and the column of the label.
    """
    for spec in config.dense:
        if (spec.source or spec.name) in label_columns:
            raise ValueError(f"feature {spec.name!r} would hold the label of column {spec.source or spec.name!r}")
    for feature in config.categorical:
        if leaking := sorted(label_columns & {*feature.sources, feature.weights}):
            raise ValueError(f"feature {feature.name!r} would hold the label of column {leaking[0]!r}")
    for one in config.derived:
        # A history may list labels or choose by them: earlier rows show theirs, and a row does not see its own.
        inputs = {*one.keys, one.order_by} if isinstance(one, History) else set(one.inputs)
        if leaking := sorted(label_columns & inputs):
            fix = "history can list labels of earlier rows" if isinstance(one, History) else "use target_encode"
            raise ValueError(f"{one.name!r} would hold the label of column {leaking[0]!r}: {fix}")


def _check_derived(config: EtlConfig) -> None:
    """What derived columns may be made of and used for; `EtlConfig.derived_columns` has checked their types.

    Raises:
        ValueError: naming the derived column and what to do.
    """
    derived = config.derived_columns
    labels = {spec.name: spec for spec in config.labels}
    label_columns = {spec.source or spec.name for spec in config.labels}
    raw_only = [*label_columns, *(one.weights for one in config.categorical if one.weights)]
    raw_only += [config.sample_weight.source or config.sample_weight.name] if config.sample_weight else []
    # Of these, lists made value by value from a raw column will do: their lengths are checked there. So will padded
    # ones as vectors.
    vectors = [(one.source or one.name, one.dim) for one in config.dense if one.dim > 1]
    lists = [name for name, dim in vectors if config.padded_length(name) != dim]
    lists += [name for one in config.categorical if one.weights for name in config.lists_of(one)]
    raw_only += [name for name in lists if config.list_root(name) is None]
    late = [one for one in config.derived if not isinstance(one, ROW_DERIVATIONS)]
    late_names = {name for one in late for name, _, _ in one.made(config.staged_column)}
    wrong = [name for name in raw_only if name in derived]
    for name in [*wrong, *(one.column for one in config.filters if one.column in late_names)]:
        raise ValueError(f"{name!r} is derived: labels, weights, vectors and filters need input columns here")
    _check_leaks(config, label_columns)
    for one in config.derived:
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


def _check_number(spec: LabelSpec | DenseSpec, column: InputColumn) -> None:
    """The type of the source of a label or dense column.

    Raises:
        ValueError: naming the column and what it is.
    """
    if isinstance(spec, LabelSpec) and spec.positive:
        if column.type != "string" or column.is_list:
            fix = "leave out positive; a threshold makes a number a label"
            raise ValueError(f"{spec.name!r} is a label of text, but column {column.name!r} is {column.type}: {fix}")
        return
    dim = getattr(spec, "dim", 1)  # a label is one number
    if not column.is_number:
        fix = '; for a label of text give "positive"' if isinstance(spec, LabelSpec) and column.type == "string" else ""
        found = f"input column {column.name!r} is of type {column.type}"
        raise ValueError(f"{spec.name!r} needs numbers, but {found}{fix}")
    if column.is_list != (dim > 1):
        raise ValueError(f"{spec.name!r} has dim {dim}, but input column {column.name!r} is {_shape(column)}")


def _check_categorical(spec: CategoricalSpec, config: EtlConfig) -> None:
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
        if spec.encoding.type == "vocabulary" and (len(columns) > 1 or spec.operators or column.type == "float"):
            raise ValueError(
                f"{spec.name!r}: a vocabulary is given of one column of texts or whole numbers, no operators"
            )
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


def _check_shared(config: EtlConfig) -> None:
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

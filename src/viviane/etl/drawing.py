"""An ETL as a graph: what is read, what is made of it, the content of the data set; drawn as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from viviane.core.graph_drawing import Box, draw_graph
from viviane.etl.columns import CategoricalSpec, Categorify, DenseSpec, InputColumn, LabelSpec, OutputSpec
from viviane.etl.conditions import Filter
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import Computed, History, TargetEncode, key_names
from viviane.etl.learned import Learned
from viviane.etl.sequence_config import SESSION, SequenceColumn, SequenceConfig
from viviane.schema import RESERVED

_LONGEST: Final = 46  # characters of a line in a box
_QUIET: Final = ("type", "name", "source", "by", "order_by")


def picture(what: EtlConfig | Learned | SequenceConfig) -> str:
    """Draw an ETL: input columns above, derived ones, operators and encodings, the data set below.

    Columns that are treated alike share a box. A fitted ETL shows how many ids each column has, and what operators
    learned. The last box holds the file format, its version and the reserved ids.

    Returns:
        an <svg> element that works on its own or inside a page.

    Example:
        >>> config = EtlConfig(
        ...     input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
        ...     labels=[{"name": "click"}], categorical=[{"name": "item"}])
        >>> "categorify" in picture(config)
        True
    """
    if isinstance(what, SequenceConfig):
        return _sequences(what)
    learned = what if isinstance(what, Learned) else None
    config = learned.config if learned else what
    assert isinstance(config, EtlConfig)
    return draw_graph(*_Drawing(config, learned).graph(), "graph of the ETL")


@dataclass(frozen=True)
class _Group:
    """Output columns that are treated alike."""

    specs: tuple[OutputSpec, ...]
    lines: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"out:{self.specs[0].name}"


class _Drawing:
    def __init__(self, config: EtlConfig, learned: Learned | None) -> None:
        self.config, self.learned = config, learned
        self.boxes: dict[str, Box] = {}
        self.edges: list[tuple[str, str]] = []

    def graph(self) -> tuple[dict[str, Box], list[tuple[str, str]]]:
        """Return boxes and edges."""
        groups = self._groups()
        places = self._inputs(groups)
        for one in self.config.derived:
            made = [name for name, names in self._made().items() if names == one.name]
            box = f"derived:{one.name}"
            self.boxes[box] = Box("layer", _lines(made, one.type, *_settings(one)))
            places |= dict.fromkeys(made, box)
            label = (
                [_label(self.config, name) for name in one.targets.values()] if isinstance(one, TargetEncode) else []
            )
            self._wire([*one.inputs, *label], box, places)
        for group in groups:
            kind = "table" if isinstance(group.specs[0], CategoricalSpec) else "layer"
            self.boxes[group.key] = Box(kind, _lines([spec.name for spec in group.specs], *group.lines))
            self._wire([name for spec in group.specs for name in _sources(spec)], group.key, places)
            self.edges.append((group.key, "data"))
        self.boxes["data"] = Box("loss", self._data())
        for name in self.config.ignored:
            self._wire([name], "data", places)
        return self.boxes, list(dict.fromkeys(self.edges))

    def _made(self) -> dict[str, str]:
        """Name of the derivation by derived column."""
        return {name: one.name for one in self.config.derived for name, _, _ in one.made(self.config.staged_column)}

    def _groups(self) -> list[_Group]:
        config = self.config
        specs: list[OutputSpec] = [*config.labels, *config.dense, *config.categorical]
        specs += [config.sample_weight] if config.sample_weight else []
        alike: dict[Any, list[OutputSpec]] = {}
        for spec in specs:
            single = any(name in config.derived_columns for name in _sources(spec)) or len(_sources(spec)) > 1
            types = tuple(config.column(name).type for name in _sources(spec))
            alike.setdefault((spec.name if single else "", type(spec), _describe(spec, {}), types), []).append(spec)
        return [_Group(tuple(members), self._lines(members)) for members in alike.values()]

    def _lines(self, members: list[OutputSpec]) -> tuple[str, ...]:
        """What is done with columns; what was learned of one alone, or the sizes of several together."""
        if self.learned is None:
            return _describe(members[0], {})
        states = self.learned.states.get(members[0].name, {}) if len(members) == 1 else {}
        sizes = {one.table: self.learned.num_ids(one) for one in members if isinstance(one, CategoricalSpec)}
        total = sum(size or 0 for size in sizes.values())
        ids = (f"{total:,} ids" + (" together" if len(sizes) > 1 else ""),) if total else ()
        return (*_describe(members[0], states), *ids)

    def _inputs(self, groups: Sequence[_Group]) -> dict[str, str]:
        """Draw the input columns, those that only one group of outputs reads in one box; returns the box of each."""
        readers: dict[str, set[str]] = {}
        for group in groups:
            for spec in group.specs:
                for name in _sources(spec):
                    readers.setdefault(name, set()).add(group.key)
        for one in self.config.derived:
            for name in one.inputs:
                readers.setdefault(name, set()).add(f"derived:{one.name}")
        for name in self.config.ignored:
            readers.setdefault(name, set()).add("data")
        together: dict[Any, list[InputColumn]] = {}
        for column in self.config.used:
            reader = sorted(readers.get(column.name, ()))
            alike = (tuple(reader), column.type, column.is_list) if len(reader) == 1 else (column.name,)
            together.setdefault(alike, []).append(column)
        places: dict[str, str] = {}
        for columns in together.values():
            box = f"in:{columns[0].name}"
            kind = f"list of {columns[0].type}" if columns[0].is_list else columns[0].type
            names = [column.name for column in columns]
            filters = [_condition(one) for one in self.config.filters if one.column in names]
            self.boxes[box] = Box("input", _lines(names, kind, *(f"keep {text}" for text in filters)))
            places |= dict.fromkeys(names, box)
        return places

    def _wire(self, names: Sequence[str], to: str, places: dict[str, str]) -> None:
        self.edges += [(places[name], to) for name in names if places.get(name, to) != to]

    def _data(self) -> tuple[str, ...]:
        config = self.config
        counts = ((len(config.labels), "label"), (len(config.dense), "dense"), (len(config.categorical), "categorical"))
        lines = ["data set", ", ".join(f"{num} {what}" for num, what in counts if num)]
        if any(isinstance(one.encoding, Categorify) or one.encoding.type != "raw" for one in config.categorical):
            ids = f"{RESERVED.padding} padding, {RESERVED.missing} missing, {RESERVED.unknown} unknown"
            lines.append(f"ids: {ids}, values from {RESERVED.first}")
        return (*lines, f"{config.format}, version {config.version}" + (", fitted" if self.learned else ""))


def _describe(spec: OutputSpec, states: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
    """A line for each operator, with what it learned, and one for the encoding."""
    lines = []
    for position, one in enumerate(spec.operators):
        learned = ", ".join(f"{name} {value:.4g}" for name, value in states.get(position, {}).items())
        lines.append(" ".join([one.type, *_settings(one)]) + (f" ({learned})" if learned else ""))
    if isinstance(spec, LabelSpec):
        texts = f" where {' or '.join(spec.positive)}" if spec.positive else ""
        return (*lines, f"label, {spec.task}{texts}" + (", optional" if spec.optional else ""))
    if isinstance(spec, DenseSpec):
        return (*lines, "dense" if spec.dim == 1 else f"dense, {spec.dim} numbers")
    cross = "cross, " if len(spec.sources) > 1 else ""
    lines.append(" ".join([cross + spec.encoding.type, *_settings(spec.encoding)]))
    if spec.kind != "one_hot":
        kind = f"{spec.kind}, the {spec.keep} {spec.max_length}" if spec.max_length else spec.kind
        lines.append(kind + (f", hotness {spec.hotness}" if spec.hotness else ""))
    return (*lines, *([f"vocabulary {spec.vocabulary}"] if spec.vocabulary else []))


def _sequences(config: SequenceConfig) -> str:
    boxes: dict[str, Box] = {}
    edges: list[tuple[str, str]] = []
    for column in config.input.columns:
        readers = [one for one in config.columns if column.name in (one.column, one.where.column if one.where else "")]
        if (
            readers
            or column.name in (*config.keys, config.order_by)
            or any(column.name == f.column for f in config.filters)
        ):
            filters = [f"keep {_condition(one)}" for one in config.filters if one.column == column.name]
            boxes[f"in:{column.name}"] = Box("input", _lines([column.name], column.type, *filters))
            edges.append((f"in:{column.name}", "groups"))
    gap = [f"a pause above {config.gap:g} begins another"] if config.gap is not None else []
    least = [f"{config.min_rows} rows or more"] if config.min_rows > 1 else []
    keys = ", ".join(config.keys)
    boxes["groups"] = Box("layer", _lines([f"rows of one {keys}"], f"in order of {config.order_by}", *gap, *least))
    for one in config.columns:
        boxes[f"out:{one.name}"] = Box("table", _lines([one.name], *_taken(one)))
        edges += [("groups", f"out:{one.name}"), (f"out:{one.name}", "rows")]
    names = [*config.keys, *([SESSION] if gap else []), *(one.name for one in config.columns)]
    what = "one row a session" if gap else f"one row a {keys}"
    boxes["rows"] = Box(
        "loss", _lines(["Parquet"], what, ", ".join(names), f"{config.format}, version {config.version}")
    )
    return draw_graph(boxes, edges, "graph of rows to sequences")


def _taken(one: SequenceColumn) -> list[str]:
    if one.take is not None:
        lines = [f"{one.take} of {one.column}"]
    else:
        end = f"first {one.first}" if one.first is not None else f"last {one.last}"
        lines = [f"{end} of {one.column}" + (f", {one.skip} skipped" if one.skip else "")]
    return lines + ([f"where {_condition(one.where)}"] if one.where else [])


def _sources(spec: OutputSpec) -> tuple[str, ...]:
    if isinstance(spec, CategoricalSpec):
        return (*spec.sources, *([spec.weights] if spec.weights else []))
    return (spec.source or spec.name,)


def _label(config: EtlConfig, name: str) -> str:
    spec = next(one for one in config.labels if one.name == name)
    return spec.source or spec.name


def _condition(one: Filter) -> str:
    value = list(one.value) if isinstance(one.value, tuple) else one.value
    return f"{one.column} {one.keep}" + ("" if value is None else f" {_plain(value)}")


def _settings(one: Any) -> list[str]:
    """What a person would want to read of some settings: those that are not as usual, in words."""
    if isinstance(one, Computed):
        return [one.function]
    usual = {name: setting.default for name, setting in type(one).model_fields.items()}
    given = {name: getattr(one, name) for name in usual if name not in _QUIET and getattr(one, name) != usual[name]}
    shown = [f"by {', '.join(key_names(one.by))}"] if hasattr(one, "by") else []
    shown += [f"in order of {one.order_by}"] if hasattr(one, "order_by") else []
    if isinstance(one, History) and one.where is not None:
        given["where"] = _condition(one.where)
    for name, value in given.items():
        if value is not None:
            text = f"{len(value)} of them" if isinstance(value, (tuple, dict)) and len(value) > 4 else _plain(value)
            shown.append(f"{name} {text}")
    return shown


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{old}: {_plain(new)}" for old, new in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(_plain(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _lines(names: Sequence[str], *more: str) -> tuple[str, ...]:
    """A box's lines: several names in one, such as "C1 ... C26 (26)", and nothing too long."""
    title = ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)})"
    return tuple(line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…" for line in (title, *more))

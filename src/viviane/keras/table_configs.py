"""Features and tables as users give them: keras-rs's or Viviane's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableConfig
from viviane.embedding.dynamic_config import AnyTable
from viviane.keras.initializers import get_initializer, is_own, save_initializer
from viviane.keras.optimizers import Rule, rule_of


@dataclass(frozen=True)
class Feature:
    """A feature of a `DistributedEmbedding`.

    Args:
        name: of its input and output.
        table: settings of its table.
        combiner: "mean", "sum" or "sqrtn".
        length: keys of a row; None for one that is not pooled.
        initializer: Keras', which draws the whole table, or None where the table's settings say it.
    """

    name: str
    table: AnyTable
    combiner: str
    length: int | None
    initializer: Any = None


def features_of(
    names: Sequence[str], given: Sequence[Any], tables: Sequence[AnyTable], lengths: Mapping[str, int], optimizer: Any
) -> tuple[list[Feature], Rule]:
    """Return the features of a layer, and the rule of its tables.

    Args:
        names: of inputs and outputs.
        given: FeatureConfig of keras-rs or of Viviane, or `Feature`.
        tables: Viviane's, for Viviane's features.
        lengths: keys of a row, by name, for Viviane's features.
        optimizer: of all tables; None takes that of keras-rs's tables.
    """
    if not given:
        raise ConfigError("a DistributedEmbedding needs at least one feature")
    if all(isinstance(one, Feature) for one in given):
        return list(given), rule_of(optimizer, "DistributedEmbedding")
    if all(isinstance(one, FeatureConfig) for one in given):
        return _own(names, given, tables, lengths), rule_of(optimizer, "DistributedEmbedding")
    if any(not hasattr(one, "input_shape") or not hasattr(one.table, "vocabulary_size") for one in given):
        raise ConfigError(
            "features are all of keras-rs or all of Viviane", value=", ".join({type(one).__name__ for one in given}),
            allowed="keras_rs.layers.FeatureConfig, viviane.FeatureConfig with tables=[...]",
        )  # fmt: skip
    return _of_keras_rs(names, given, optimizer)


def _own(
    names: Sequence[str], given: Sequence[FeatureConfig], tables: Sequence[AnyTable], lengths: Mapping[str, int]
) -> list[Feature]:
    by_name = {table.name: table for table in tables}
    features = []
    for name, one in zip(names, given, strict=True):
        if one.table not in by_name:
            raise ConfigError(
                "no such table", where=f"feature {name!r}", value=one.table, fix=suggest(one.table, by_name)
            )
        if one.combiner == "concat":
            raise ConfigError("keys are pooled here", where=f"feature {name!r}", value="concat",
                              allowed="'sum', 'mean'", fix="use viviane.keras.Embedding")  # fmt: skip
        features.append(Feature(name, by_name[one.table], one.combiner, lengths.get(name)))
    return features


def _of_keras_rs(names: Sequence[str], given: Sequence[Any], optimizer: Any) -> tuple[list[Feature], Rule]:
    configs = {id(one.table): one.table for one in given}
    own = {config.name for config in configs.values()}
    if len(own) < len(configs):
        raise ConfigError("two tables of one name", value=", ".join(config.name for config in configs.values()))
    rules = {
        key: rule_of(config.optimizer if optimizer is None else optimizer, f"table {config.name!r}")
        for key, config in configs.items()
    }
    rates = {rule.rate if not callable(rule.rate) else id(rule.rate) for rule in rules.values()}
    first = next(iter(rules.values()))
    if len(rates) > 1 and any(callable(rule.rate) for rule in rules.values()):
        raise ConfigError("tables with different schedules", fix="give the layer one optimizer, or make two layers")
    tables = {}
    for key, config in configs.items():
        settings = rules[key].settings
        if len(rates) > 1:
            settings = settings.model_copy(update={"lr": rules[key].rate})
        init = config.initializer
        tables[key] = TableConfig(
            name=config.name, num_rows=config.vocabulary_size, dim=config.embedding_dim, optimizer=settings,
            init=init if is_own(init) else "zero",
        )  # fmt: skip
    features = []
    for name, one in zip(names, given, strict=True):
        init = None if is_own(one.table.initializer) else keras.initializers.get(one.table.initializer)
        features.append(Feature(name, tables[id(one.table)], one.table.combiner, _length(one, name), init))
    return features, first


def _length(feature: Any, name: str) -> int | None:
    shape = tuple(feature.input_shape)
    if len(shape) == 1:
        return None
    if len(shape) != 2 or shape[1] is None:
        raise ConfigError("the input shape is (B,) or (B, L)", where=f"feature {name!r}", value=str(shape))
    return int(shape[1])


def save_feature(feature: Feature) -> dict[str, Any]:
    """Return a feature as plain data."""
    return {
        "name": feature.name,
        "table": feature.table.model_dump(mode="json"),
        "dynamic": isinstance(feature.table, DynamicTableConfig),
        "combiner": feature.combiner,
        "length": feature.length,
        "initializer": None if feature.initializer is None else save_initializer(feature.initializer),
    }


def load_feature(data: Mapping[str, Any]) -> Feature:
    """Return what `save_feature` wrote."""
    kind = DynamicTableConfig if data["dynamic"] else TableConfig
    initializer = None if data["initializer"] is None else get_initializer(data["initializer"])
    return Feature(data["name"], kind(**data["table"]), data["combiner"], data["length"], initializer)

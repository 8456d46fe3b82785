"""The layer `DistributedEmbedding`: many features of many tables in one lookup.

Shapes: B rows of the batch, L keys of a feature in each row, D the width of a feature's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np
import torch

from viviane.batch import Batch
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableCollection
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.external import KeyColumns
from viviane.embedding.whole_keys import array_keys
from viviane.keras.backends import backend_of
from viviane.keras.keys import checked_keys, host_keys, key_type
from viviane.keras.layer import Held, TableLayer
from viviane.keras.optimizers import Rule, for_dynamic, load_optimizer, save_optimizer
from viviane.keras.table_configs import Feature, features_of, load_feature, save_feature

_JOINED: Final = "keys of all features"
"""The name under which the keys of all features, joined already, go through Keras as one input."""


@keras.saving.register_keras_serializable(package="viviane")
class DistributedEmbedding(TableLayer):
    """Many features in one lookup and one update; over several processes each has a part of the tables.

    It takes what `keras_rs.layers.DistributedEmbedding` takes: a `FeatureConfig` of keras-rs for each feature, which
    names its `TableConfig`; or Viviane's `FeatureConfig`s with `tables`.

    Args:
        feature_configs: by name, or a list. Of keras-rs, placement and limits of ids per partition have no effect here.
        tables: Viviane's TableConfig and DynamicTableConfig, for Viviane's features.
        lengths: for Viviane's features, the number of keys of a row, by feature; 1 where left out.
        optimizer: as of `Embedding`; None takes that of keras-rs's tables.
        key_dtype: "int32" or "int64"; None: int64 where a table is dynamic, else int32.
        seed: of Viviane's initializers and of rounding.
        plan: of tables over several processes: kinds by table, or a whole plan; None chooses.

    Inputs: keys by feature, each (B,) or (B, L), in the structure of `feature_configs`; weights (B, L) likewise.
    Outputs: by feature, (B, D).

    Example:
        >>> from viviane import SGD, FeatureConfig, TableConfig
        >>> item = TableConfig(name="item", num_rows=9, dim=2, init={"type": "constant", "value": 1.0})
        >>> seen = FeatureConfig(name="seen", table="item", combiner="sum")
        >>> layer = DistributedEmbedding([seen], tables=[item], lengths={"seen": 3}, optimizer=SGD(lr=0.1))
        >>> keras.ops.convert_to_numpy(layer({"seen": np.array([[1, 2, 3]])})["seen"]).tolist()
        [[3.0, 3.0]]
    """

    def __init__(
        self,
        feature_configs: Mapping[str, Any] | Sequence[Any],
        *,
        tables: Sequence[AnyTable] = (),
        lengths: Mapping[str, int] | None = None,
        optimizer: Any = None,
        key_dtype: str | None = None,
        seed: int = 0,
        plan: Any = None,
        table_stacking: Any = "auto",
        **options: Any,
    ) -> None:
        is_list = not isinstance(feature_configs, Mapping)
        given = list(feature_configs) if is_list else list(feature_configs.values())  # type: ignore[union-attr]
        names = [one.name for one in given] if is_list else list(feature_configs)
        features, rules = features_of(names, given, tables, lengths or {}, optimizer)
        super().__init__(optimizer=None, seed=seed, plan=plan, **options)
        del table_stacking  # how keras-rs groups tables on a TPU; one storage holds all tables of a width here
        self.held = Held(optimizer)
        self.rule = rules
        self.features: tuple[Feature, ...] = tuple(features)
        self._lengths = {one.name: one.length for one in features}
        self._dims = {one.name: one.table.dim for one in features}
        self.returns_list = is_list and all(not isinstance(one, FeatureConfig) for one in given)
        is_dynamic = any(isinstance(one.table, DynamicTableConfig) for one in self.features)
        self.key_dtype = key_type(key_dtype, is_dynamic, self.where)
        self.autocast = False

    def build(self, inputs_shape: Any = None, weights_shape: Any = None) -> None:
        """Make the layer's weights."""
        if self.built:
            return
        by_name = {name: name for name in inputs_shape} if isinstance(inputs_shape, Mapping) else None
        self._input_order = [one.name for one in self.features] if by_name is None else keras.tree.flatten(by_name)
        ordered = sorted(self.features, key=lambda one: one.length is not None)
        columns = KeyColumns(
            {one.name: one.length for one in ordered},
            roots=[one.name for one in ordered if one.combiner == "sqrtn" and one.length is not None],
        )
        own = [
            FeatureConfig(name=one.name, table=one.table.name, combiner="mean" if one.combiner == "mean" else "sum")
            for one in ordered
        ]
        tables = list({one.table.name: one.table for one in ordered}.values())
        self._prepare(tables, own, columns)
        self.built = True

    def _with_rule(self, tables: Sequence[AnyTable]) -> list[AnyTable]:
        return [
            table.model_copy(update={"optimizer": for_dynamic(table.optimizer or self.rule.settings, self.where)})
            if isinstance(table, DynamicTableConfig)
            else table
            for table in tables
        ]

    def _fill(self, collection: TableCollection) -> None:
        for name, feature in {one.table.name: one for one in self.features}.items():
            if feature.initializer is not None:
                shape = (feature.table.num_rows, feature.table.dim)  # type: ignore[union-attr]
                rows = keras.ops.convert_to_numpy(feature.initializer(shape, dtype="float32"))
                collection.copy_rows(name, torch.from_numpy(np.array(rows)))

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Call the layer; tensors of keys that need no check go through Keras as one, which costs time for each."""
        if self.built and not args and options.get("weights") is None:
            keys = self._by_name(inputs)
            lengths = [self._lengths[name] for name in self.columns.order]
            matrix = backend_of().joined_keys([keys[name] for name in self.columns.order], lengths)
            inputs = inputs if matrix is None else {_JOINED: matrix}
        return super().__call__(inputs, *args, **options)

    def call(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """Look all features up: by feature (B, D), in the structure of the features."""
        matrix = inputs[_JOINED] if _is_joined(inputs) else self._joined(self._by_name(inputs))
        scales = None
        if weights is not None:
            given = self._by_name(weights)
            scales = keras.ops.concatenate([self._weights(given, n, self._lengths[n]) for n in self.columns.order], 1)
        flat = self.look_up(matrix, scales, training)
        return self._structured(self._split(flat))

    def _joined(self, keys: Mapping[str, Any]) -> Any:
        parts = [self._matrix(keys[name], self._lengths[name], name) for name in self.columns.order]
        return parts[0] if len(parts) == 1 else keras.ops.concatenate(parts, axis=1)

    def keys_of_arrays(self, inputs: Any) -> Any:
        """Return the keys of each feature that are arrays as tensors of Keras' backend."""
        if _is_joined(inputs):
            return inputs
        own = {name: host_keys(one, self.key_dtype, self._place(name)) for name, one in self._by_name(inputs).items()}
        return own if isinstance(inputs, Mapping) else list(own.values())

    def _place(self, feature: str) -> str:
        return f"{self.where}, feature {feature!r}"

    def key_batch(self, keys: Sequence[Any]) -> Batch:
        """Return what to look up for the layer's inputs."""
        order = self._input_order
        if len(order) != len(keys):
            raise ConfigError("bags with weights have no fast form", where=self.where, fix="use model.fit")
        found = {name: array_keys(one, self._place(name)) for name, one in zip(order, keys, strict=True)}
        parts = [found[name].reshape(-1, self._lengths[name] or 1) for name in self.columns.order]
        wide = any(part.dtype == torch.int64 for part in parts)
        whole = torch.cat([part.to(torch.int64) if wide else part for part in parts], 1)
        return self.columns.batch(whole.to(self.collection.device))

    def input_order(self) -> Sequence[int]:
        """Return which of the layer's inputs each feature of the key matrix is."""
        return [self._input_order.index(name) for name in self.columns.order]

    def output_order(self) -> Sequence[int]:
        """Return which of the layer's outputs each feature of the lookup is."""
        names = self._flat_order()
        return [names.index(name) for name in self.columns.order]

    def _flat_order(self) -> list[str]:
        names = [one.name for one in self.features]
        return names if self.returns_list else keras.tree.flatten({name: name for name in names})

    def outputs_of(self, flat: Any) -> list[Any]:
        """Return the vectors of each feature."""
        found = self._split(flat)
        return [found[name] for name in self._flat_order()]

    def _split(self, flat: Any) -> dict[str, Any]:
        parts = backend_of().split(flat, [self._dims[name] for name in self.columns.order])
        return dict(zip(self.columns.order, parts, strict=True))

    def _matrix(self, keys: Any, length: int | None, name: str) -> Any:
        checked = checked_keys(keys, self.key_dtype, self._place(name))
        return keras.ops.reshape(checked, (-1, length or 1))

    def _weights(self, weights: Mapping[str, Any], name: str, length: int | None) -> Any:
        if length is None:
            raise ConfigError("a feature with one key a row has no weights", where=self.where, value=name,
                              fix="give the feature input_shape (B, 1)")  # fmt: skip
        return keras.ops.reshape(keras.ops.cast(weights[name], "float32"), (-1, length))

    def _by_name(self, inputs: Any) -> Mapping[str, Any]:
        names = list(self._lengths)
        if not isinstance(inputs, Mapping):
            if not isinstance(inputs, list | tuple) or len(inputs) != len(names):
                value = len(inputs) if isinstance(inputs, list | tuple) else type(inputs).__name__
                raise ConfigError(
                    "inputs are one for each feature", where=self.where, value=value,
                    allowed=f"a list of {len(names)}, or a dict", fix="pass the columns of a matrix one by one: "
                    "[keys[:, i] for i in range(n)]",
                )  # fmt: skip
            return dict(zip(names, inputs, strict=True))
        for name in names:
            if name not in inputs:
                fix = suggest(name, inputs)
                raise ConfigError("the inputs lack a feature", where=self.where, value=name, fix=fix)
        return inputs

    def _structured(self, found: Mapping[str, Any]) -> Any:
        names = list(self._lengths)
        return [found[name] for name in names] if self.returns_list else {name: found[name] for name in names}

    def compute_output_spec(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """Return the features' shapes (B, D)."""
        keys = self._by_name(inputs)
        return self._structured(
            {
                one.name: keras.KerasTensor((keys[one.name].shape[0], one.table.dim), dtype=self.compute_dtype)
                for one in self.features
            }
        )

    def get_config(self) -> dict[str, Any]:
        """Return the layer's settings as plain data."""
        return {
            **super().get_config(),
            "feature_configs": [save_feature(one) for one in self.features],
            "returns_list": self.returns_list,
            "optimizer": save_optimizer(self.held.optimizer),
            "rule": save_optimizer(self.rule.settings),
            "source": save_optimizer(self.rule.source),
            "rate": keras.saving.serialize_keras_object(self.rule.rate) if callable(self.rule.rate) else self.rule.rate,
            "key_dtype": self.key_dtype,
            "seed": self.seed,
            "plan": self.plan,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DistributedEmbedding:
        """Build a layer from `get_config`."""
        own = dict(config)
        features = [load_feature(one) for one in own.pop("feature_configs")]
        returns_list, optimizer = own.pop("returns_list"), load_optimizer(own.pop("optimizer"))
        rule, rate, source = load_optimizer(own.pop("rule")), own.pop("rate"), load_optimizer(own.pop("source", None))
        rate = keras.saving.deserialize_keras_object(rate) if isinstance(rate, dict) else rate
        layer = cls(features, optimizer=optimizer, **own)
        layer.returns_list = returns_list
        layer.rule = Rule(rule, rate, source if layer.rule.source is None else layer.rule.source)
        return layer


def _is_joined(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and _JOINED in inputs

"""A copy of a model with Keras' own layers in the place of Viviane's, for tools that need the rows inside of the graph.

Shapes: B rows of the batch, K keys of a row, D columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from viviane.core.errors import ConfigError
from viviane.embedding import DynamicTableConfig, TableConfig
from viviane.keras.distributed import DistributedEmbedding
from viviane.keras.embedding import Embedding, EmbeddingBag
from viviane.keras.layer import TableLayer


def stock_model(model: Any) -> Any:
    """Return a copy of a model whose rows are Keras variables: for `model.export` and such.

    The copy predicts what the model predicts for keys inside of the tables. It holds the rows once more, as float32,
    and none of the checks: Keras' layers do not refuse keys outside of a table. It is not compiled.

    Args:
        model: functional or sequential, nested models included.

    Raises:
        ConfigError: a table is dynamic, or replaces keys outside of it ("hash", "default", "ignore"); or the model is a
            subclass of `keras.Model`, whose code names its layers.

    Example:
        >>> own = Embedding(9, 4, optimizer="sgd")
        >>> model = keras.Sequential([keras.Input((2,), dtype="int32"), own, keras.layers.Flatten()])
        >>> copy = stock_model(model)
        >>> keys = np.array([[3, 5]])
        >>> bool((copy.predict(keys, verbose=0) == model.predict(keys, verbose=0)).all()), len(copy.weights)
        (True, 1)
    """
    if not isinstance(model, keras.Sequential) and type(model).__name__ != "Functional":
        raise ConfigError(
            "only functional and sequential models can be copied layer by layer", where=f"model {model.name!r}",
            value=type(model).__name__,
            fix="build the same model with keras.layers.Embedding, and load into it what model.save_weights wrote",
        )  # fmt: skip
    pairs: list[tuple[Any, Any]] = []

    def copied(layer: Any) -> Any:
        own = _stock_layer(layer) if isinstance(layer, TableLayer) else layer.__class__.from_config(layer.get_config())
        pairs.append((layer, own))
        return own

    copy = keras.models.clone_model(model, clone_function=copied, recursive=True)
    for layer, own in pairs:
        if isinstance(layer, keras.layers.Layer):  # operations of a graph, such as slices, have no weights
            own.set_weights(_rows_of(layer) if isinstance(layer, TableLayer) else layer.get_weights())
    return copy


def _stock_layer(layer: TableLayer) -> Any:
    """Return a layer of Keras with the same outputs."""
    _refuse_other_keys(layer)
    options = {"name": layer.name, "dtype": layer.dtype_policy}
    sizes = [table.num_rows for table in layer.tables if isinstance(table, TableConfig)]
    if isinstance(layer, Embedding):
        return keras.layers.Embedding(sizes[0], layer.output_dim, mask_zero=layer.mask_zero, **options)
    if isinstance(layer, EmbeddingBag):
        return PooledRows(sizes, {"keys": [0, layer.output_dim, layer.combiner, layer.padding_key]}, **options)
    assert isinstance(layer, DistributedEmbedding)
    names = [one.name for one in layer.tables]
    features = {
        one.name: [names.index(one.table.name), one.table.dim, one.combiner if one.length is not None else None, None]
        for one in layer.features
    }
    return PooledRows(sizes, features, returns_list=layer.returns_list, **options)


def _refuse_other_keys(layer: TableLayer) -> None:
    if not layer.tables:
        raise ConfigError("the layer has no tables before it is built", where=layer.where, fix="call the model once")
    for table in layer.tables:
        if isinstance(table, DynamicTableConfig):
            raise ConfigError(
                "Keras has no layer with a dynamic table", where=layer.where, value=table.name,
                fix="serve the model with Viviane, or train with a table of fixed size",
            )  # fmt: skip
        if table.out_of_range != "raise" or table.padding_id is not None:
            own = "padding_id" if table.padding_id is not None else "out_of_range"
            raise ConfigError(
                "Keras has no layer with this option of a table", where=f"{layer.where}, table {table.name!r}",
                value=f"{own}={getattr(table, own)!r}", fix="serve the model with Viviane",
            )  # fmt: skip


def _rows_of(layer: TableLayer) -> list[np.ndarray[Any, Any]]:
    return [layer.collection.export_table(one.name).weight.float().cpu().numpy() for one in layer.tables]


@keras.saving.register_keras_serializable(package="viviane")
class PooledRows(keras.layers.Layer):
    """Tables as Keras variables, looked up and pooled by Keras' operations.

    Args:
        num_rows: of each table.
        features: by name, in the order of the inputs: its table, D, its combiner ("sum", "mean", "sqrtn"; None: one key
            a row), and the key that pads rows or None.
        returns_list: whether the outputs are a list; else they are by feature. A single feature called "keys" gives its
            matrix alone.

    Input shape: (B, K) of each feature. Output shape: (B, D) of each.
    """

    built: bool

    def __init__(
        self, num_rows: list[int], features: Mapping[str, list[Any]], *, returns_list: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.num_rows, self.features, self.returns_list = list(num_rows), dict(features), returns_list
        self.autocast = False

    def build(self, *shapes: Any) -> None:
        """Make the tables."""
        if self.built:
            return
        dims = {table: dim for table, dim, *_ in self.features.values()}
        self.rows = [
            self.add_weight(name=f"rows_{i}", shape=(size, dims[i]), initializer="zeros")
            for i, size in enumerate(self.num_rows)
        ]
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Look all features up."""
        names = list(self.features)
        if names == ["keys"] and not isinstance(inputs, Mapping | list | tuple):
            return self._pooled("keys", inputs, weights)
        keys = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
        given: Mapping[str, Any] = weights or {}
        if weights is not None and not isinstance(weights, Mapping):
            given = dict(zip(names, weights, strict=True))
        found = {name: self._pooled(name, keys[name], given.get(name)) for name in names}
        return list(found.values()) if self.returns_list else found

    def _pooled(self, name: str, keys: Any, weights: Any) -> Any:
        table, dim, combiner, padding = self.features[name]
        ops, whole = keras.ops, keras.ops.cast(keys, "int32")
        if combiner is None:
            return ops.cast(ops.reshape(ops.take(self.rows[table], whole, axis=0), (-1, dim)), self.compute_dtype)
        scale = ops.ones_like(whole, dtype="float32") if weights is None else ops.cast(weights, "float32")
        if padding is not None:
            kept = ops.not_equal(whole, padding)
            scale, whole = scale * ops.cast(kept, "float32"), ops.where(kept, whole, 0)
        vectors = ops.sum(ops.take(self.rows[table], whole, axis=0) * ops.expand_dims(scale, -1), axis=1)
        if combiner != "sum":
            size = ops.sum(scale if combiner == "mean" else scale * scale, axis=1, keepdims=True)
            size = size if combiner == "mean" else ops.sqrt(size)
            vectors = vectors / ops.where(ops.equal(size, 0), 1.0, size)
        return ops.cast(vectors, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the layer's settings as plain data."""
        own = {"num_rows": self.num_rows, "features": self.features, "returns_list": self.returns_list}
        return {**super().get_config(), **own}

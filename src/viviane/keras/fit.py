"""The fast form: rows go into the compiled step, and their gradients come out of it.

The layers' lookups happen before the step and their updates after it; nothing calls the host from compiled code. The
numbers are those of `model.fit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import keras

from viviane.core.errors import ConfigError
from viviane.keras.feeding import batches_of, num_batches, prefetched
from viviane.keras.keys import refuse_cut
from viviane.keras.layer import TableLayer, table_layers


class FastTrainer:
    """Steps of a compiled functional model whose table lookups lie outside of the compiled code.

    Args:
        model: functional, compiled; each table layer is called once in it. Inputs of table layers may be computed, by
            layers without weights, from the model's inputs; where they are inputs themselves 64-bit keys stay whole.
        jit_compile: whether XLA compiles the step; None: on JAX, and on TensorFlow if `compile` set it.

    Raises:
        ConfigError: the model is of another kind.

    Example:
        >>> import numpy as np
        >>> import viviane.keras as vk
        >>> keys = keras.Input((2,), dtype="int32")
        >>> rows = vk.Embedding(10, 4, optimizer=keras.optimizers.SGD(0.1))(keys)
        >>> model = keras.Model(keys, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> logs = FastTrainer(model).train_on_batch(np.array([[1, 2]]), np.array([[1.0]]))
        >>> sorted(logs)
        ['loss']
    """

    def __init__(self, model: Any, *, jit_compile: bool | None = None) -> None:
        self.model = model
        self.layers = _checked_layers(model)
        if model.optimizer is None:
            raise ConfigError("the model is not compiled", fix="call model.compile(optimizer, loss) first")
        for layer in self.layers:
            if layer.rule.rate is None:
                layer.follow(model.optimizer)
        self._sources = [keras.tree.flatten(layer.input) for layer in self.layers]
        inputs = list(keras.tree.flatten(model.inputs))
        self._places = {id(tensor): i for i, tensor in enumerate(inputs)}
        computed = [one for own in self._sources for one in own if id(one) not in self._places]
        self._keys_model = keras.Model(inputs, computed) if computed else None
        self._computed = {id(one): i for i, one in enumerate(computed)}
        self._outputs = [keras.tree.flatten(layer.output) for layer in self.layers]
        rows = [one for own in self._outputs for one in own]
        self.rest = keras.Model([*inputs, *rows], model.outputs)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        backend = import_module(f"viviane.keras.backends.{keras.backend.backend()}_steps")
        self._steps = backend.Steps(model, self.rest, self.layers, jit_compile)

    def train_on_batch(self, x: Any, y: Any, sample_weight: Any = None) -> dict[str, float]:
        """Train on a batch, and return the metrics since `reset_metrics`."""
        logs = self.step(x, y, sample_weight)
        self.sync()
        return {name: float(value) for name, value in logs.items()}

    def step(self, x: Any, y: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Train on a batch; metrics are of the backend's own type. `sync` puts the weights into the model."""
        inputs = self._inputs(x)
        found = self._computed_keys(inputs)
        rows, numbers = [], []
        for layer, sources in zip(self.layers, self._sources, strict=True):
            keys = [
                inputs[self._places[id(one)]] if id(one) in self._places else found[self._computed[id(one)]]
                for one in sources
            ]
            number, flat = layer.lookups.begin(layer.key_batch(keys))
            numbers.append(number)
            rows += layer.split_rows(flat, keys)
        try:
            logs, gradients, rates, scale = self._steps.train(inputs, rows, y, sample_weight)
        except BaseException:
            for layer in self.layers:
                layer.lookups.discard()
            raise
        for layer, number, outputs, rate in zip(self.layers, numbers, self._outputs, rates, strict=True):
            own = [gradients.pop(0) for _ in outputs]
            layer.lookups.end(number, layer.join_rows(own), rate, 1.0 / scale)
        return logs  # type: ignore[no-any-return]

    def sync(self) -> None:
        """Put the weights of the last step into the model's variables."""
        self._steps.sync()

    def refresh(self) -> None:
        """Read the weights from the model's variables again, which a callback may have set."""
        self._steps.refresh()

    def _inputs(self, x: Any) -> list[Any]:
        wanted = self.model.input
        if isinstance(x, dict):
            names = list(wanted) if isinstance(wanted, dict) else [one.name for one in keras.tree.flatten(wanted)]
            missing = [name for name in names if name not in x]
            if missing:
                raise ConfigError("the data lack an input", value=", ".join(missing), allowed=", ".join(map(str, x)))
            x = {name: x[name] for name in names} if isinstance(wanted, dict) else [x[name] for name in names]
        flat = keras.tree.flatten(x)
        if len(flat) != len(self._places):
            raise ConfigError("inputs are not the model's", value=len(flat), allowed=str(len(self._places)))
        return list(flat)

    def _computed_keys(self, inputs: Sequence[Any]) -> list[Any]:
        if self._keys_model is None:
            return []
        for tensor, one in zip(keras.tree.flatten(self.model.inputs), inputs, strict=True):
            refuse_cut(one, f"input {tensor.name!r}")
        given = [keras.ops.convert_to_tensor(one) for one in inputs]
        return [keras.ops.convert_to_numpy(one) for one in keras.tree.flatten(self._keys_model(given, training=False))]


def _checked_layers(model: Any) -> list[TableLayer]:
    layers = table_layers(model)
    if not layers:
        raise ConfigError("the model has no table layers", fix="use model.fit")
    if not getattr(model, "inputs", None) or not hasattr(model, "operations"):
        raise ConfigError(
            "the fast form needs a functional model", value=type(model).__name__,
            fix="build it as keras.Model(inputs, outputs), or use model.fit",
        )  # fmt: skip
    for layer in layers:
        if layer not in model.layers or len(layer._inbound_nodes) != 1:
            raise ConfigError(
                "the fast form needs each table layer to be called once, by the model itself", where=layer.where,
                fix="use model.fit",
            )  # fmt: skip
        if not layer.trainable:
            raise ConfigError("a frozen table layer has no fast form", where=layer.where, fix="use model.fit")
    return layers


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int = 32,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: Sequence[Any] | None = None,
    validation_data: Any = None,
    shuffle: bool = True,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    validation_freq: int = 1,
    jit_compile: bool | None = None,
    prefetch: int = 2,
    seed: int = 0,
) -> Any:
    """Train as `model.fit` does, with the tables' lookups and updates around the compiled step.

    Args:
        model: see `FastTrainer`.
        x, y, sample_weight: arrays; or x alone: a PyDataset such as `batches(...)`, or an iterable of (x, y) or
            (x, y, sample_weight) that can be read once an epoch.
        batch_size, shuffle, seed: of arrays.
        epochs, initial_epoch, verbose, callbacks, validation_data, validation_freq: as of `model.fit`.
        jit_compile: see `FastTrainer`.
        prefetch: batches that a thread prepares ahead; 0 prepares none.

    Returns:
        Keras' History.
    """
    trainer = FastTrainer(model, jit_compile=jit_compile)
    steps = num_batches(x, batch_size)
    if verbose == "auto":
        verbose = 1
    calls = keras.callbacks.CallbackList(
        callbacks, add_history=True, add_progbar=verbose != 0, model=model, verbose=verbose, epochs=epochs, steps=steps
    )
    model.stop_training = False
    calls.on_train_begin()
    logs: dict[str, Any] = {}
    for epoch in range(initial_epoch, epochs):
        model.reset_metrics()
        calls.on_epoch_begin(epoch)
        trainer.refresh()
        feed = batches_of(x, y, sample_weight, batch_size, shuffle, seed + epoch)
        logs = _epoch(trainer, prefetched(feed, prefetch), calls)
        if validation_data is not None and (epoch + 1) % validation_freq == 0:
            logs |= {f"val_{name}": value for name, value in _evaluate(model, validation_data, batch_size).items()}
        calls.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    calls.on_train_end(logs)
    return model.history


def _epoch(trainer: FastTrainer, feed: Iterator[Any], calls: Any) -> dict[str, Any]:
    logs: dict[str, Any] = {}
    for number, batch in enumerate(feed):
        calls.on_train_batch_begin(number)
        logs = trainer.step(*batch)
        calls.on_train_batch_end(number, logs)
        if trainer.model.stop_training:
            break
    trainer.sync()
    return {name: float(value) for name, value in logs.items()}


def _evaluate(model: Any, data: Any, batch_size: int) -> dict[str, Any]:
    if isinstance(data, tuple | list):
        x, y, *rest = data
        weight = rest[0] if rest else None
        found = model.evaluate(x, y, sample_weight=weight, batch_size=batch_size, verbose=0, return_dict=True)
    else:
        found = model.evaluate(data, verbose=0, return_dict=True)
    return dict(found)

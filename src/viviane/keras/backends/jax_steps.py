"""The fast form on JAX: one jitted step, weights as its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from viviane.core.optional import require
from viviane.keras.backends import input_structure


class Steps:
    """Steps of a model; `rest` is the model from its inputs and lookups on."""

    def __init__(self, model: Any, rest: Any, layers: Sequence[Any], jit_compile: bool | None) -> None:
        self._jax = require("jax", extra="jax", purpose="Keras on JAX")
        self._model, self._rest, self._layers = model, rest, layers
        self._trained = list(model.trainable_variables)
        rest_of = [*model.non_trainable_variables, *model.optimizer.variables, *model.metrics_variables]
        self._others = list({id(one): one for one in rest_of}.values())
        step = self._step
        wanted = model.jit_compile is not False if jit_compile is None else jit_compile
        self._is_eager = model.run_eagerly or not wanted
        self._compiled = step if self._is_eager else self._jax.jit(step)
        self._state: tuple[list[Any], list[Any]] | None = None
        self._ready = False

    def train(self, inputs: Sequence[Any], flats: Sequence[torch.Tensor], y: Any, weight: Any) -> Any:
        """Train on a batch: metrics, gradients of lookups, rates, the loss scale."""
        given = [self._jax.dlpack.from_dlpack(flat) for flat in flats]
        as_array = _own_array if self._is_eager else _array
        inputs, y, weight = keras.tree.map_structure(as_array, (list(inputs), y, weight))
        if self._state is None or not self._ready:
            self.sync()
            self._build_metrics(inputs, given, y, weight)
            self.refresh()
            self._ready = True
        assert self._state is not None
        trained, others, logs, gradients, rates, scale = self._compiled(*self._state, inputs, given, y, weight)
        self._state = (trained, others)
        found = [torch.utils.dlpack.from_dlpack(one) for one in gradients]
        numbers = [float(np.asarray(rate)) for rate in rates]
        return logs, found, numbers, float(np.asarray(scale))

    def function_of(self, keys_model: Any) -> Callable[[list[Any]], list[Any]]:
        """Return a model without weights as one compiled function of arrays; eager where a layer cannot be traced."""

        def compute(inputs: list[Any]) -> list[Any]:
            return keras.tree.flatten(keys_model(inputs, training=False))  # type: ignore[no-any-return]

        compiled = self._jax.jit(compute)
        if self._model.run_eagerly:
            return compute

        def call(inputs: list[Any]) -> list[Any]:
            nonlocal compiled
            try:
                return compiled(inputs)  # type: ignore[no-any-return]
            except Exception:  # keras.layers.Hashing computes in TensorFlow; Keras wraps JAX's error in others
                compiled = compute
                return compute(inputs)

        return call

    def _build_metrics(self, inputs: Sequence[Any], flats: Sequence[Any], y: Any, weight: Any) -> None:
        """Let metrics make their variables, as they do with their first batch: inside of the step they could not."""
        model = self._model
        if all(getattr(one, "built", True) for one in model.metrics):
            return
        given, y = keras.tree.map_structure(keras.ops.convert_to_tensor, (list(inputs), y))
        if weight is not None:
            weight = keras.tree.map_structure(keras.ops.convert_to_tensor, weight)
        predicted = self._rest(given, flats, training=False)
        x = keras.tree.pack_sequence_as(input_structure(model), given)
        model.compute_loss(x, y, predicted, weight, training=False)
        model.compute_metrics(x, y, predicted, weight)
        model.reset_metrics()

    def _metrics_too(self) -> list[Any]:
        known = {id(one) for one in self._others}
        self._others += [one for one in self._model.metrics_variables if id(one) not in known]
        return self._others

    def _step(self, trained: Any, others: Any, inputs: Any, flats: Any, y: Any, weight: Any) -> Any:
        model, jax = self._model, self._jax
        x = keras.tree.pack_sequence_as(input_structure(model), inputs)

        def loss_of(trained: Any, flats: Any) -> Any:
            mapping = [*zip(self._trained, trained, strict=True), *zip(self._others, others, strict=True)]
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
                predicted = self._rest(inputs, flats, training=True)
                loss = model.compute_loss(x, y, predicted, weight, training=True)
                scaled = model.optimizer.scale_loss(loss)
            return scaled, (loss, predicted, [_now(scope, one, v) for one, v in zip(self._others, others, strict=True)])

        (_, (loss, predicted, after)), gradients = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(
            trained, flats
        )
        mapping = [*zip(self._trained, trained, strict=True), *zip(self._others, after, strict=True)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            rates = [layer.next_rate() for layer in self._layers]
            scale = model.optimizer.scale_loss(jax.numpy.ones(()))
            model._loss_tracker.update_state(loss, sample_weight=inputs[0].shape[0])
            logs = model.compute_metrics(x, y, predicted, weight)
        after = [_now(scope, one, value) for one, value in zip(self._others, after, strict=True)]
        places = {id(one): i for i, one in enumerate(self._others)}
        own = [after[places[id(one)]] for one in model.optimizer.variables]
        trained, own = model.optimizer.stateless_apply(own, gradients[0], trained)
        for one, value in zip(model.optimizer.variables, own, strict=True):
            after[places[id(one)]] = value
        return trained, after, logs, gradients[1], rates, scale

    def sync(self) -> None:
        """Put the weights into the model's variables."""
        if self._state is not None:
            for one, value in zip([*self._trained, *self._others], [*self._state[0], *self._state[1]], strict=True):
                one.assign(value)

    def refresh(self) -> None:
        """Take the weights from the model's variables."""
        self._metrics_too()
        self._state = ([one.value for one in self._trained], [one.value for one in self._others])


def _array(given: Any) -> Any:
    """Return an array of another framework as JAX's; a compiled step takes NumPy's and JAX's, and None."""
    if given is None or isinstance(given, np.ndarray) or hasattr(given, "sharding"):
        return given
    return keras.ops.convert_to_tensor(given)


def _own_array(given: Any) -> Any:
    """Return any array as JAX's: layers that are called outside of a compiled step take no NumPy arrays beside them."""
    return None if given is None else keras.ops.convert_to_tensor(given)


def _now(scope: Any, variable: Any, before: Any) -> Any:
    value = scope.get_current_value(variable)
    return before if value is None else value

"""The fast form on TensorFlow: one `tf.function`, compiled by XLA where asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from viviane.core.optional import require
from viviane.keras.backends import input_structure
from viviane.keras.backends.tensorflow_backend import to_tensorflow


class Steps:
    """Steps of a model; `rest` is the model from its inputs and lookups on."""

    def __init__(self, model: Any, rest: Any, layers: Sequence[Any], jit_compile: bool | None) -> None:
        self._tf = require("tensorflow", extra="tensorflow", purpose="Keras on TensorFlow")
        self._model, self._rest, self._layers = model, rest, layers
        wanted = model.jit_compile is True if jit_compile is None else jit_compile
        whole = self._tf.function(self._step, jit_compile=wanted, reduce_retracing=True)
        self._compiled = self._step if model.run_eagerly else whole

    def train(self, inputs: Sequence[Any], flats: Sequence[torch.Tensor], y: Any, weight: Any) -> Any:
        """Train on a batch: metrics, gradients of lookups, rates, the loss scale."""
        tf = self._tf
        given = [tf.convert_to_tensor(one) for one in inputs]
        labels = tf.nest.map_structure(tf.convert_to_tensor, y)
        scales = None if weight is None else tf.nest.map_structure(tf.convert_to_tensor, weight)
        leaves = [to_tensorflow(flat) for flat in flats]
        logs, gradients, rates, scale = self._compiled(given, leaves, labels, scales)
        found = [_to_torch(one) for one in gradients]
        return logs, found, [float(np.asarray(rate)) for rate in rates], float(np.asarray(scale))

    def function_of(self, keys_model: Any) -> Callable[[list[Any]], list[Any]]:
        """Return a model without weights as one compiled function of tensors."""

        def compute(inputs: list[Any]) -> list[Any]:
            return keras.tree.flatten(keys_model(inputs, training=False))  # type: ignore[no-any-return]

        return compute if self._model.run_eagerly else self._tf.function(compute, reduce_retracing=True)

    def _step(self, inputs: Any, flats: Any, y: Any, weight: Any) -> Any:
        tf, model = self._tf, self._model
        x = tf.nest.pack_sequence_as(input_structure(model), inputs)
        with tf.GradientTape() as tape:
            tape.watch(flats)
            predicted = self._rest(inputs, flats, training=True)
            loss = model.compute_loss(x, y, predicted, weight, training=True)
            scaled = model.optimizer.scale_loss(loss)
        weights = model.trainable_variables
        plain = [getattr(one, "value", one) for one in weights]
        gradients, found = tape.gradient(scaled, [plain, flats], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        rates = [layer.next_rate() for layer in self._layers]
        scale = model.optimizer.scale_loss(tf.ones(()))
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(inputs[0])[0])
        model.optimizer.apply(gradients, weights)
        logs = model.compute_metrics(x, y, predicted, sample_weight=weight)
        return logs, [tf.convert_to_tensor(one) for one in found], rates, scale

    def sync(self) -> None:
        """Do nothing: weights are changed in place."""

    def refresh(self) -> None:
        """Do nothing: weights are read in place."""


def _to_torch(gradient: Any) -> torch.Tensor:
    if not gradient.shape.num_elements():
        return torch.zeros(tuple(gradient.shape))
    return torch.utils.dlpack.from_dlpack(gradient)

"""The fast form on torch: a plain step whose rows are leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from viviane.keras.backends import input_structure


class Steps:
    """Steps of a model; `rest` is the model from its inputs and lookups on."""

    def __init__(self, model: Any, rest: Any, layers: Sequence[Any], jit_compile: bool | None) -> None:
        self._model, self._layers = model, layers
        wanted = model.jit_compile is True if jit_compile is None else jit_compile
        self._rest = torch.compile(rest.__call__) if wanted and not model.run_eagerly else rest

    def train(self, inputs: Sequence[Any], flats: Sequence[torch.Tensor], y: Any, weight: Any) -> Any:
        """Train on a batch: metrics, gradients of lookups, rates, the loss scale."""
        model = self._model
        leaves = [flat.detach().requires_grad_() for flat in flats]
        given = [keras.ops.convert_to_tensor(one) for one in inputs]
        labels = keras.tree.map_structure(keras.ops.convert_to_tensor, y)
        scales = None if weight is None else keras.tree.map_structure(keras.ops.convert_to_tensor, weight)
        predicted = self._rest(given, leaves, training=True)
        model.zero_grad()
        x = keras.tree.pack_sequence_as(input_structure(model), given)
        loss = model.compute_loss(x, labels, predicted, scales, training=True)
        model._loss_tracker.update_state(loss, sample_weight=len(given[0]))
        scale = float(model.optimizer.scale_loss(torch.ones(())))
        (loss * scale if scale != 1.0 else loss).backward()
        weights = model.trainable_weights
        gradients = [one.value.grad for one in weights]
        gradients = [torch.zeros_like(v.value) if g is None else g for g, v in zip(gradients, weights, strict=True)]
        rates = [float(layer.next_rate()) for layer in self._layers]
        with torch.no_grad():
            model.optimizer.apply(gradients, weights)
        logs = model.compute_metrics(x, labels, predicted, sample_weight=scales)
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return logs, found, rates, scale

    def function_of(self, keys_model: Any) -> Callable[[list[Any]], list[Any]]:
        """Return a model without weights as a function of tensors."""
        return lambda inputs: keras.tree.flatten(keys_model(inputs, training=False))

    def sync(self) -> None:
        """Do nothing: weights are changed in place."""

    def refresh(self) -> None:
        """Do nothing: weights are read in place."""

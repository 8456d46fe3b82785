"""Keras on TensorFlow: a custom gradient around two calls of the host.

Shapes: B rows of the batch, K keys of a row, W columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.core.optional import require
from viviane.embedding.external import ExternalLookups, checked_rate, short_traceback, tensor_at
from viviane.embedding.whole_keys import array_keys

_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float16": torch.float16}


def _tensorflow() -> Any:
    return require("tensorflow", extra="tensorflow", purpose="Keras on TensorFlow")


def table_device(weight: Any) -> str:
    """Return the device of the tables: host calls of TensorFlow hand over host memory."""
    return "cpu"


def eagerly(device: str) -> AbstractContextManager[Any]:
    """Leave the graph that is traced for a block."""
    return _tensorflow().init_scope()  # type: ignore[no-any-return]


def as_torch(array: np.ndarray[Any, Any]) -> Tensor:
    """Return an array as a tensor without a copy; the array has to live as long. TensorFlow's cannot be written to."""
    plain = np.ascontiguousarray(array)
    return tensor_at(plain.ctypes.data, _TYPES[str(plain.dtype)], plain.shape)


def to_tensorflow(tensor: Tensor) -> Any:
    """Hand a tensor on the CPU over to TensorFlow; without a copy where its memory is aligned to 64 bytes.

    TensorFlow accepts memory that is not, and ends the process at the first operation on it.
    """
    from tensorflow.experimental import dlpack

    plain = tensor.detach().contiguous()
    if plain.data_ptr() % 64:
        aligned = torch.empty(plain.numel() + 64 // plain.element_size(), dtype=plain.dtype)
        start = (-aligned.data_ptr() % 64) // plain.element_size()
        plain = aligned[start : start + plain.numel()].view(plain.shape).copy_(plain)
    return dlpack.from_dlpack(plain.__dlpack__())


def is_traced(anchor: Any) -> bool:
    """Whether TensorFlow builds a graph."""
    return not _tensorflow().executing_eagerly()


def joined_keys(parts: Sequence[Any], lengths: Sequence[int | None]) -> Any:
    """Return None: a step is traced once."""


def split(flat: Any, widths: Sequence[int]) -> Sequence[Any]:
    """Split (B, W) by columns."""
    return _tensorflow().split(flat, list(widths), 1)  # type: ignore[no-any-return]


def _inside_xla(tf: Any) -> bool:
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context() if hasattr(graph, "_get_control_flow_context") else None
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def _refuse_xla(where: str) -> None:
    if _inside_xla(_tensorflow()):
        raise ConfigError(
            "XLA compiles no host calls of TensorFlow", where=where, value="jit_compile=True",
            fix="compile(jit_compile=False), or train with viviane.keras.fit(model, data), which compiles the rest",
        )  # fmt: skip


def whole_keys(keys: Any, where: str) -> Any:
    """Return floats or unsigned numbers as int64, checked, in graphs when they run."""
    tf = _tensorflow()
    if tf.executing_eagerly():
        return tf.convert_to_tensor(array_keys(keys.numpy(), where).to(torch.int64).numpy())
    _refuse_xla(where)

    @short_traceback
    def check(array: np.ndarray[Any, Any]) -> Any:
        return array_keys(array, where).to(torch.int64).numpy()

    found = tf.numpy_function(check, [keys], tf.int64)
    found.set_shape(keys.shape)
    return found


def look_up(layer: Any, keys: Any, weights: Any, rate: Any, trains: bool) -> tuple[Any, Any]:
    """Look up keys (B, K): the vectors (B, W), and a zero whose gradient is the loss scale."""
    tf = _tensorflow()
    _refuse_xla(layer.where)
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ConfigError(
            "tables are not updated from several replicas of a strategy", where=layer.where,
            value=type(tf.distribute.get_strategy()).__name__,
            fix="start one process for each device, see docs/how-to/keras.md, or train without the strategy",
        )  # fmt: skip
    lookups: ExternalLookups = layer.lookups
    given = [keys] if weights is None else [keys, weights]

    @short_traceback
    def read(*arrays: np.ndarray[Any, Any]) -> Any:
        return lookups.read(layer.columns.batch(*map(as_torch, arrays))).to(torch.float32).numpy()

    @short_traceback
    def begin(*arrays: np.ndarray[Any, Any]) -> Any:
        # Copies: the update reads them, when TensorFlow has used the memory again.
        number, flat = lookups.begin(layer.columns.batch(*(as_torch(one).clone() for one in arrays)))
        return flat.to(torch.float32).numpy(), np.int64(number)

    @short_traceback
    def end(number: Any, gradient: np.ndarray[Any, Any], rate: Any, token: Any) -> Any:
        scale = 1.0 if token == 0 else 1.0 / float(token)
        lookups.end(int(number), as_torch(gradient), checked_rate(rate, lookups.where), scale)
        return np.float32(0.0)

    shape = (keys.shape[0], layer.width)

    @tf.custom_gradient
    def guarded(anchor: Any) -> Any:
        with tf.control_dependencies([anchor]):
            flat = tf.numpy_function(read, given, tf.float32)
        flat.set_shape(shape)

        def backward(gradient: Any) -> Any:
            raise lookups.not_in_training()

        return flat, backward

    if not trains:
        anchor = tf.convert_to_tensor(layer.anchor.value)
        flat = guarded(anchor if layer.trainable else tf.stop_gradient(anchor))
        return tf.cast(flat, layer.compute_dtype), tf.zeros(())

    @tf.custom_gradient
    def train(anchor: Any) -> Any:
        # The anchor's value goes through the host, too: it orders the lookups after the update before.
        with tf.control_dependencies([anchor]):
            flat, number = tf.numpy_function(begin, given, (tf.float32, tf.int64))
        flat.set_shape(shape)

        def backward(gradient: Any, token: Any) -> Any:
            zero = tf.numpy_function(end, [number, gradient, rate, token], tf.float32)
            zero.set_shape(())
            return zero

        return (flat, tf.zeros(())), backward

    flat, token = train(tf.convert_to_tensor(layer.anchor.value))
    return tf.cast(flat, layer.compute_dtype), token

"""Keras on JAX: custom derivatives around calls of a host handler from compiled code.

Shapes: B rows of the batch, K keys of a row, W columns of the output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import keras

from viviane.core.errors import ConfigError
from viviane.core.optional import require
from viviane.embedding.whole_keys import array_keys, keys_of_32_bits
from viviane.keras.ffi import BEGIN, CHECK, END, READ, REFUSE, WIDE, call_number, lookups_of, place_number, register


def _jax() -> Any:
    return require("jax", extra="jax", purpose="Keras on JAX")


def table_device() -> str:
    """Return the device of the tables: the handler is called with host memory."""
    platform = _jax().default_backend()
    if platform != "cpu":
        raise ConfigError(
            "on JAX the layers work on the CPU", value=platform, allowed="cpu",
            fix="set JAX_PLATFORMS=cpu, train with viviane.keras.fit(model, data), or take the torch backend",
        )  # fmt: skip
    return "cpu"


def eagerly() -> AbstractContextManager[Any]:
    """Compute at once for a block, even where JAX is tracing."""
    return _jax().ensure_compile_time_eval()  # type: ignore[no-any-return]


def whole_keys(keys: Any, where: str) -> Any:
    """Return floats or unsigned numbers as int32, or int64 where JAX has it; checked, in compiled code when it runs."""
    jax = _jax()
    wide = bool(jax.config.jax_enable_x64)
    if not isinstance(keys, jax.core.Tracer):
        found = array_keys(keys, where)
        return jax.numpy.asarray((found if wide else keys_of_32_bits(found, where, WIDE)).numpy())
    shape = jax.ShapeDtypeStruct((keys.size,), "int64" if wide else "int32")
    flat = _call(CHECK, place_number(where, keys.shape), shape)(jax.lax.stop_gradient(keys).reshape(-1))
    return flat.reshape(keys.shape)


def _refuse_several_devices(where: str) -> None:
    distribution = keras.distribution.distribution()
    if distribution is not None and distribution.device_mesh.devices.size > 1:
        raise ConfigError(
            "tables are not updated from several devices of one process", where=where,
            value=type(distribution).__name__,
            fix="start one process for each device, see docs/how-to/keras.md, or train without the distribution",
        )  # fmt: skip


def look_up(layer: Any, keys: Any, weights: Any, rate: Any, trains: bool) -> tuple[Any, Any]:
    """Look up keys (B, K): the vectors (B, W), and a zero whose gradient is the loss scale."""
    jax = _jax()
    _refuse_several_devices(layer.where)
    number = register(layer.lookups)
    given = (keys,) if weights is None else (keys, weights)
    if trains:
        flat, token = _training(number, layer.width, layer.compute_dtype)(layer.anchor.value, rate, *given)
        return flat, token
    anchor = layer.anchor.value if layer.trainable else jax.lax.stop_gradient(layer.anchor.value)
    return _reading(number, layer.width, layer.compute_dtype)(anchor, *given), jax.numpy.zeros(())


def _call(kind: int, number: int, results: Any) -> Any:
    """Return a function that calls the handler from compiled code, whether its results are used or not."""
    import numpy as np

    jax = _jax()
    call = jax.ffi.ffi_call("viviane_tables", results, has_side_effect=True, vmap_method=None)
    return lambda *arrays: call(*arrays, call=np.int64(call_number(kind, number)))


@cache
def _reading(number: int, width: int, dtype: str) -> Any:
    """Return the lookup outside of training, which is not to be differentiated."""
    jax = _jax()

    @jax.custom_jvp
    def look_up(anchor: Any, keys: Any, *weights: Any) -> Any:
        shape = jax.ShapeDtypeStruct((keys.shape[0], width), dtype)
        return _call(READ, number, shape)(anchor, keys, *weights)

    @look_up.defjvp
    def _(values: Any, tangents: Any) -> Any:
        raise lookups_of(number).not_in_training()

    return look_up


@cache
def _training(number: int, width: int, dtype: str) -> Any:
    """Return the lookup that updates its rows when it is differentiated."""
    jax = _jax()
    jnp = jax.numpy

    @jax.custom_vjp
    def look_up(anchor: Any, rate: Any, keys: Any, *weights: Any) -> Any:
        # It is this body that runs where nothing differentiates the layer.
        shape = jax.ShapeDtypeStruct((keys.shape[0], width), dtype)
        return _call(REFUSE, number, shape)(anchor, keys, *weights), jnp.zeros(())

    def forward(anchor: Any, rate: Any, keys: Any, *weights: Any) -> Any:
        shapes = (jax.ShapeDtypeStruct((keys.shape[0], width), dtype), jax.ShapeDtypeStruct((), "int32"))
        flat, waiting = _call(BEGIN, number, shapes)(anchor, keys, *weights)
        return (flat, jnp.zeros(())), (waiting, rate, len(weights))

    def backward(kept: Any, gradients: Any) -> Any:
        waiting, rate, num_weights = kept
        gradient, token = gradients
        zero = _call(END, number, jax.ShapeDtypeStruct((), "float32"))(waiting, gradient, rate, token)
        return (zero, None, None, *(None,) * num_weights)

    look_up.defvjp(forward, backward)
    return look_up

"""Keras on JAX: custom derivatives around calls of a handler from compiled code.

Shapes: B rows of the batch, K keys of a row, W columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import accumulate
from typing import Any

import keras

from viviane.core.errors import ConfigError
from viviane.core.optional import require
from viviane.embedding.whole_keys import array_keys, keys_of_32_bits
from viviane.keras.ffi import BEGIN, CHECK, END, READ, REFUSE, WIDE, call_number, lookups_of, place_number, register
from viviane.keras.ffi import table_device as device_of_jax


def _jax() -> Any:
    return require("jax", extra="jax", purpose="Keras on JAX")


def table_device(weight: Any) -> str:
    """Return the device of the tables: that on which JAX computes, whose memory the handler is given."""
    return device_of_jax()


def eagerly(device: str) -> AbstractContextManager[Any]:
    """Compute at once for a block, even where JAX is tracing."""
    return _jax().ensure_compile_time_eval()  # type: ignore[no-any-return]


def is_traced(anchor: Any) -> bool:
    """Whether JAX traces a model that has the variable."""
    return isinstance(anchor.value, _jax().core.Tracer)


def joined_keys(parts: Sequence[Any], lengths: Sequence[int | None]) -> Any:
    """Return None: a step is traced once."""


def split(flat: Any, widths: Sequence[int]) -> Sequence[Any]:
    """Split (B, W) by columns."""
    return _jax().numpy.split(flat, list(accumulate(widths))[:-1], 1)  # type: ignore[no-any-return]


def whole_keys(keys: Any, where: str) -> Any:
    """Return floats or unsigned numbers as int32, or int64 where JAX has it; checked, in compiled code when it runs."""
    jax = _jax()
    wide = bool(jax.config.jax_enable_x64)
    if not isinstance(keys, jax.core.Tracer):
        found = array_keys(keys, where)
        return jax.numpy.asarray((found if wide else keys_of_32_bits(found, where, WIDE)).numpy())
    shape = ((keys.size,), "int64" if wide else "int32")
    (flat,) = _call(CHECK, place_number(where, keys.shape), shape)(jax.lax.stop_gradient(keys).reshape(-1))
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
        anchor = layer.anchor.value
        flat, token, called = _training(number, layer.width, layer.compute_dtype)(anchor, rate, *given)
        if isinstance(anchor, jax.core.Tracer):
            # The layer's state depends on the call: JAX would drop a lookup whose rows and gradient nothing uses, and
            # with it the error that its gradient never came.
            layer.iterations.assign(layer.iterations.value + called)
        return flat, token
    anchor = layer.anchor.value if layer.trainable else jax.lax.stop_gradient(layer.anchor.value)
    return _reading(number, layer.width, layer.compute_dtype)(anchor, *given), jax.numpy.zeros(())


def _call(kind: int, number: int, *results: tuple[tuple[int, ...], str]) -> Any:
    """Return a function that calls the handler from compiled code; results are by shape and type."""
    call = call_number(kind, number)
    return lambda *arrays: _primitive().bind(*arrays, call=call, results=results)


@cache
def _primitive() -> Any:
    """Return the operation that calls the handler.

    It is declared to have side effects for XLA, which neither drops nor merges its calls, but not for JAX. With
    `jax.ffi.ffi_call`, which declares them for both, each call of a compiled function goes through JAX's Python code,
    and that takes longer than the lookup. JAX may drop calls whose results are not used; `look_up` puts one of each
    lookup in training into the layer's state, so that one without the call for its gradient raises an error later.
    """
    import numpy as np
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    jax = _jax()
    primitive: Any = Primitive("viviane_tables")
    primitive.multiple_results = True
    lowered = jax.ffi.ffi_lowering("viviane_tables", has_side_effect=True)

    @cache
    def compiled(call: int, results: Any) -> Any:
        return jax.jit(lambda *arrays: primitive.bind(*arrays, call=call, results=results))

    def eager(*arrays: Any, call: int, results: Any) -> Any:
        return compiled(call, results)(*arrays)

    def shapes(*arrays: Any, call: int, results: Any) -> Any:
        return [jax.core.ShapedArray(shape, np.dtype(dtype)) for shape, dtype in results]

    def lower(context: Any, *arrays: Any, call: int, results: Any) -> Any:
        return lowered(context, *arrays, call=np.int64(call))

    primitive.def_impl(eager)
    primitive.def_abstract_eval(shapes)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, lower, platform=platform)
    return primitive


@cache
def _reading(number: int, width: int, dtype: str) -> Any:
    """Return the lookup outside of training, which is not to be differentiated."""
    jax = _jax()

    @jax.custom_jvp
    def look_up(anchor: Any, keys: Any, *weights: Any) -> Any:
        (values,) = _call(READ, number, ((keys.shape[0], width), dtype))(anchor, keys, *weights)
        return values

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
        (values,) = _call(REFUSE, number, ((keys.shape[0], width), dtype))(anchor, keys, *weights)
        return values, jnp.zeros(()), jnp.zeros((), "int32")

    def forward(anchor: Any, rate: Any, keys: Any, *weights: Any) -> Any:
        flat, waiting = _call(BEGIN, number, ((keys.shape[0], width), dtype), ((), "int32"))(anchor, keys, *weights)
        return (flat, jnp.zeros(()), 0 * waiting), (waiting, rate, len(weights))

    def backward(kept: Any, gradients: Any) -> Any:
        waiting, rate, num_weights = kept
        gradient, token, _ = gradients
        (zero,) = _call(END, number, ((), "float32"))(waiting, gradient, rate, token)
        return (zero, None, None, *(None,) * num_weights)

    look_up.defvjp(forward, backward)
    return look_up

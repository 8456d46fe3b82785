"""The type of keys, which backends would change without a word."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from viviane.core.errors import ConfigError, DataError
from viviane.core.optional import require

_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")


def key_type(given: str | None, is_dynamic: bool, where: str) -> str:
    """Return the type that keys have inside the layer.

    Raises:
        ConfigError: there is no such type.

    Example:
        >>> key_type(None, False, "here")
        'int32'
    """
    name = given or ("int64" if is_dynamic else "int32")
    if name not in ("int32", "int64"):
        raise ConfigError("no type of keys", where=where, value=name, allowed="'int32', 'int64'")
    return name


def _refuse_cut_keys(where: str) -> None:
    jax = require("jax", extra="jax", purpose="Keras on JAX")
    if not jax.config.jax_enable_x64:
        raise ConfigError(
            "JAX cuts 64-bit numbers to 32 bits", where=where, value="int64",
            fix="call jax.config.update('jax_enable_x64', True) first, or train with viviane.keras.fit(model, data), "
            "or, if all keys are below 2^31, pass key_dtype='int32'",
        )  # fmt: skip


def array_keys(array: Any, where: str) -> torch.Tensor:
    """Return an array's keys as a tensor, whole, whatever the backend would make of them."""
    plain = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if plain.dtype in (torch.int32, torch.int64):
        return plain.cpu()
    if plain.dtype in (torch.int8, torch.int16, torch.uint8, torch.bool, torch.float32):
        return plain.cpu().to(torch.int64)
    raise DataError("keys are whole numbers", where=where, value=str(plain.dtype), allowed=", ".join(_WHOLE))


def checked_keys(inputs: Any, key_dtype: str, where: str) -> Any:
    """Return keys as a tensor of the type inside the layer.

    Raises:
        DataError: they are not whole numbers.
        ConfigError: the backend would cut 64-bit keys to 32 bits.
    """
    if key_dtype == "int64" and keras.backend.backend() == "jax":
        _refuse_cut_keys(where)
    keys = keras.ops.convert_to_tensor(inputs)
    dtype = keras.backend.standardize_dtype(keys.dtype)
    if dtype == "float32":  # as Keras' own layer takes them; exact below 2^24
        return keras.ops.cast(keys, key_dtype)
    if dtype not in _WHOLE:
        raise DataError(
            "keys are whole numbers", where=where, value=dtype, allowed=", ".join(_WHOLE),
            fix="strings become numbers by keras.layers.StringLookup or Hashing",
        )  # fmt: skip
    return keys if dtype in (key_dtype, "int64") else keras.ops.cast(keys, key_dtype)

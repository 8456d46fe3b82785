"""The type of keys, which backends would change without a word.

Values are checked by `viviane.embedding.whole_keys`: those of arrays before a backend can round, cut or wrap them, and
floats and unsigned numbers in compiled code when it runs, by a call of the host.
"""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np
import torch

from viviane.core.errors import ConfigError
from viviane.core.optional import require
from viviane.embedding.whole_keys import array_keys, keys_of_32_bits, wrong_type
from viviane.keras.backends import backend_of
from viviane.keras.ffi import WIDE

_UNEVEN: Final = ("RaggedTensor", "SparseTensor", "BCOO")
_EXACT: Final = ("int8", "int16", "int32", "uint8", "uint16")
_CHECKED: Final = ("uint32", "uint64", "float16", "bfloat16", "float32", "float64")


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


def _cuts_64_bits() -> bool:
    if keras.backend.backend() != "jax":
        return False
    jax = require("jax", extra="jax", purpose="Keras on JAX")
    return not jax.config.jax_enable_x64


def _refuse_cut_keys(where: str) -> None:
    if _cuts_64_bits():
        raise ConfigError(
            "JAX cuts 64-bit numbers to 32 bits", where=where, value="int64",
            fix=WIDE + "; or, if all keys are below 2^31, pass key_dtype='int32'",
        )  # fmt: skip


def checked_keys(inputs: Any, key_dtype: str, where: str) -> Any:
    """Return keys as a tensor of int32 or int64.

    Raises:
        DataError: they are not whole numbers; in compiled code it is the framework that raises, with the same text.
        ConfigError: the backend would cut 64-bit keys to 32 bits.
    """
    if key_dtype == "int64":
        _refuse_cut_keys(where)
    try:
        dtype = keras.backend.standardize_dtype(inputs.dtype)
    except ValueError:  # Keras has no name for it
        raise wrong_type(str(inputs.dtype), where) from None
    if dtype in _EXACT:
        return keras.ops.cast(inputs, key_dtype)
    if dtype == "int64":
        return inputs
    if dtype not in _CHECKED:
        raise wrong_type(dtype, where)
    return backend_of().whole_keys(inputs, where)


def host_keys(inputs: Any, key_dtype: str, where: str) -> Any:
    """Return keys of an array of the host as a tensor of the backend, and other inputs as they are.

    Raises:
        DataError: keys are not whole numbers, or the backend would cut them to 32 bits.
        ConfigError: the backend cuts all keys of the layer's type; or keys are a ragged or sparse tensor.
    """
    refuse_uneven_rows(inputs, where)
    own = isinstance(inputs, np.ndarray | np.generic | list | tuple | int | float)
    if not own and not (isinstance(inputs, torch.Tensor) and keras.backend.backend() != "torch"):
        return inputs
    if key_dtype == "int64":
        _refuse_cut_keys(where)
    keys = array_keys(inputs, where)
    if _cuts_64_bits():
        keys = keys_of_32_bits(keys, where, WIDE)
    elif key_dtype == "int64":
        keys = keys.to(torch.int64)
    return keras.ops.convert_to_tensor(keys.numpy())


def refuse_uneven_rows(inputs: Any, where: str) -> None:
    """Refuse ragged and sparse tensors of keys.

    Raises:
        ConfigError: the inputs are one.
    """
    symbolic = isinstance(inputs, keras.KerasTensor) and (inputs.sparse or inputs.ragged)
    if symbolic or type(inputs).__name__ in _UNEVEN:
        raise ConfigError(
            "keys are a matrix with as many columns in each row", where=where, value=type(inputs).__name__,
            fix="pad the rows: keys.to_tensor() of a RaggedTensor, tf.sparse.to_dense(keys) of a SparseTensor; "
            "EmbeddingBag(padding_key=0) and Embedding(mask_zero=True) leave the padding key out",
        )  # fmt: skip


def refuse_cut(array: Any, where: str) -> None:
    """Refuse an array of integers that the backend would cut to 32 bits.

    Raises:
        DataError: it would.
    """
    if _cuts_64_bits() and getattr(getattr(array, "dtype", None), "kind", "") in "iu":
        keys_of_32_bits(array_keys(array, where), where, WIDE)

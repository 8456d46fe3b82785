"""Keys as frameworks hand them over: whole numbers of 32 or 64 bits, or an error: none is rounded, wrapped or cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import DataError

_AS_THEY_ARE: Final = (torch.int32, torch.int64)
_OF_THIS_MACHINE: Final = (np.dtype(np.int32), np.dtype(np.int64))
_SHORT: Final = (torch.int8, torch.int16, torch.uint8, torch.uint16)
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TYPES: Final = "integers, or floats that are whole and small enough to be exact"
_AS_INTEGERS: Final = "pass integers, such as keys.astype('int64'), and leave them integers on the way to the layer"


def whole_keys(keys: Tensor, where: str, shape: Sequence[int] | None = None) -> Tensor:
    """Return keys as int32 or int64, of the same shape and value.

    Floats are taken where they must be what the user meant: whole, and below 2^p in magnitude, where p is the number of
    bits of the type's significand. From there on the type does not hold every whole number, so that a key may already
    have been rounded to its neighbour. A float key on a GPU costs one wait for the device.

    Args:
        keys: of any type and shape.
        where: names layer and feature in errors.
        shape: that the keys had before they were flattened, for the position in errors.

    Raises:
        DataError: a key is not whole, NaN, infinite, too large to be exact or for 64 bits; keys are truth values or of
            another type.

    Example:
        >>> whole_keys(torch.tensor([3.0, -1.0]), "feature 'item'")
        tensor([ 3, -1], dtype=torch.int32)
        >>> whole_keys(torch.tensor([[3.0, 1.5]]), "feature 'item'")
        Traceback (most recent call last):
        ...
        viviane.core.errors.DataError: a key is not a whole number
          where:   feature 'item', row 0 of the batch, column 1
          value:   1.5
          allowed: whole numbers; as float32 below 2^24 in magnitude
          do:      pass integers, ...
    """
    if keys.dtype in _AS_THEY_ARE:
        return keys
    if keys.dtype in _SHORT:
        return keys.to(torch.int32)
    if keys.dtype == torch.uint32:
        return keys.to(torch.int64)
    own_shape = tuple(keys.shape) if shape is None else tuple(shape)
    if keys.dtype == torch.uint64:
        return _unsigned(keys, where, own_shape)
    if keys.dtype in _FLOATS:
        return _floats(keys, where, own_shape)
    raise wrong_type(str(keys.dtype).removeprefix("torch."), where)


def array_keys(array: Any, where: str) -> Tensor:
    """Return the keys of an array of any framework on the CPU, as int32 or int64.

    Raises:
        DataError: as `whole_keys`; and keys are texts or objects.

    Example:
        >>> array_keys(np.array([[1, 2]], np.uint32), "feature 'item'")
        tensor([[1, 2]])
    """
    if type(array) is np.ndarray and array.dtype in _OF_THIS_MACHINE and array.flags.carray:
        return torch.from_numpy(array)  # what follows would return the same, later than a small lookup takes
    if isinstance(array, Tensor):
        return whole_keys(array.detach(), where).cpu()
    try:
        plain = np.asarray(array)
    except ValueError as error:
        raise DataError(
            "keys form no array", where=where, value=type(array).__name__, allowed=_TYPES,
            fix="give each row the same number of keys: pad them, and name the padding key",
        ) from error  # fmt: skip
    if plain.dtype.kind == "O" and plain.size and all(type(one) is int for one in plain.flat):
        plain = _large_integers(plain, where)
    if plain.dtype.kind not in "iuf" and plain.dtype.name != "bfloat16":
        raise wrong_type(plain.dtype.name, where)
    if plain.dtype.itemsize > 8:
        raise wrong_type(plain.dtype.name, where)
    if plain.dtype.name == "bfloat16":  # NumPy's, of JAX and TensorFlow; torch takes its bits
        bits = np.ascontiguousarray(plain).reshape(plain.shape).view(np.int16)
        return whole_keys(torch.from_numpy(bits.copy()).view(torch.bfloat16), where)
    native = np.ascontiguousarray(plain, plain.dtype.newbyteorder("=")).reshape(plain.shape)
    return whole_keys(torch.from_numpy(native if native.flags.writeable else native.copy()), where)


def keys_of_32_bits(keys: Tensor, where: str, fix: str, shape: Sequence[int] | None = None) -> Tensor:
    """Return keys as int32.

    Raises:
        DataError: a key needs 64 bits.

    Example:
        >>> keys_of_32_bits(torch.tensor([5]), "feature 'item'", "")
        tensor([5], dtype=torch.int32)
    """
    if keys.dtype == torch.int64:
        wrong = (keys < -(2**31)) | (keys >= 2**31)
        if bool(wrong.any()):
            at, value = _first(keys, wrong)
            raise DataError(
                "a key needs 64 bits, and would be cut to 32",
                where=f"{where}, {_position(at, tuple(keys.shape) if shape is None else tuple(shape))}",
                value=value, allowed="-2^31 <= key < 2^31", fix=fix,
            )  # fmt: skip
    return keys.to(torch.int32)


def wrong_type(name: str, where: str) -> DataError:
    """Return the error of keys of a type that holds no keys.

    Example:
        >>> print(wrong_type("bool", "feature 'item'"))
        keys are whole numbers
          where:   feature 'item'
          value:   'bool'
          allowed: integers, or floats that are whole and small enough to be exact
          do:      if False is key 0 and True is key 1, pass keys.astype('int32')
    """
    fix = _AS_INTEGERS
    if name == "bool":
        fix = "if False is key 0 and True is key 1, pass keys.astype('int32')"
    elif name.startswith(("str", "bytes", "object", "<U", "|S")):
        fix = "make numbers of texts by keras.layers.StringLookup or Hashing, or by viviane etl"
    return DataError("keys are whole numbers", where=where, value=name, allowed=_TYPES, fix=fix)


def _floats(keys: Tensor, where: str, shape: tuple[int, ...]) -> Tensor:
    limit = 2.0 / torch.finfo(keys.dtype).eps
    wrong = ~((keys == keys.trunc()) & (keys.abs() < limit))  # NaN is not equal to itself; infinity is not below
    if bool(wrong.any()):
        at, value = _first(keys, wrong)
        name, bits = str(keys.dtype).removeprefix("torch."), int(math.log2(limit))
        if math.isnan(value):
            what, fix = "a key is NaN", "fill missing values with a key of their own before the layer"
        elif math.isinf(value):
            what, fix = "a key is infinite", "fill such values with a key of their own before the layer"
        elif value != math.trunc(value):
            what, fix = "a key is not a whole number", _AS_INTEGERS
        else:
            what, fix = f"a key may have been rounded: {name} holds not every whole number from 2^{bits}", _AS_INTEGERS
        raise DataError(
            what, where=f"{where}, {_position(at, shape)}", value=value,
            allowed=f"whole numbers; as {name} below 2^{bits} in magnitude", fix=fix,
        )  # fmt: skip
    return keys.to(torch.int32 if limit <= 2**31 else torch.int64)


def _unsigned(keys: Tensor, where: str, shape: tuple[int, ...]) -> Tensor:
    signed = keys.view(torch.int64)
    wrong = signed < 0
    if bool(wrong.any()):
        at, value = _first(signed, wrong)
        raise _beyond_64_bits(int(value) + 2**64, f"{where}, {_position(at, shape)}")
    return signed


def _large_integers(plain: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    """Return Python's integers, which NumPy keeps as objects where one is beyond 64 bits."""
    for at, value in enumerate(plain.flat):
        if not -(2**63) <= value < 2**63:
            raise _beyond_64_bits(value, f"{where}, {_position(at, plain.shape)}")
    return plain.astype(np.int64)


def _beyond_64_bits(value: int, where: str) -> DataError:
    return DataError(
        "a key is beyond 64 bits with a sign", where=where, value=value, allowed="-2^63 <= key < 2^63",
        fix="hash such keys to 63 bits before the layer",
    )  # fmt: skip


def _first(keys: Tensor, wrong: Tensor) -> tuple[int, Any]:
    at = int(wrong.reshape(-1).to(torch.uint8).argmax())
    return at, keys.reshape(-1)[at].item()


def _position(at: int, shape: tuple[int, ...]) -> str:
    if not shape:
        return "the only key"
    row, *rest = (int(one) for one in np.unravel_index(at, shape))
    column = "" if not rest else f", column {rest[0]}" if len(rest) == 1 else f", place {rest}"
    return f"row {row} of the batch{column}"

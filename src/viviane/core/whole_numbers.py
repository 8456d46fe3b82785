"""Lossless conversion of arrays and lists to integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from viviane.core.errors import DataError
from viviane.core.tensors import check_mask, is_tensor, tensor_array


def whole_numbers(values: Any, dtype: DTypeLike, where: str) -> NDArray[Any]:
    """Return `values` as an integer array of any shape; NumPy alone would truncate 3.9 to 3 and wrap 2^32 to 0.

    Args:
        values: an array, or lists of numbers. Floats are accepted if they are integers.
        dtype: an integer type.
        where: location for the error.

    Raises:
        DataError: a value is not an integer, or does not fit the type; names the first one.

    Example:
        >>> whole_numbers([3, 4.0], "int32", "keys").tolist()
        [3, 4]
    """
    wanted = np.dtype(dtype)
    check_mask(values, where)
    if is_tensor(values):
        values = tensor_array(values, where)
    try:
        # NumPy's common type would round ints beyond 2^53 in a list with floats.
        found = values if isinstance(values, np.ndarray) else np.asarray(values)
        if found.size == 0:
            return found.astype(wanted)
        if found.dtype.kind == "f" and not isinstance(values, np.ndarray):
            found = np.asarray(values, dtype=object)
        if found.dtype == object:
            return _from_objects(found, wanted, where)
    except DataError:
        raise
    except (ValueError, TypeError, OverflowError, RuntimeError, np.ma.MAError) as error:  # of tensors inside lists
        raise _refusal(str(error).splitlines()[0][:200], wanted, where) from error
    if found.dtype.kind not in "iufb":
        raise _refusal(str(found.dtype), wanted, where)
    limits = np.iinfo(wanted)
    if found.dtype.kind == "f":
        # float(max) rounds up to a power of two, which does not fit.
        good = (np.floor(found) == found) & (found >= float(limits.min)) & (found < float(limits.max) + 1.0)
    elif found.dtype.kind == "b" or np.can_cast(found.dtype, wanted):
        return found.astype(wanted, copy=False)
    else:
        low = limits.min if found.dtype.kind == "i" else 0
        good = (found >= max(low, np.iinfo(found.dtype).min)) & (found <= min(limits.max, np.iinfo(found.dtype).max))
    if not good.all():
        raise _refusal(found[~good].flat[0].item(), wanted, where)
    return found.astype(wanted)


def _from_objects(found: NDArray[Any], wanted: np.dtype[Any], where: str) -> NDArray[Any]:
    limits = np.iinfo(wanted)
    for value in found.flat:
        if isinstance(value, (str, bytes)) or int(value) != value or not limits.min <= int(value) <= limits.max:
            raise _refusal(value, wanted, where)
    return np.array([int(value) for value in found.flat], wanted).reshape(found.shape)


def _refusal(value: Any, wanted: np.dtype[Any], where: str) -> DataError:
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print longer ones
        value = f"an integer of {value.bit_length()} bits"
    return DataError("not an integer of this type", where=where, value=value, allowed=f"integers of {wanted}")

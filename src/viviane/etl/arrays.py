"""Numbers between Arrow and NumPy, without pandas.

`pyarrow.array`, `pyarrow.scalar` and `to_numpy` import pandas where it is installed, in order to recognize its objects:
0.2 s, a tenth of the time of a small input. What every run passes through uses these instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def array_of(values: NDArray[Any]) -> Any:
    """Return an Arrow array over the memory of a NumPy array of numbers, which must not change from then on; of truth
    values, a copy.

    Example:
        >>> array_of(np.array([1.5, 2.0])).to_pylist()
        [1.5, 2.0]
    """
    kind: Any = pa.from_numpy_dtype(values.dtype)
    stored = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    buffer: Any = pa.py_buffer(stored)  # type: ignore[arg-type]
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def scalar_of(value: float, kind: pa.DataType | None = None) -> Any:
    """Return an Arrow scalar: a float64, or a number of the given type.

    Example:
        >>> scalar_of(2, pa.int8())
        <pyarrow.Int8Scalar: 2>
    """
    scalar = array_of(np.array([value], np.float64))[0]
    return scalar if kind is None else scalar.cast(kind)


def numbers_of(values: Any) -> NDArray[Any]:
    """Return the numbers or truth values of an Arrow array without missing values, of numbers without a copy.

    Example:
        >>> numbers_of(pa.array([True, False])).tolist()
        [True, False]
    """
    if pa.types.is_boolean(values.type):
        return np.from_dlpack(values.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(values)


def neighbours(inside: NDArray[np.bool_]) -> slice | NDArray[np.bool_]:
    """Return which places are inside: a slice where they are neighbours, as in a split by rows, so that nothing is
    copied.

    Example:
        >>> neighbours(np.array([False, True, True])), neighbours(np.array([True, False, True])).tolist()
        (slice(1, 3, None), [True, False, True])
    """
    count = int(np.count_nonzero(inside))
    first = int(inside.argmax()) if count else 0
    return slice(first, first + count) if inside[first : first + count].all() else inside

"""Columns of numbers side by side in the matrices of a batch, checked while they are copied.

    M_f[b, p_f : p_f + w_f] = column_f[b, :]        in the type of the matrix

Shapes: F columns, B rows, w_f numbers of a row in column f, which begin at place p_f of a row of matrix M_f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from numpy.typing import NDArray

from viviane.ops.dispatch import choose, load

__all__ = ["ANY_ID", "Join", "JoinedColumn", "prepare_join"]

Join: TypeAlias = Callable[[Sequence[NDArray[Any]], Sequence[NDArray[Any]]], bool]
"""Takes columns and matrices."""
ANY_ID: Final = (-(2**63), 2**63 - 1)
"""The range of ids that may be any of 64 bits."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class JoinedColumn:
    """Where a column goes.

    Args:
        matrix: number of its matrix.
        place: of its first number in a row of the matrix.
        width: numbers of a row.
        dtype: of the matrix: "int32" or "int64" of ids, "float32" of numbers.
        ranges: the least and the greatest id at each of the `width` places; empty for numbers.
    """

    matrix: int
    place: int
    width: int
    dtype: str
    ranges: tuple[tuple[int, int], ...] = ()


def prepare_join(columns: Sequence[JoinedColumn]) -> Join:
    """Return what copies columns into matrices, and returns whether all numbers are finite and all ids in range.

    Its arguments are the F columns (int32 or int64 for ids, float32 or float64 for numbers, (B, w_f) or flat, in C
    order and aligned), and the matrices (in C order, B rows each). Where it returns False, these hold anything.

    Raises:
        ValueError: a column of ids lacks a range.

    Example:
        >>> import numpy as np
        >>> ranges = ((0, 8),), ((0, 7),)
        >>> join = prepare_join([JoinedColumn(0, place, 1, "int32", ranges[place]) for place in range(2)])
        >>> ids = np.zeros((2, 2), np.int32)
        >>> join([np.array([5, 6]), np.array([7, 7])], [ids]), ids.tolist()
        (True, [[5, 7], [6, 7]])
        >>> join([np.array([5, 6]), np.array([7, 8])], [ids])
        False
    """
    name = "reference" if choose(_CPU) == "reference" else "cpu"
    for one in columns:
        if len(one.ranges) != (0 if one.dtype == "float32" else one.width):
            raise ValueError(f"{one}: a range for each id of a row, and none for numbers")
    found: Join = load("joined_columns", name).prepare_join(tuple(columns))
    return found

"""Joining columns in NumPy: the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.ops.joined_columns import Join, JoinedColumn


def prepare_join(columns: Sequence[JoinedColumn]) -> Join:
    """Return what copies columns into matrices, and returns whether all of them are right."""

    def join(values: Sequence[NDArray[Any]], matrices: Sequence[NDArray[Any]]) -> bool:
        right = True
        for column, own in zip(columns, values, strict=True):
            target = matrices[column.matrix][:, column.place : column.place + column.width]
            for place, (low, high) in enumerate(column.ranges):
                ids = own.reshape(target.shape)[:, place]
                right &= bool(((ids >= low) & (ids <= high)).all())
            with np.errstate(over="ignore"):  # beyond float32 a number becomes infinite
                target[...] = own.reshape(target.shape).astype(column.dtype)
            right &= column.dtype != "float32" or bool(np.isfinite(target).all())
        return right

    return join

"""Matrices and vectors side by side in one tensor, so that one launch brings all weights of a model to 16 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_UNIT_BYTES = 16  # rows of a matrix begin at multiples of it, which tensor cores and tensor copies want
_START = 128  # numbers; each part begins at a multiple of it


class Packing(NamedTuple):
    """Offsets of parts in a packed tensor.

    Args:
        starts: the first number of each part.
        shapes: of the parts in the packed tensor: rows are padded with zeros to multiples of 16 bytes.
        size: of the whole.
    """

    starts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    size: int

    def parts(self, packed: Tensor) -> list[Tensor]:
        """Return views of the parts."""
        offset = packed.storage_offset()
        return [
            packed.as_strided(shape, (shape[1], 1) if len(shape) == 2 else (1,), offset + start)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]


def packing(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Packing:
    """Lay out matrices (n, k) and vectors (n).

    Example:
        >>> packing([(2, 13), (2,)], torch.bfloat16)
        Packing(starts=(0, 128), shapes=((2, 16), (2,)), size=256)
    """
    key = tuple(map(tuple, shapes))
    try:
        return _known_packing(key, dtype)
    except TypeError:  # sizes that a compiler keeps open have no hash
        return _packing(key, dtype)


def _packing(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Packing:
    starts, padded, place = [], [], 0
    for shape in shapes:
        starts.append(place)
        padded.append((shape[0], padded_width(shape[1], dtype)) if len(shape) == 2 else tuple(shape))
        place += -(-math.prod(padded[-1]) // _START) * _START
    return Packing(tuple(starts), tuple(padded), place)


_known_packing = cache(_packing)


def key_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[object, ...]:
    """Return under which key tensors that are packed ahead of their use lie; see `viviane.ops.capture.run_ahead`.

    Example:
        >>> one = torch.ones(2)
        >>> key_of([one], torch.float16) == key_of([one[:]], torch.float16) != key_of([one], torch.float32)
        True
    """
    return ("packed", dtype, *(one.data_ptr() for one in tensors))


def padded_width(width: int, dtype: torch.dtype) -> int:
    """Return the least width whose rows are a multiple of 16 bytes.

    Example:
        >>> padded_width(13, torch.bfloat16), padded_width(13, torch.float32), padded_width(16, torch.float16)
        (16, 16, 16)
    """
    unit = _UNIT_BYTES // dtype.itemsize
    return -(-width // unit) * unit

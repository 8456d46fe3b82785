"""Memory for batches, used again when a batch is gone: fresh memory costs as much as the copy into it."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROUND: Final = 1 << 16  # bags differ in size from batch to batch: sizes are rounded up, so that they share buffers
_SMALLEST: Final = 1 << 15  # smaller ones come fast from the allocator
_KEPT_BYTES: Final = 1 << 28


def _references(bases: Sequence[NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(base) for base in bases]


# References to a buffer that no tensor uses. How many the count itself adds differs between versions of Python.
_UNUSED: Final = _references([np.empty(1, np.uint8)])[0]


class Buffers:
    """Makes tensors with any content; safe for any number of threads.

    A buffer is free again when every tensor and array that shows it is gone: each of them holds a reference to it.

    Args:
        pin_memory: page-locked memory; torch keeps a store of its own for that.
        kept_bytes: memory beyond this is given back at once.

    Example:
        >>> buffers = Buffers()
        >>> first = buffers.new((1000, 100), torch.int32)
        >>> address = first.data_ptr()
        >>> del first
        >>> buffers.new((1000, 100), torch.float32).data_ptr() == address
        True
    """

    def __init__(self, pin_memory: bool = False, kept_bytes: int = _KEPT_BYTES) -> None:
        self._pin_memory = pin_memory
        self._room = kept_bytes
        self._lock = threading.Lock()
        self._by_size: dict[int, list[NDArray[np.uint8]]] = {}

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of some shape and type."""
        size = math.prod(shape) * dtype.itemsize
        if self._pin_memory or size < _SMALLEST:
            return torch.empty(shape, dtype=dtype, pin_memory=self._pin_memory)
        rounded = -(-size // _ROUND) * _ROUND
        with self._lock:
            base = self._free(rounded)
            if base is None:
                base = np.empty(rounded, np.uint8)
                if rounded <= self._room:
                    self._room -= rounded
                    self._by_size.setdefault(rounded, []).append(base)
            shown: Any = base[:size]
        return torch.from_numpy(shown).view(dtype).view(shape)

    def _free(self, size: int) -> NDArray[np.uint8] | None:
        bases = self._by_size.get(size, [])
        return next((base for base, count in zip(bases, _references(bases), strict=True) if count == _UNUSED), None)

"""Reusable memory for batches: allocating new memory takes as long as copying into it.

Memory that a GPU copies asynchronously must not be written before the copy is finished, even if no tensor refers to it
any more. torch's caching allocator for page-locked memory ensures this: a copy records an event with the memory, which
is reused only after the event. So all page-locked memory comes from this allocator, one allocation per batch.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROUND: Final = 1 << 16  # bags differ in size between batches: sizes are rounded up so that buffers can be reused
_SMALLEST: Final = 1 << 15  # the allocator is fast for smaller sizes
_KEPT_BYTES: Final = 1 << 28
ALIGNED: Final = 256  # bytes, torch's alignment of separate GPU tensors, so kernels see no difference

_ARRAY_TYPES: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}

Form = tuple[tuple[int, ...], torch.dtype]
Maker = Callable[[], Tensor]


class Memory(Protocol):
    """Allocates uninitialized arrays of float32, int32 or int64, and tensors that share their memory."""

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        """Return a function that creates a tensor of a shape and type, and an array of the same memory.

        Each torch call releases and reacquires the GIL, which delays the thread that launches kernels. So a reader
        thread writes to the array, and the consumer of the batch creates the tensor.
        """
        ...


def _references(bases: Sequence[NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(base) for base in bases]


# Reference count of an unused buffer. The number that the count itself adds differs between Python versions.
_UNUSED: Final = _references([np.empty(1, np.uint8)])[0]


class Buffers:
    """Allocates uninitialized tensors; thread-safe.

    A buffer is free again when no tensor or array refers to it any more: each of them holds a reference.

    Args:
        pin_memory: use page-locked memory, all tensors of a batch in one allocation.
        kept_bytes: unused memory beyond this is freed immediately.

    Example:
        >>> buffers = Buffers()
        >>> make, array = buffers.new((1000, 100), torch.int32)
        >>> address = make().data_ptr()
        >>> del make, array
        >>> buffers.new((1000, 100), torch.float32)[0]().data_ptr() == address
        True
    """

    def __init__(self, pin_memory: bool = False, kept_bytes: int = _KEPT_BYTES) -> None:
        self.pin_memory = pin_memory
        self._room = kept_bytes
        self._lock = threading.Lock()
        self._by_size: dict[int, list[NDArray[np.uint8]]] = {}

    def for_batch(self, forms: Iterable[Form]) -> Memory:
        """Return memory for tensors of these shapes and types, to be created in this order."""
        return PackedMemory(forms, pin_memory=True) if self.pin_memory else self

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        """Return a function that creates a tensor of a shape and type, and an array of the same memory."""
        size = math.prod(shape) * dtype.itemsize
        array: NDArray[Any]
        if size < _SMALLEST:
            array = np.empty(shape, _ARRAY_TYPES[dtype])
            return partial(torch.from_numpy, array), array
        rounded = -(-size // _ROUND) * _ROUND
        with self._lock:
            base = self._free(rounded)
            if base is None:
                base = np.empty(rounded, np.uint8)
                if rounded <= self._room:
                    self._room -= rounded
                    self._by_size.setdefault(rounded, []).append(base)
            array = np.ndarray(shape, _ARRAY_TYPES[dtype], base)
        return partial(torch.from_numpy, array), array

    def _free(self, size: int) -> NDArray[np.uint8] | None:
        bases = self._by_size.get(size, [])
        return next((base for base, count in zip(bases, _references(bases), strict=True) if count == _UNUSED), None)


class PackedMemory:
    """Tensors in one allocation, each at a multiple of 256 bytes, so that they are copied in one transfer.

    Args:
        forms: shapes and types of the tensors.
        pin_memory: use page-locked memory.

    Example:
        >>> piece = PackedMemory([((2, 3), torch.float32), ((2,), torch.int64)])
        >>> (dense, _), (ids, _) = piece.new((2, 3), torch.float32), piece.new((2,), torch.int64)
        >>> ids().data_ptr() - dense().data_ptr()
        256
    """

    def __init__(self, forms: Iterable[Form], pin_memory: bool = False) -> None:
        size = sum(_rounded(math.prod(shape) * dtype.itemsize) for shape, dtype in forms)
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
        self._array = self._bytes.numpy()
        self._typed: dict[torch.dtype, Tensor] = {}
        self._used = 0

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        """Return a function that creates the next tensor, a view of the allocation, and an array of the same memory."""
        size = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, self._used + _rounded(size)
        array: NDArray[Any] = np.ndarray(shape, _ARRAY_TYPES[dtype], self._array, start)
        return partial(self._tensor, shape, dtype, start), array

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
        whole = self._typed.get(dtype)
        if whole is None:
            whole = self._typed[dtype] = self._bytes.view(dtype)
        strides = (1,) if len(shape) == 1 else (max(1, shape[1]), 1)
        return whole.as_strided(shape, strides, start // dtype.itemsize)


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED

"""Memory for batches, used again when a batch is gone: fresh memory costs as much as the copy into it.

What a GPU copies on its own must not be written to before the copy is done, though no tensor shows it any more. torch's
store of page-locked memory sees to that: a copy leaves an event with the memory, and the memory is given out again
after the event. So all page-locked memory comes from there, one piece a batch.
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

_ROUND: Final = 1 << 16  # bags differ in size from batch to batch: sizes are rounded up, so that they share buffers
_SMALLEST: Final = 1 << 15  # smaller ones come fast from the allocator
_KEPT_BYTES: Final = 1 << 28
ALIGNED: Final = 256  # bytes, as torch aligns tensors of their own on a GPU: kernels see no difference

_ARRAY_TYPES: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}

Form = tuple[tuple[int, ...], torch.dtype]
Maker = Callable[[], Tensor]


class Memory(Protocol):
    """Makes arrays of float32, int32 or int64 with any content, and tensors that show the same memory."""

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        """Return what makes a tensor of some shape and type, and its array.

        Each call of torch gives up the interpreter's lock and asks for it again, for which the thread that launches
        kernels pays: a reader's thread writes to the array, and who takes the batch makes the tensor.
        """
        ...


def _references(bases: Sequence[NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(base) for base in bases]


# References to a buffer that no tensor uses. How many the count itself adds differs between versions of Python.
_UNUSED: Final = _references([np.empty(1, np.uint8)])[0]


class Buffers:
    """Makes tensors with any content; safe for any number of threads.

    A buffer is free again when every tensor and array that shows it is gone: each of them holds a reference to it.

    Args:
        pin_memory: page-locked memory, all tensors of a batch in one piece.
        kept_bytes: memory beyond this is given back at once.

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
        """Return memory for tensors of these shapes and types, to be made in this order."""
        return PackedMemory(forms, pin_memory=True) if self.pin_memory else self

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        """Return what makes a tensor of some shape and type, and its array."""
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
    """Tensors side by side in one piece of memory, each at a multiple of 256 bytes, so that one copy moves them all.

    Args:
        forms: shapes and types of the tensors.
        pin_memory: page-locked memory.

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
        """Return what makes the next tensor, of one or two dimensions, a part of torch's own storage; and its array."""
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

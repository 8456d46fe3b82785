"""Output memory that is used again: touching fresh pages costs more than the lookup that fills them."""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_SMALL_BYTES = 1 << 20  # below, the allocator hands out warm memory by itself
_MOST = 4
_WIDE_LOAD = 8  # numbers of 16 bits


class Memory(Protocol):
    """Where the output of a lookup comes from."""

    def take(self, size: int, width: int, device: torch.device) -> Tensor:
        """Return a matrix (size, width) of whole rows with any content."""
        ...


class Buffers:
    """Hands out matrices (B, W) whose memory is reused when nothing refers to it.

    On a GPU torch's allocator does that already. On the CPU it returns large blocks to the system, which clears
    their pages for the next use; here a NumPy array owns the memory, and as long as a tensor, a view of it or the
    autograd graph is alive, it counts as a reference to that array.

    Args:
        dtype: of the matrices.

    Example:
        >>> buffers = Buffers(torch.float32)
        >>> first = buffers.take(1024, 512, torch.device("cpu"))
        >>> place, view = first.data_ptr(), first[:1]
        >>> del first
        >>> buffers.take(1024, 512, torch.device("cpu")).data_ptr() == place    # a view is alive
        False
        >>> del view
        >>> buffers.take(1024, 512, torch.device("cpu")).data_ptr() == place
        True
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._arrays: list[np.ndarray] = []
        self._lock = threading.Lock()  # between finding an array idle and laying a tensor over it

    def __getstate__(self) -> dict[str, Any]:
        return {"dtype": self.dtype}  # a copy of a model has memory of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def take(self, size: int, width: int, device: torch.device) -> Tensor:
        """Return a matrix (size, width) with any content."""
        num_bytes = size * width * self.dtype.itemsize
        if device.type != "cpu" or num_bytes < _SMALL_BYTES:
            return torch.empty(size, width, dtype=self.dtype, device=device)
        with self._lock:
            flat = torch.from_numpy(self._free(num_bytes))
        return flat[:num_bytes].view(self.dtype).view(size, width)

    def _free(self, num_bytes: int) -> np.ndarray:
        for i in range(len(self._arrays)):
            # Two references: the list's and the call's argument. A tensor over the array would be a third.
            if num_bytes <= self._arrays[i].nbytes <= 2 * num_bytes and sys.getrefcount(self._arrays[i]) == _IDLE:
                return self._arrays[i]
        array = np.empty(num_bytes, dtype=np.uint8)
        self._arrays.append(array)
        if len(self._arrays) > _MOST:  # memory in use lives on with the tensors over it
            self._arrays.pop(0)
        return array


def autocast_buffers(own: Buffers, width: int, device: torch.device) -> Buffers:
    """Return where a lookup's output goes: in autocast's type where float32 would be rounded to it at once.

    On the CPU float32 stays: rounding there costs as much as it saves.

    Example:
        >>> autocast_buffers(Buffers(torch.float32), 8, torch.device("cpu")).dtype
        torch.float32
    """
    rounds = device.type == "cuda" and own.dtype == torch.float32 and width % _WIDE_LOAD == 0
    if not rounds or not torch.is_autocast_enabled("cuda"):
        return own
    return _on_gpu(torch.get_autocast_dtype("cuda"))


@cache
def _on_gpu(dtype: torch.dtype) -> Buffers:
    return Buffers(dtype)


def _idle_count() -> int:
    """Return `sys.getrefcount` of an array that only a list holds; it differs between versions of Python."""
    arrays = [np.empty(1, dtype=np.uint8)]
    return sys.getrefcount(arrays[0])


_IDLE = _idle_count()

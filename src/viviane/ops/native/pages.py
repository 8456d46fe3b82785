"""Memory in large pages, where random rows miss the processor's page tables less often."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_WORTH_BYTES = 4 << 20


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask Linux for huge pages under a large tensor on the CPU; do it before its memory is first written.

    A request, which changes no value: other systems, and kernels without huge pages, keep their ordinary pages.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    num_bytes = tensor.untyped_storage().nbytes()
    if advice is None or tensor.device.type != "cpu" or num_bytes < _WORTH_BYTES:
        return
    start = -(-tensor.untyped_storage().data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    inside = num_bytes - (start - tensor.untyped_storage().data_ptr())
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(inside // mmap.PAGESIZE * mmap.PAGESIZE), ctypes.c_int(advice)
    )


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """Return a vector with any content, in huge pages where it is large."""
    vector = torch.empty(count, dtype=dtype)
    advise_huge_pages(vector)
    return vector

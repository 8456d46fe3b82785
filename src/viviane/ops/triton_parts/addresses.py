"""Many tensors as arguments of one kernel: tuples of addresses and counts for which Triton recompiles nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def address_of(numbers: Tensor) -> int:
    """Return where numbers lie, and in the low bits, which an address leaves free, 3 for int64 and 1 for others.

    Triton recompiles a kernel for other types and alignments of each tensor of a tuple, but not for odd numbers.
    """
    return numbers.data_ptr() + (3 if numbers.dtype == torch.int64 else 1)


def odd(count: int) -> int:
    """Return a count as a number for which Triton recompiles nothing: not 1, and no multiple of 16."""
    return 2 * count + 3


@triton.jit
def count_of(counts, i: tl.constexpr):
    """Return one of the counts that `odd` wrote."""
    return (counts[i] - 3) >> 1


@triton.jit
def pick(addresses, f):
    """Return one of the addresses, with 64 bits: a low one comes with 32."""
    address = tl.full([], 0, tl.int64)
    for i in tl.static_range(len(addresses)):
        address = tl.where(f == i, addresses[i], address)
    return address

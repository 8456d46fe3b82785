"""What kernels do to find NaN and infinite numbers in what they hold."""

from __future__ import annotations

import triton
import triton.language as tl

_largest = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)


@triton.jit
def is_bad(x):
    """Whether float32 numbers are NaN, which no comparison holds for, or infinite."""
    return (tl.abs(x) <= _largest) == 0


@triton.jit
def report_largest(x, status):
    """Set status[0] where one of a tile's numbers, of 32 or 16 bits, is NaN or infinite.

    Without their signs such numbers are the largest as whole ones, so that one comparison does for all.
    """
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    mantissa: tl.constexpr = x.dtype.fp_mantissa_width
    whole = x.to(tl.int32 if bits == 32 else tl.int16, bitcast=True) & ((1 << (bits - 1)) - 1)
    infinite: tl.constexpr = (1 << (bits - 1)) - (1 << mantissa)
    if tl.max(whole) >= infinite:
        tl.store(status, tl.full([], 1, tl.int64))


@triton.jit
def report_bad(bad, status):
    """Set status[0] where one of these (N,) numbers is not 0."""
    if tl.max(bad, 0) > 0:
        tl.store(status, tl.full([], 1, tl.int64))  # every program that finds one stores the same value

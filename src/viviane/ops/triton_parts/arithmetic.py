"""Arithmetic of kernels: types and precision of products, checks for NaN and infinite numbers, stochastic rounding."""

from __future__ import annotations

import torch
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


@triton.jit
def noise(start, rows, columns):
    """Return 32 even random bits for each row and column; start = seed + step * 0x9E3779B1."""
    x = start.to(tl.uint32) + rows.to(tl.uint32)[:, None] * 0x85EBCA77 + columns.to(tl.uint32)[None, :] * 0xC2B2AE3D
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def round_bfloat16(values, random):
    """Round float32 up or down to bfloat16."""
    bits = values.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    kept = tl.where(size < 0x7F800000, bits + (random & 0xFFFF), bits) & 0xFFFF0000
    kept = tl.where(size > 0x7F800000, 0x7FC00000, kept)  # NaN
    return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_float16(values, random):
    """Round float32 up or down to float16."""
    bits = values.to(tl.uint32, bitcast=True)
    large = ((bits + (random & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
    steps = tl.floor(tl.abs(values) * 16777216.0 + (random & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08)
    small = (steps * 5.9604644775390625e-08).to(tl.uint32, bitcast=True) | (bits & 0x80000000)
    small = small.to(tl.float32, bitcast=True)
    kept = tl.where(tl.abs(values) < 6.103515625e-05, small, large)
    kept = tl.where(kept > 65504.0, 65504.0, tl.where(kept < -65504.0, -65504.0, kept))
    return tl.where(values != values, values, kept).to(tl.float16)


@triton.jit
def rounded(values, kind: tl.constexpr, start, rows, columns):
    """Bring new rows (U, D) of float32 to a table's type."""
    result = values
    if kind == tl.bfloat16:
        result = round_bfloat16(values, noise(start, rows, columns))
    elif kind == tl.float16:
        result = round_float16(values, noise(start, rows, columns))
    return result


KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_precision() -> str:
    """Return how float32 products are made: as `torch.set_float32_matmul_precision` says.

    Example:
        >>> dot_precision()
        'ieee'
    """
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

"""Stochastic rounding to 16 bits in Triton: bit by bit that of `viviane.ops.row_update.rounding`."""

from __future__ import annotations

import triton
import triton.language as tl


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

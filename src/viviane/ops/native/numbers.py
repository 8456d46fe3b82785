"""Numbers of 16 bits inside kernels: loads, stores to nearest, stores rounded stochastically.

The stochastic rounding is that of `viviane.ops.row_update.rounding`, bit by bit.
"""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import float32, njit, types, uint16, uint32
from numba.core import cgutils

from viviane.ops.native.memory import float32_at, primitive, uint16_at

FLOAT32: Final = 0
FLOAT16: Final = 1
BFLOAT16: Final = 2
_LANES: Final = 16
KINDS: Final = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
"""The type of a tensor as kernels see it: a constant."""


@primitive
def bits_of(typing: Any, value: types.Type) -> Any:
    """Return the bits of a float32 as uint32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@primitive
def float_of(typing: Any, bits: types.Type) -> Any:
    """Return the float32 that has some bits (uint32)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@primitive
def widen_half(typing: Any, bits: types.Type) -> Any:
    """Return the float32 of a float16's bits (uint16)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build


@primitive
def narrow_to_half(typing: Any, value: types.Type) -> Any:
    """Round a float32 to nearest float16, as bits (uint16)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), build


@primitive
def select(typing: Any, condition: types.Type, one: types.Type, other: types.Type) -> Any:
    """Return one float32 or the other without a branch, which would keep a loop from running in wide pieces."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(args[0], args[1], args[2])

    return types.float32(types.boolean, types.float32, types.float32), build


@primitive
def product(typing: Any, one: types.Type, other: types.Type) -> Any:
    """Return a product of float32 that is rounded before anything is added to it: nothing contracts it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Numba adds its flags to instructions without any; this flag does not affect a product.
        return builder.fmul(*args, flags=("arcp",))

    return types.float32(types.float32, types.float32), build


@primitive
def square_sum(typing: Any, numbers: types.Type, count: types.Type) -> Any:
    """Return the sum of the squares of `count` float32, in wide pieces; the machine code fixes the order for good."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, wide = args[1].type, ir.VectorType(ir.FloatType(), _LANES)
        total = cgutils.alloca_once_value(builder, ir.FloatType()(0.0))
        lanes = cgutils.alloca_once_value(builder, wide([0.0] * _LANES))
        pieces = builder.sdiv(args[1], word(_LANES))
        with cgutils.for_range(builder, pieces) as loop:
            place = builder.gep(args[0], [builder.mul(loop.index, word(_LANES))])
            piece = builder.load(builder.bitcast(place, wide.as_pointer()), align=4)
            builder.store(_plus_square(builder, builder.load(lanes), piece), lanes)
        with cgutils.for_range(builder, builder.sub(args[1], builder.mul(pieces, word(_LANES)))) as loop:
            place = builder.gep(args[0], [builder.add(loop.index, builder.mul(pieces, word(_LANES)))])
            builder.store(_plus_square(builder, builder.load(total), builder.load(place)), total)
        adds = ir.FunctionType(ir.FloatType(), [ir.FloatType(), wide])
        add = cgutils.get_or_insert_function(builder.module, adds, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(add, [builder.load(total), builder.load(lanes)], fastmath=("reassoc",))

    return types.float32(numbers, count), build


def _plus_square(builder: Any, total: Any, one: Any) -> Any:
    return builder.fadd(total, builder.fmul(one, one, flags=("contract",)), flags=("contract",))


@primitive
def add_numbers(typing: Any, sums: types.Type, numbers: types.Type, count: types.Type) -> Any:
    """Add `count` float32 to others that do not overlap with them, in wide pieces; both by their address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, wide = args[2].type, ir.VectorType(ir.FloatType(), _LANES)
        pieces = builder.sdiv(args[2], word(_LANES))
        whole = builder.mul(pieces, word(_LANES))
        for element, start, steps in ((wide, word(0), pieces), (ir.FloatType(), whole, builder.sub(args[2], whole))):
            with cgutils.for_range(builder, steps) as loop:
                places = []
                for address in args[:2]:
                    begin = builder.gep(builder.inttoptr(address, ir.FloatType().as_pointer()), [start])
                    places.append(builder.gep(builder.bitcast(begin, element.as_pointer()), [loop.index]))
                both = [builder.load(place, align=4) for place in places]
                builder.store(builder.fadd(*both), places[0], align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@njit(forceinline=True)
def load(address: int, i: int, kind: int) -> float:
    """Return number i of an array of a kind as float32."""
    if kind == FLOAT32:
        return float32_at(address)[i]
    if kind == FLOAT16:
        return widen_half(uint16_at(address)[i])
    return float_of(uint32(uint32(uint16_at(address)[i]) << 16))


@njit(forceinline=True)
def store(address: int, i: int, value: float, kind: int) -> None:
    """Put a float32 into an array of a kind, rounded to nearest, ties to even."""
    if kind == FLOAT32:
        float32_at(address)[i] = value
    elif kind == FLOAT16:
        uint16_at(address)[i] = narrow_to_half(value)
    else:
        bits = bits_of(value)
        near = uint32(bits + uint32(0x7FFF) + uint32(uint32(bits >> 16) & 1)) >> 16
        uint16_at(address)[i] = uint16(0x7FC0) if math.isnan(value) else uint16(near)


@njit(forceinline=True)
def store_stochastic(address: int, i: int, value: float, kind: int, start: int, column: int) -> None:
    """Put a float32 into an array of a kind; 16 bits are rounded by the noise of row (`start`) and column."""
    if kind == FLOAT32:
        float32_at(address)[i] = value
    elif kind == FLOAT16:
        uint16_at(address)[i] = narrow_to_half(_round_half(value, _noise(start, column)))
    else:
        uint16_at(address)[i] = _round_bfloat(value, _noise(start, column))


@njit(forceinline=True)
def noise_start(seed_and_step: int, row: int) -> int:
    """Return what the noise of a row's columns begins with."""
    return uint32(uint32(seed_and_step) + uint32(uint32(row) * uint32(0x85EBCA77)))


@njit(forceinline=True)
def _noise(start: int, column: int) -> int:
    x = uint32(uint32(start) + uint32(uint32(column) * uint32(0xC2B2AE3D)))
    x = uint32(uint32(x ^ uint32(x >> 16)) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ uint32(x >> 15)) * uint32(0x846CA68B))
    return uint32(x ^ uint32(x >> 16))


@njit(forceinline=True)
def _round_bfloat(value: float, random: int) -> int:
    bits = bits_of(value)
    finite = uint32(bits & 0x7F800000) != uint32(0x7F800000)
    moved = uint32(bits + (uint32(random & 0xFFFF) if finite else uint32(0)))
    return uint16(0x7FC0) if math.isnan(value) else uint16(moved >> 16)


@njit(forceinline=True)
def _round_half(value: float, random: int) -> float:
    bits = bits_of(value)
    size = float_of(uint32(bits & 0x7FFFFFFF))
    moved = uint32(uint32(bits_of(size) + uint32(random & 0x1FFF)) & uint32(0xFFFFE000))
    large = min(float_of(moved), float32(65504.0))
    unit = float32(2.0**-24)
    steps = np.floor(size * float32(2.0**24) + float32(uint32(random & 0xFFFFFF)) * unit)
    kept = steps * unit if size < float32(2.0**-14) else large
    return value if math.isnan(value) else float_of(uint32(bits_of(kept) | uint32(bits & 0x80000000)))

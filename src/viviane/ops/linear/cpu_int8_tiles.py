"""The inner loops of products in 8 bits: rows of numbers to whole numbers of 8 bits, and tiles of their products.

A row x of k numbers becomes q from 0 to 255 with x' = low + step * q. In memory it is `HEAD` bytes, of which the first
eight are low and step, float32, then q. Weights are panels of 16 outputs: (n / 16, k / 4, 16, 4), int8, zeros behind
the last output and input: four products of each of 16 outputs are one instruction.
"""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

from functools import cache
from typing import Any, Final

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import float32, njit, types, uint8
from numba.core import cgutils
from numba.extending import intrinsic

from viviane.ops.linear.cpu_tiles import FEATURES, PANEL, TILES, copy_few, room
from viviane.ops.native.memory import float32_at, uint8_at

HEAD: Final = 16
"""Bytes of a row before its whole numbers."""
GROUP_BYTES: Final = 4 * PANEL
"""Bytes of a panel's weights of four inputs."""
_LANES_BYTES: Final = 3 * GROUP_BYTES
_NAME: Final = "llvm.x86.avx512.vpdpbusd.512"
_SUMS: Final = ir.VectorType(ir.IntType(32), PANEL)
_BYTES: Final = ir.VectorType(ir.IntType(8), GROUP_BYTES)
_FLOATS: Final = ir.VectorType(ir.FloatType(), PANEL)


@cache
def factor_type() -> Any:
    """Return the type of the instruction's factors in this LLVM, bytes or words of four; None where it has none."""
    if not {"avx512f", "avx512vnni"} <= FEATURES:
        return None
    for factors, text in ((_BYTES, "<64 x i8>"), (_SUMS, "<16 x i32>")):
        try:
            code = f"declare <16 x i32> @{_NAME}(<16 x i32>, {text}, {text})"
            llvmlite.binding.parse_assembly(code).verify()
        except RuntimeError:
            continue
        return factors
    return None


def _splat(builder: Any, number: Any) -> Any:
    vector = ir.VectorType(number.type, PANEL)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_SUMS, [0] * PANEL))


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


@intrinsic
def _range_of(typing, x, pieces, low, high, zero):
    """Put the lowest and highest of 16 `pieces` numbers at two addresses, and at a third 0, or NaN of one not finite.

    Each address has room for 16 numbers, one of each lane; what is there takes part.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, pieces, *places = args
        slots = [cgutils.alloca_once(builder, _FLOATS) for _ in places]
        for slot, place in zip(slots, places, strict=True):
            builder.store(_read(builder, place, _FLOATS), slot)
        nothing = ir.Constant(_FLOATS, [0.0] * PANEL)
        with cgutils.for_range(builder, pieces) as loop:
            value = _read(builder, builder.add(x, builder.mul(loop.index, ir.IntType(64)(4 * PANEL))), _FLOATS)
            low, high, zero = (builder.load(slot) for slot in slots)
            builder.store(builder.select(builder.fcmp_ordered("<", value, low), value, low), slots[0])
            builder.store(builder.select(builder.fcmp_ordered(">", value, high), value, high), slots[1])
            builder.store(builder.fadd(zero, builder.fmul(value, nothing)), slots[2])
        for slot, place in zip(slots, places, strict=True):
            builder.store(builder.load(slot), builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), build


@intrinsic
def _round_pieces(typing, x, pieces, low, steps, out):
    """Write the bytes (x - low) * steps + 1/2, cut to whole numbers, of 16 `pieces` numbers."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, pieces, low, steps, out = args
        low, steps = _splat(builder, low), _splat(builder, steps)
        half = ir.Constant(_FLOATS, [0.5] * PANEL)
        few = ir.VectorType(ir.IntType(8), PANEL)
        with cgutils.for_range(builder, pieces) as loop:
            value = _read(builder, builder.add(x, builder.mul(loop.index, ir.IntType(64)(4 * PANEL))), _FLOATS)
            value = builder.fadd(builder.fmul(builder.fsub(value, low), steps), half)
            found = builder.trunc(builder.fptosi(value, _SUMS), few)
            place = builder.add(out, builder.mul(loop.index, ir.IntType(64)(PANEL)))
            builder.store(found, builder.inttoptr(place, few.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32, types.int64), build


@njit
def round_row(x, k, out):
    """Write a row of k numbers in 8 bits; of one with a number that is not finite, a step that is none."""
    lanes = room(_LANES_BYTES)
    low, high, zero = lanes, lanes + GROUP_BYTES, lanes + 2 * GROUP_BYTES
    for lane in range(3 * PANEL):
        float32_at(lanes)[lane] = 0.0  # 0 is always in the range: padding and ReLU give it
    pieces, numbers = k // PANEL, float32_at(x)
    _range_of(x, pieces, low, high, zero)
    lowest, highest, bad = float32(0.0), float32(0.0), float32(0.0)
    for lane in range(PANEL):
        lowest = min(lowest, float32_at(low)[lane])
        highest = max(highest, float32_at(high)[lane])
        bad += float32_at(zero)[lane]
    for i in range(pieces * PANEL, k):
        lowest, highest = min(lowest, numbers[i]), max(highest, numbers[i])
        bad += numbers[i] * float32(0.0)
    span = highest - lowest
    if not span <= float32(3.0e38):  # beyond float32
        bad = float32(np.nan)
    step, steps = span / float32(255.0), float32(0.0)
    if step > float32(1.0e-37):  # below, the inverse is not finite: all numbers are the lowest one
        steps = float32(1.0) / step
    else:
        step = float32(0.0)
    head = float32_at(out)
    head[0], head[1] = lowest, step
    if bad != 0.0:
        head[1] = float32(np.nan)
        return
    _round_pieces(x, pieces, lowest, steps, out + HEAD)
    whole = uint8_at(out + HEAD)
    for i in range(pieces * PANEL, k):
        whole[i] = uint8((numbers[i] - lowest) * steps + float32(0.5))


@intrinsic(prefer_literal=True)
def _tile(typing, rows, panels, x, x_row, weight, panel, groups, numbers, apart, out, out_row, least):
    """out = max(scale (low sum + step q w^T) + bias, least) of a tile: rows by panels of outputs.

    `numbers` has the outputs' scales, sums of weights and biases, `apart` bytes from one another. Strides are in
    bytes; `least` keeps NaN.
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(panels, types.IntegerLiteral):
        return None
    num_rows, num_panels = rows.literal_value, panels.literal_value

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factors = factor_type()
        multiply = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_SUMS, [_SUMS, factors, factors]), _NAME
        )
        _, _, x, x_row, weight, panel, groups, numbers, apart, out, out_row, least = args
        word = ir.IntType(64)

        def at(base: Any, stride: Any, count: int) -> Any:
            return builder.add(base, builder.mul(stride, word(count))) if count else base

        places = [(r, p) for r in range(num_rows) for p in range(num_panels)]
        sums = {place: cgutils.alloca_once(builder, _SUMS) for place in places}
        for slot in sums.values():
            builder.store(ir.Constant(_SUMS, [0] * PANEL), slot)
        xs = [at(x, x_row, r) for r in range(num_rows)]
        ws = [at(weight, panel, p) for p in range(num_panels)]
        with cgutils.for_range(builder, groups) as loop:
            line = builder.mul(loop.index, word(GROUP_BYTES))
            column = builder.add(builder.mul(loop.index, word(4)), word(HEAD))
            weights = [_read(builder, builder.add(one, line), factors) for one in ws]
            for r in range(num_rows):
                wide = _splat(builder, _read(builder, builder.add(xs[r], column), ir.IntType(32)))
                wide = builder.bitcast(wide, factors)
                for p in range(num_panels):
                    slot = sums[r, p]
                    builder.store(builder.call(multiply, [builder.load(slot), wide, weights[p]]), slot)
        floor = _splat(builder, least)
        for (r, p), slot in sums.items():
            low, step = (
                _splat(builder, _read(builder, builder.add(xs[r], word(byte)), ir.FloatType())) for byte in (0, 4)
            )
            scale, total, bias = (
                _read(builder, builder.add(at(numbers, apart, i), word(p * GROUP_BYTES)), _FLOATS) for i in range(3)
            )
            found = builder.fmul(step, builder.sitofp(builder.load(slot), _FLOATS))
            value = builder.fadd(builder.fmul(scale, builder.fadd(builder.fmul(low, total), found)), bias)
            value = builder.select(builder.fcmp_ordered("<", value, floor), floor, value)
            target = builder.add(at(out, out_row, r), word(p * GROUP_BYTES))
            builder.store(value, builder.inttoptr(target, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(rows, panels, *[types.int64] * 9, types.float32), build


def _sweep(rows: int, panels: int) -> Any:
    """Return what computes all outputs of `count` groups of rows."""
    size = rows * GROUP_BYTES

    @njit
    def sweep(count, x, x_row, weight, panel, groups, numbers, apart, out, out_row, n, least):
        whole, p = n // PANEL, 0
        while panels > 1 and p + panels <= whole:
            w, byte = weight + p * panel, p * GROUP_BYTES
            for g in range(count):
                r = g * rows
                _tile(
                    rows, panels, x + r * x_row, x_row, w, panel, groups, numbers + byte, apart,
                    out + byte + r * out_row, out_row, least,
                )  # fmt: skip
            p += panels
        after = room(size)
        while p * PANEL < n:
            w, byte, partial = weight + p * panel, p * GROUP_BYTES, p == whole
            for g in range(count):
                r = g * rows
                target, target_row = out + byte + r * out_row, out_row
                if partial:  # nothing is written behind the last output
                    target, target_row = after, GROUP_BYTES
                _tile(rows, 1, x + r * x_row, x_row, w, panel, groups, numbers + byte, apart, target, target_row, least)
                if partial:
                    for i in range(rows):
                        copy_few(out + byte + (r + i) * out_row, after + i * GROUP_BYTES, n % PANEL)
            p += 1

    return sweep


_MOST, _MORE, _SOME, _ONE = (tile[0] for tile in TILES)
_sweep_most, _sweep_more, _sweep_some, _sweep_one = (_sweep(*tile) for tile in TILES)


@njit
def multiply_rounded(size, x, x_row, weight, panel, groups, numbers, apart, out, out_row, n, least):
    """Compute the outputs of `size` rounded rows; `panel` is the bytes between panels."""
    most = size // _MOST
    _sweep_most(most, x, x_row, weight, panel, groups, numbers, apart, out, out_row, n, least)
    done = most * _MOST
    more = (size - done) // _MORE
    if more:
        _sweep_more(
            more, x + done * x_row, x_row, weight, panel, groups, numbers, apart, out + done * out_row, out_row, n,
            least,
        )  # fmt: skip
        done += more * _MORE
    some = (size - done) // _SOME
    if some:
        _sweep_some(
            some, x + done * x_row, x_row, weight, panel, groups, numbers, apart, out + done * out_row, out_row, n,
            least,
        )  # fmt: skip
        done += some * _SOME
    if done < size:
        _sweep_one(
            size - done, x + done * x_row, x_row, weight, panel, groups, numbers, apart, out + done * out_row,
            out_row, n, least,
        )  # fmt: skip

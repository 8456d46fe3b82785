"""The inner loop of products by packed weights: a tile of outputs stays in registers while the inputs go by.

Packed weights are panels of 16 outputs: (n / 16, k, 16), zeros behind the last output.
"""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

import platform
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from viviane.ops.native.memory import float32_at

PANEL: Final = 16
"""Outputs of a panel."""
PANEL_BYTES: Final = 4 * PANEL


def _features() -> frozenset[str]:
    found = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, on in found.items() if on)


FEATURES: Final = _features()
HAS_FMA: Final = "fma" in FEATURES or platform.machine().lower() in ("aarch64", "arm64")
"""Whether a product and a sum are one instruction here."""

# Rows of a tile, and panels: as many sums as registers hold, and enough of them to hide an instruction's latency.
TILES: Final = ((8, 3), (4, 6), (2, 8), (1, 8)) if "avx512f" in FEATURES else ((6, 1), (4, 1), (2, 3), (1, 4))


@intrinsic(prefer_literal=True)
def _tile(typing, rows, panels, x, x_row, weight, panel, depth, start, start_row, out, out_row, least):
    """out = max(start + x w^T, least) of a tile: rows of x by panels of outputs, summed over `depth` inputs in order.

    Strides are in bytes; `least` keeps NaN.
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(panels, types.IntegerLiteral):
        return None
    num_rows, num_panels = rows.literal_value, panels.literal_value
    vector = ir.VectorType(ir.FloatType(), PANEL)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{PANEL}f32"
        )
        _, _, x, x_row, weight, panel, depth, start, start_row, out, out_row, least = args
        word = ir.IntType(64)

        def at(base: Any, stride: Any, count: int) -> Any:
            return builder.add(base, builder.mul(stride, word(count))) if count else base

        def spread(number: Any) -> Any:
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), PANEL), [0] * PANEL)
            return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)

        def read(address: Any) -> Any:
            return builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)

        places = [(r, p) for r in range(num_rows) for p in range(num_panels)]
        sums = {place: cgutils.alloca_once(builder, vector) for place in places}
        for slot in sums.values():
            builder.store(ir.Constant(vector, [0.0] * PANEL), slot)
        xs = [at(x, x_row, r) for r in range(num_rows)]
        ws = [at(weight, panel, p) for p in range(num_panels)]
        with cgutils.for_range(builder, depth) as loop:
            column = builder.mul(loop.index, word(4))
            line = builder.mul(loop.index, word(PANEL_BYTES))
            weights = [read(builder.add(one, line)) for one in ws]
            for r in range(num_rows):
                number = builder.load(builder.inttoptr(builder.add(xs[r], column), ir.FloatType().as_pointer()))
                wide = spread(number)
                for p in range(num_panels):
                    slot = sums[r, p]
                    builder.store(builder.call(fma, [wide, weights[p], builder.load(slot)]), slot)
        floor = spread(least)
        for (r, p), slot in sums.items():
            before = read(builder.add(at(start, start_row, r), word(p * PANEL_BYTES)))
            value = builder.fadd(builder.load(slot), before)
            value = builder.select(builder.fcmp_ordered("<", value, floor), floor, value)
            target = builder.add(at(out, out_row, r), word(p * PANEL_BYTES))
            builder.store(value, builder.inttoptr(target, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(rows, panels, *[types.int64] * 9, types.float32), build


@intrinsic(prefer_literal=True)
def room(typing, size):
    """Return the address of a constant number of bytes on the stack, with any content."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = cgutils.alloca_once(builder, ir.IntType(8), size=ir.IntType(64)(count))
        place.align = 64
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(size), build


@njit(forceinline=True)
def copy_few(target, source, count):
    """Copy `count` numbers from one address to another."""
    to, numbers = float32_at(target), float32_at(source)
    for j in range(count):
        to[j] = numbers[j]


@njit(forceinline=True)
def cross_rows(count, out, out_row, first_layer, last_layer, n):
    """Make cross layers' outputs x_l + x_0 * y of `count` rows y; x_0 and x_l are rows of n numbers."""
    for b in range(count):
        y = float32_at(out + b * out_row)
        x_0, x_l = float32_at(first_layer + 4 * b * n), float32_at(last_layer + 4 * b * n)
        for j in range(n):
            y[j] = x_l[j] + x_0[j] * y[j]


def _sweep(rows: int, panels: int) -> Any:
    """Return what computes all outputs of `groups` groups of rows."""
    size = rows * PANEL_BYTES

    @njit
    def sweep(groups, x, x_row, weight, panel, depth, start, start_row, out, out_row, n, least):
        whole, rest = n // PANEL, n % PANEL
        p = 0
        while panels > 1 and p + panels <= whole:
            w, byte = weight + p * panel, p * PANEL_BYTES
            for g in range(groups):
                r = g * rows
                _tile(
                    rows, panels, x + r * x_row, x_row, w, panel, depth, start + byte + r * start_row, start_row,
                    out + byte + r * out_row, out_row, least,
                )  # fmt: skip
            p += panels
        before, after = room(size), room(size)
        while p * PANEL < n:
            w, byte, partial = weight + p * panel, p * PANEL_BYTES, p == whole
            for g in range(groups):
                r = g * rows
                source, source_row, target, target_row = (
                    start + byte + r * start_row,
                    start_row,
                    out + byte + r * out_row,
                    out_row,
                )
                if partial:  # nothing is read or written behind the last output
                    for i in range(rows):
                        copy_few(before + i * PANEL_BYTES, source + i * source_row, rest)
                    source, source_row, target, target_row = before, PANEL_BYTES, after, PANEL_BYTES
                _tile(rows, 1, x + r * x_row, x_row, w, panel, depth, source, source_row, target, target_row, least)
                if partial:
                    for i in range(rows):
                        copy_few(out + byte + (r + i) * out_row, after + i * PANEL_BYTES, rest)
            p += 1

    return sweep


@intrinsic(prefer_literal=True)
def _dot(typing, lanes, x, weight, count):
    """Return the sum of x_i w_i, in `lanes` sums side by side, then those from left to right by halves."""
    if not isinstance(lanes, types.IntegerLiteral):
        return None
    width = lanes.literal_value
    vector = ir.VectorType(ir.FloatType(), width)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        wide = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{width}f32"
        )
        number = ir.FloatType()
        narrow = cgutils.get_or_insert_function(builder.module, ir.FunctionType(number, [number] * 3), "llvm.fma.f32")
        _, x, weight, count = args
        sums = cgutils.alloca_once(builder, vector)
        builder.store(ir.Constant(vector, [0.0] * width), sums)
        pieces = builder.sdiv(count, word(width))
        with cgutils.for_range(builder, pieces) as loop:
            byte = builder.mul(loop.index, word(4 * width))
            both = [
                builder.load(builder.inttoptr(builder.add(one, byte), vector.as_pointer()), align=4)
                for one in (x, weight)
            ]
            builder.store(builder.call(wide, [*both, builder.load(sums)]), sums)
        total = builder.load(sums)
        while width_of(total) > 1:
            half = width_of(total) // 2
            parts = [
                builder.shuffle_vector(
                    total, ir.Constant(total.type, ir.Undefined),
                    ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(begin, begin + half))),
                )
                for begin in (0, half)
            ]  # fmt: skip
            total = builder.fadd(*parts)
        slot = cgutils.alloca_once(builder, number)
        builder.store(builder.extract_element(total, ir.IntType(32)(0)), slot)
        done = builder.mul(pieces, word(width))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            byte = builder.mul(builder.add(loop.index, done), word(4))
            both = [builder.load(builder.inttoptr(builder.add(one, byte), number.as_pointer())) for one in (x, weight)]
            builder.store(builder.call(narrow, [*both, builder.load(slot)]), slot)
        return builder.load(slot)

    return types.float32(lanes, types.int64, types.int64, types.int64), build


def width_of(value: Any) -> int:
    """Return the number of elements of an LLVM vector."""
    return value.type.count


@njit
def multiply_narrow(size, x, x_row, weight, k, bias, out, out_row, n, least):
    """out = max(b + x w^T, least) for a few outputs: rows of `weight` (n, k) are read as they are."""
    add = float32_at(bias)
    for b in range(size):
        y = float32_at(out + b * out_row)
        for j in range(n):
            value = add[j] + _dot(32, x + b * x_row, weight + 4 * j * k, k)
            y[j] = least if value < least else value


_MOST, _MORE, _SOME, _ONE = (tile[0] for tile in TILES)
_sweep_most, _sweep_more, _sweep_some, _sweep_one = (_sweep(*tile) for tile in TILES)


@njit
def multiply(size, x, x_row, weight, panel, depth, start, start_row, out, out_row, n, least):
    """out = max(start + x w^T, least) for `size` rows; `panel` is the bytes between panels, of `depth` lines each."""
    most = size // _MOST
    _sweep_most(most, x, x_row, weight, panel, depth, start, start_row, out, out_row, n, least)
    done = most * _MOST
    more = (size - done) // _MORE
    if more:
        _sweep_more(
            more, x + done * x_row, x_row, weight, panel, depth, start + done * start_row, start_row,
            out + done * out_row, out_row, n, least,
        )  # fmt: skip
        done += more * _MORE
    some = (size - done) // _SOME
    if some:
        _sweep_some(
            some, x + done * x_row, x_row, weight, panel, depth, start + done * start_row, start_row,
            out + done * out_row, out_row, n, least,
        )  # fmt: skip
        done += some * _SOME
    if done < size:
        _sweep_one(
            size - done, x + done * x_row, x_row, weight, panel, depth, start + done * start_row, start_row,
            out + done * out_row, out_row, n, least,
        )  # fmt: skip

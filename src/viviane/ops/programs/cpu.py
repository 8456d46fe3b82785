"""The kernels of programs: the loop over steps, fully connected layers, copies of columns."""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import float32, types
from numba.core import cgutils

from viviane.ops.native.kernels import OPERANDS, Kernel, invoke, kernel, sources
from viviane.ops.native.memory import copy_bytes, float32_at, int64_at, primitive


@lru_cache(maxsize=1)
def sgemm_address() -> int:
    """Return the address of the matrix product of torch's library, or 0 where it exports none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@primitive
def sgemm(typing, function, m, n, k, a, b, b_stride, c):
    """c (n, m) += b (n, k) a^T, a (m, k), in rows; `b_stride` is the row stride of b: BLAS's sgemm("T", "N", ...)."""
    signature = types.void(*[types.int64] * 8)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)

        def held(kind: Any, value: Any) -> Any:
            slot = cgutils.alloca_once(builder, kind)
            builder.store(value, slot)
            return builder.bitcast(slot, byte)

        def letter(text: str) -> Any:
            return held(ir.IntType(8), ir.Constant(ir.IntType(8), ord(text)))

        function, m, n, k, a, b, b_stride, c = args
        m, n, k, b_stride = (builder.trunc(one, word) for one in (m, n, k, b_stride))
        one = held(ir.FloatType(), ir.Constant(ir.FloatType(), 1.0))
        places = [builder.inttoptr(place, byte) for place in (a, b, c)]
        rows, columns, depth = held(word, m), held(word, n), held(word, k)
        given = [
            letter("t"), letter("n"), rows, columns, depth, one, places[0], depth, places[1], held(word, b_stride),
            one, places[2], rows,
        ]  # fmt: skip
        kind = ir.FunctionType(ir.VoidType(), [byte] * len(given)).as_pointer()
        builder.call(builder.inttoptr(function, kind), given)
        return context.get_dummy_value()

    return signature, build


@cache
def program_kernel(key: str) -> Kernel:
    """Build the loop over steps: operands are the address of (kernel, call) pairs, and how many there are."""

    @kernel
    def run_steps(call):
        _ = key
        steps = int64_at(call[OPERANDS])
        for i in range(call[OPERANDS + 1]):
            own = steps[2 * i + 1]
            int64_at(own)[0] = 0
            invoke(steps[2 * i], own)

    return run_steps


@cache
def linear_kernel(relu: bool, crossed: bool, key: str) -> Kernel:
    """Build out = act(x W^T + b), or x_l + x_0 * (x W^T + b).

    Operands: size, x, stride of its rows, W (n, k), b, out (size, n), n, k, sgemm, x_0, x_l.
    """

    @kernel  # torch's addcmul, too, makes one instruction of the product and the sum
    def linear(call):
        _ = key
        size, n = call[OPERANDS], call[OPERANDS + 6]
        bias, place = call[OPERANDS + 4], call[OPERANDS + 5]
        for b in range(size):
            copy_bytes(place + 4 * b * n, bias, 4 * n)
        sgemm(
            call[OPERANDS + 8], n, size, call[OPERANDS + 7], call[OPERANDS + 3], call[OPERANDS + 1],
            call[OPERANDS + 2], place,
        )  # fmt: skip
        out = float32_at(place)
        if relu:
            for j in range(size * n):
                out[j] = float32(0.0) if out[j] < float32(0.0) else out[j]
        if crossed:
            first, last = float32_at(call[OPERANDS + 9]), float32_at(call[OPERANDS + 10])
            for j in range(size * n):
                out[j] = last[j] + first[j] * out[j]

    return linear


@cache
def columns_kernel(key: str) -> Kernel:
    """Build the copy of rows of bytes. Operands: size, from, bytes between its rows, to, likewise, bytes of a row."""

    @kernel
    def copy_columns(call):
        _ = key
        source, target = call[OPERANDS + 1], call[OPERANDS + 3]
        for b in range(call[OPERANDS]):
            copy_bytes(target + b * call[OPERANDS + 4], source + b * call[OPERANDS + 2], call[OPERANDS + 5])

    return copy_columns


def kernels_key() -> str:
    """Return what kernels are cached by."""
    return sources()

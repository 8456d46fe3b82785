"""The kernels of programs: the loop over steps, copies of columns, and layers that have no operation of their own."""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

from functools import cache

from viviane.ops.native.kernels import OPERANDS, Kernel, invoke, kernel, sources
from viviane.ops.native.memory import copy_bytes, float32_at, int64_at


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
def columns_kernel(key: str) -> Kernel:
    """Build the copy of rows of bytes. Operands: size, from, bytes between its rows, to, likewise, bytes of a row."""

    @kernel
    def copy_columns(call):
        _ = key
        source, target = call[OPERANDS + 1], call[OPERANDS + 3]
        for b in range(call[OPERANDS]):
            copy_bytes(target + b * call[OPERANDS + 4], source + b * call[OPERANDS + 2], call[OPERANDS + 5])

    return copy_columns


@cache
def add_kernel(key: str) -> Kernel:
    """Build the sum of rows. Operands: size, a, bytes between its rows, b, likewise, out (size, width), width."""

    @kernel
    def add_rows(call):
        _ = key
        width = call[OPERANDS + 6]
        for i in range(call[OPERANDS]):
            a = float32_at(call[OPERANDS + 1] + i * call[OPERANDS + 2])
            b = float32_at(call[OPERANDS + 3] + i * call[OPERANDS + 4])
            out = float32_at(call[OPERANDS + 5] + 4 * i * width)
            for j in range(width):
                out[j] = a[j] + b[j]

    return add_rows


@cache
def scaled_vectors_kernel(key: str) -> Kernel:
    """Build out[b, i d + j] = x[b, i] W[i, j].

    Operands: size, x, bytes between its rows, W (s, d), out, bytes between its rows, s, d.
    """

    @kernel
    def scale_vectors(call):
        _ = key
        count, dim, weight = call[OPERANDS + 6], call[OPERANDS + 7], float32_at(call[OPERANDS + 3])
        for b in range(call[OPERANDS]):
            x = float32_at(call[OPERANDS + 1] + b * call[OPERANDS + 2])
            out = float32_at(call[OPERANDS + 4] + b * call[OPERANDS + 5])
            for i in range(count):
                for j in range(dim):
                    out[i * dim + j] = x[i] * weight[i * dim + j]

    return scale_vectors


def kernels_key() -> str:
    """Return what kernels are cached by."""
    return sources()

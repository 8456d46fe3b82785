"""Joining columns on the CPU: one call for all of them."""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import numpy as np
from numba import float32, int32, int64, njit

from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, num_threads, sources
from viviane.ops.native.memory import float32_at, float64_at, int32_at, int64_at, lower_to, take_ticket
from viviane.ops.native.numbers import bits_of

_INT32, _INT64, _FLOAT32, _FLOAT64 = 0, 1, 2, 3
_KINDS: Final = {np.dtype(name): kind for kind, name in enumerate(("int32", "int64", "float32", "float64"))}
_WORDS: Final = 5
"""Of a column: number of its matrix, byte of its first number in a row, width, kind of the matrix, and where the
ranges of its ids begin."""
_ROWS: Final = 64
"""Rows of a ticket: what they take of the matrices stays in the first cache while column after column is written
(256 rows take 1.4 times as long)."""
_MAGNITUDE: Final = 0x7FFFFFFF
_EXPONENT_STEP: Final = 0x00800000
_LIGHT: Final = 4  # numbers copied in the time that other kernels take for one


def prepare_join(columns):
    """Return what copies columns into matrices, and returns whether all of them are right."""
    words: list[int] = []
    bounds: list[int] = []
    for one in columns:
        kind = np.dtype(one.dtype)
        words += (one.matrix, one.place * kind.itemsize, one.width, _KINDS[kind], len(bounds))
        bounds += [bound for pair in one.ranges for bound in pair]
    table, ranges = ((ctypes.c_int64 * len(numbers))(*numbers) for numbers in (words, bounds))
    width, run = sum(one.width for one in columns), join_kernel(sources())

    def join(values, matrices) -> bool:
        size = len(matrices[0]) if matrices else 0
        given = (ctypes.c_int64 * (2 * len(values)))(*[word for one in values for word in _words_of(one)])
        rows = (ctypes.c_int64 * (2 * len(matrices)))(*[
            word for one in matrices for word in (_address(one), one.strides[0])
        ])  # fmt: skip
        wrong = ctypes.c_int64(0)
        operands = (*map(ctypes.addressof, (table, ranges, given, rows, wrong)), len(values), size)
        run(operands, tickets=-(-size // _ROWS), threads=num_threads(size * width // _LIGHT))
        return not wrong.value

    return join


def _words_of(values):
    return _address(values), _KINDS[values.dtype]


def _address(array):
    return array.__array_interface__["data"][0]


@njit(forceinline=True)
def copy_ids(source, kind, first, becomes, step, start, stop, j, width, low, high):
    """Copy number j of each row; `kind` and `becomes` are constants. Returns whether all are in range."""
    outside = False
    # A loop of its own compares several ids at a time, which stores that lie apart would prevent.
    for b in range(start, stop):
        value = int64(int32_at(source)[b * width + j]) if kind == _INT32 else int64_at(source)[b * width + j]
        outside |= (value < low) | (value > high)
    for b in range(start, stop):
        value = int64(int32_at(source)[b * width + j]) if kind == _INT32 else int64_at(source)[b * width + j]
        if becomes == _INT32:
            int32_at(first + b * step)[j] = int32(value)
        else:
            int64_at(first + b * step)[j] = value
    return not outside


@njit(forceinline=True)
def copy_numbers(source, kind, first, step, start, stop, j, width):
    """Copy number j of each row; `kind` is a constant. Returns whether all are finite."""
    carried = int64(0)
    for b in range(start, stop):
        i = b * width + j
        number = float32_at(source)[i] if kind == _FLOAT32 else float32(float64_at(source)[i])
        float32_at(first + b * step)[j] = number
        # An exponent of ones alone, that of NaN and the infinities, carries into bit 31.
        carried |= (int64(bits_of(number)) & _MAGNITUDE) + _EXPONENT_STEP
    return carried <= _MAGNITUDE


@cache
def join_kernel(key: str) -> Kernel:
    """Build the kernel; a ticket is some rows of all columns."""

    @kernel
    def join_columns(call):
        _ = key
        table, ranges = int64_at(call[OPERANDS]), int64_at(call[OPERANDS + 1])
        given, matrices = int64_at(call[OPERANDS + 2]), int64_at(call[OPERANDS + 3])
        wrong, columns, size = int64_at(call[OPERANDS + 4]), call[OPERANDS + 5], call[OPERANDS + 6]
        ticket = take_ticket(call)
        while ticket < call[1]:
            start = ticket * _ROWS
            stop = min(start + _ROWS, size)
            right = True
            for f in range(columns):
                at = f * _WORDS
                source, kind = given[2 * f], given[2 * f + 1]
                first, step = matrices[2 * table[at]] + table[at + 1], matrices[2 * table[at] + 1]
                width, becomes = table[at + 2], table[at + 3]
                low, high = int64(0), int64(0)
                for j in range(width):
                    if kind <= _INT64:
                        low, high = ranges[table[at + 4] + 2 * j], ranges[table[at + 4] + 2 * j + 1]
                    if kind == _INT32 and becomes == _INT32:
                        good = copy_ids(source, _INT32, first, _INT32, step, start, stop, j, width, low, high)
                    elif kind == _INT32:
                        good = copy_ids(source, _INT32, first, _INT64, step, start, stop, j, width, low, high)
                    elif kind == _INT64 and becomes == _INT32:
                        good = copy_ids(source, _INT64, first, _INT32, step, start, stop, j, width, low, high)
                    elif kind == _INT64:
                        good = copy_ids(source, _INT64, first, _INT64, step, start, stop, j, width, low, high)
                    elif kind == _FLOAT32:
                        good = copy_numbers(source, _FLOAT32, first, step, start, stop, j, width)
                    else:
                        good = copy_numbers(source, _FLOAT64, first, step, start, stop, j, width)
                    right &= good
            if not right:
                lower_to(wrong, -1)
            ticket = take_ticket(call)

    return join_columns

"""Kernels beside the index: distinct keys of a batch, and initial values as a function of the key."""

from __future__ import annotations

import math
from functools import cache
from typing import Final

from numba import float32, float64, int32, int64, uint64

from viviane.ops.hash_table.cpu_slots import mix64, mixed
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel
from viviane.ops.native.memory import float64_at, int32_at, int64_at, prefetch, read_whole, take_ticket
from viviane.ops.native.numbers import store

UNIFORM: Final = 0
NORMAL: Final = 1
CONSTANT: Final = 2
LAWS: Final = {"uniform": UNIFORM, "normal": NORMAL, "constant": CONSTANT}

_AHEAD: Final = 16
_GOLDEN: Final = 0x9E3779B97F4A7C15


@cache
def distinct_kernel(key_size: int, key: str) -> Kernel:
    """Build the kernel that numbers the distinct keys of a batch, by a table of int32 that is empty (0) before."""

    @kernel
    def number_keys(call):  # type: ignore[no-untyped-def]
        _ = key
        keys, count = call[OPERANDS], call[OPERANDS + 1]
        table_address, table, mask = call[OPERANDS + 2], int32_at(call[OPERANDS + 2]), call[OPERANDS + 3]
        unique, inverse = int64_at(call[OPERANDS + 4]), int64_at(call[OPERANDS + 5])
        counts, result = int64_at(call[OPERANDS + 6]), int64_at(call[OPERANDS + 7])
        found = 0
        count = count if take_ticket(call) == 0 else 0
        for n in range(count):
            ahead = mixed(read_whole(keys, min(n + _AHEAD, count - 1), key_size))
            prefetch(table_address + 4 * (ahead & mask))
            own = read_whole(keys, n, key_size)
            at = mixed(own) & mask
            while table[at] != 0 and unique[int64(table[at]) - 1] != own:
                at = (at + 1) & mask
            place = int64(table[at]) - 1
            if place < 0:
                place = found
                unique[found] = own
                counts[found] = 0
                found += 1
                table[at] = int32(found)
            inverse[n] = place
            counts[place] += 1
        result[0] = found

    return number_keys


@cache
def initial_kernel(kind: int, law: int, key: str) -> Kernel:
    """Build the kernel that draws rows; see `viviane.ops.hash_table.initial_rows`."""

    @kernel
    def draw_rows(call):  # type: ignore[no-untyped-def]
        _ = key
        weight, dim = call[OPERANDS], call[OPERANDS + 1]
        rows, keys, count = int64_at(call[OPERANDS + 2]), int64_at(call[OPERANDS + 3]), call[OPERANDS + 4]
        seed, numbers = uint64(call[OPERANDS + 5]), float64_at(call[OPERANDS + 6])
        a, b, blocks = numbers[0], numbers[1], call[1]
        block = take_ticket(call)
        while block < blocks:
            for n in range(count * block // blocks, count * (block + 1) // blocks):
                start = mix64(uint64(keys[n]) + seed * uint64(_GOLDEN))
                for column in range(dim):
                    if law == CONSTANT:
                        drawn = a
                    else:
                        x = mix64(start + uint64(column + 1) * uint64(_GOLDEN))
                        if law == UNIFORM:
                            # The product of two numbers of 24 bits is exact: one rounding, fused or not.
                            drawn = a + b * (float64(x >> uint64(40)) / 16777216.0)
                        else:
                            first = (float64(x >> uint64(32)) + 0.5) / 4294967296.0
                            second = float64(x & uint64(0xFFFFFFFF)) / 4294967296.0
                            drawn = a + b * (math.sqrt(-2.0 * math.log(first)) * math.cos(2.0 * math.pi * second))
                    store(weight, rows[n] * dim + column, float32(drawn), kind)
            block = take_ticket(call)

    return draw_rows

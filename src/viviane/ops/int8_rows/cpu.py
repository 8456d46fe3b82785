"""Lookup and pooling of 8-bit rows on the CPU; a thread takes blocks of samples or of bags."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

from numba import float32
from torch import Tensor

from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, num_threads, sources
from viviane.ops.native.memory import (
    float32_at,
    int64_at,
    prefetch_second,
    read_whole,
    stack_floats,
    take_ticket,
    uint8_at,
)
from viviane.ops.native.numbers import KINDS, store

_AHEAD: Final = 16
_BLOCKS_PER_THREAD: Final = 4


def gather_rows(
    storage: Tensor, dim: int, rows: Tensor, out: Tensor, columns: tuple[int, ...], weights: Tensor | None
) -> None:
    """out[b, columns[f] : + D] = weights[b, f] * row rows[b, f]."""
    size = len(out)
    if not rows.numel():
        return
    places = (ctypes.c_int64 * len(columns))(*columns)
    threads = num_threads(rows.numel() * dim)
    gather_kernel(dim, storage.shape[1], KINDS[out.dtype], sources())(
        (storage.data_ptr(), rows.data_ptr(), rows.element_size(), out.data_ptr(), ctypes.addressof(places),
         0 if weights is None else weights.data_ptr(), size, len(columns), out.stride(0)),
        tickets=min(threads * _BLOCKS_PER_THREAD, size), threads=threads,
    )  # fmt: skip


def pool_rows(
    storage: Tensor, dim: int, rows: Tensor, offsets: Tensor, out: Tensor, columns: tuple[int, ...],
    weights: Tensor | None,
) -> None:  # fmt: skip
    """out[b, columns[f] : + D] = sum of weights[n] * row rows[n] over bag f * B + b."""
    size = len(out)
    bags = size * len(columns)
    if not bags:
        return
    places = (ctypes.c_int64 * len(columns))(*columns)
    threads = num_threads((len(rows) + bags) * dim)
    pool_kernel(dim, storage.shape[1], KINDS[out.dtype], sources())(
        (storage.data_ptr(), rows.data_ptr(), rows.element_size(), out.data_ptr(), ctypes.addressof(places),
         0 if weights is None else weights.data_ptr(), size, bags, out.stride(0), offsets.data_ptr(), len(rows)),
        tickets=min(threads * 4 * _BLOCKS_PER_THREAD, bags), threads=threads,
    )  # fmt: skip


@cache
def gather_kernel(dim: int, row_bytes: int, out_kind: int, key: str) -> Kernel:
    """Build the lookup. Its operands are the first nine of `viviane.ops.embedding_bag.cpu.scale_kernel`."""
    tail = row_bytes // 4 - 2

    @kernel
    def gather_int8(call):  # type: ignore[no-untyped-def]
        _ = key
        storage, rows, row_size, out = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2], call[OPERANDS + 3]
        places, weighted, weights = int64_at(call[OPERANDS + 4]), call[OPERANDS + 5], float32_at(call[OPERANDS + 5])
        size, features, width = call[OPERANDS + 6], call[OPERANDS + 7], call[OPERANDS + 8]
        blocks, last = call[1], size * features - 1
        values = stack_floats(dim)
        block = take_ticket(call)
        while block < blocks:
            n = size * block // blocks * features
            for b in range(size * block // blocks, size * (block + 1) // blocks):
                for f in range(features):
                    later = storage + row_bytes * read_whole(rows, min(n + _AHEAD, last), row_size)
                    for byte in range(0, row_bytes + 63, 64):  # rows begin anywhere in a cache line
                        prefetch_second(later + min(byte, row_bytes - 1))
                    start = storage + row_bytes * read_whole(rows, n, row_size)
                    numbers, scale, offset = uint8_at(start), float32_at(start)[tail], float32_at(start)[tail + 1]
                    factor = weights[n] if weighted != 0 else float32(1.0)
                    target = b * width + places[f]
                    # By way of the stack, which overlaps with nothing: both loops then need no checks.
                    for j in range(dim):
                        values[j] = factor * (scale * float32(numbers[j]) + offset)
                    for j in range(dim):
                        store(out, target + j, values[j], out_kind)
                    n += 1
            block = take_ticket(call)

    return gather_int8


@cache
def pool_kernel(dim: int, row_bytes: int, out_kind: int, key: str) -> Kernel:
    """Build the pooling."""
    tail = row_bytes // 4 - 2

    @kernel
    def pool_int8(call):  # type: ignore[no-untyped-def]
        _ = key
        storage, rows, row_size, out = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2], call[OPERANDS + 3]
        places, weighted, weights = int64_at(call[OPERANDS + 4]), call[OPERANDS + 5], float32_at(call[OPERANDS + 5])
        size, bags, width = call[OPERANDS + 6], call[OPERANDS + 7], call[OPERANDS + 8]
        offsets, blocks, last = int64_at(call[OPERANDS + 9]), call[1], call[OPERANDS + 10] - 1
        total = stack_floats(dim)
        block = take_ticket(call)
        while block < blocks:
            for k in range(bags * block // blocks, bags * (block + 1) // blocks):
                for j in range(dim):
                    total[j] = float32(0.0)
                for n in range(max(offsets[k], 0), min(offsets[k + 1], last + 1)):  # bounded for any offsets
                    later = storage + row_bytes * read_whole(rows, min(n + _AHEAD, last), row_size)
                    for byte in range(0, row_bytes + 63, 64):
                        prefetch_second(later + min(byte, row_bytes - 1))
                    start = storage + row_bytes * read_whole(rows, n, row_size)
                    numbers, scale, offset = uint8_at(start), float32_at(start)[tail], float32_at(start)[tail + 1]
                    factor = weights[n] if weighted != 0 else float32(1.0)
                    for j in range(dim):
                        total[j] += factor * (scale * float32(numbers[j]) + offset)
                target = k % size * width + places[k // size]
                for j in range(dim):
                    store(out, target + j, total[j], out_kind)
            block = take_ticket(call)

    return pool_int8

"""Lookup and pooling on the CPU: kernels for a fixed width, rows prefetched some entries ahead.

A thread takes blocks of samples (lookup) or of bags (pooling).
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Final

import torch
from numba import float32
from torch import Tensor

from viviane.ops.embedding_bag.reference import entry_sources
from viviane.ops.native.kernels import OPERANDS, Kernel, PreparedKernel, kernel, num_threads, sources
from viviane.ops.native.memory import (
    copy_bytes,
    float32_at,
    int64_at,
    prefetch_second,
    read_whole,
    stack_floats,
    stream_lines,
    take_ticket,
)
from viviane.ops.native.numbers import FLOAT32, KINDS, load, store

__all__ = ["SmallGather", "entry_sources", "gather_rows", "pool_rows"]

_AHEAD: Final = 16
_STREAMED_BYTES: Final = 16 << 20
_BLOCKS_PER_THREAD = 4


def gather_rows(
    storage: Tensor, rows: Tensor, out: Tensor, columns: tuple[int, ...], weights: Tensor | None, *, aside: bool = False
) -> None:
    """out[b, columns[f] : + D] = weights[b, f] * storage[rows[b, f]]."""
    size, dim = out.shape[0], storage.shape[1]
    if not rows.numel() or not dim:
        return
    places = _places_of(columns)
    if weights is None and storage.dtype == out.dtype:
        run = copy_kernel(dim * storage.element_size(), sources())
    else:
        run = scale_kernel(dim, KINDS[storage.dtype], KINDS[out.dtype], sources())
    threads = num_threads(rows.numel() * dim)
    run(
        (storage.data_ptr(), rows.data_ptr(), rows.element_size(), out.data_ptr(), ctypes.addressof(places),
         0 if weights is None else weights.data_ptr(), size, len(columns), out.stride(0), out.element_size(),
         _streamed(storage, out, columns)),
        tickets=min(threads * _BLOCKS_PER_THREAD, size), threads=threads,
    )  # fmt: skip


class SmallGather:
    """`gather_rows` of batches of one shape, one after the other, in one thread: what stays is prepared.

    Args:
        storage: (R, D), contiguous.
        rows: (B, F), contiguous, where those of each batch will be.
        columns: F columns of the output, each followed by room for D.
        width: W, the columns of the output, contiguous float32.
    """

    def __init__(self, storage: Tensor, rows: Tensor, columns: tuple[int, ...], width: int) -> None:
        size, dim = rows.shape[0], storage.shape[1]
        self._places = (ctypes.c_int64 * len(columns))(*columns)
        self._kept = storage, rows
        if storage.dtype == torch.float32:
            run = copy_kernel(dim * storage.element_size(), sources())
        else:
            run = scale_kernel(dim, KINDS[storage.dtype], FLOAT32, sources())
        self._run = PreparedKernel(run, (
            storage.data_ptr(), rows.data_ptr(), rows.element_size(), 0, ctypes.addressof(self._places), 0, size,
            len(columns), width, 4, 0,
        ))  # fmt: skip

    def gather(self, out: Tensor) -> None:
        """Copy the rows into an output, (B, W)."""
        self._run.set(3, out.data_ptr())
        self._run.run()


def pool_rows(
    storage: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, columns: tuple[int, ...], weights: Tensor | None
) -> None:
    """out[b, columns[f] : + D] = sum of weights[n] * storage[rows[n]] over bag f * B + b."""
    size, dim = out.shape[0], storage.shape[1]
    bags = size * len(columns)
    if not bags or not dim:
        return
    places = (ctypes.c_int64 * len(columns))(*columns)
    threads = num_threads((len(rows) + bags) * dim)
    pool_kernel(dim, KINDS[storage.dtype], KINDS[out.dtype], sources())(
        (storage.data_ptr(), rows.data_ptr(), rows.element_size(), out.data_ptr(), ctypes.addressof(places),
         0 if weights is None else weights.data_ptr(), size, bags, out.stride(0), offsets.data_ptr(), len(rows)),
        tickets=min(threads * 4 * _BLOCKS_PER_THREAD, bags), threads=threads,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _places_of(columns: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return columns as kernels read them; kept, since batches of one layout follow one another."""
    return (ctypes.c_int64 * len(columns))(*columns)


def _streamed(storage: Tensor, out: Tensor, columns: tuple[int, ...]) -> bool:
    """Whether to write past the caches: outputs that they cannot hold anyway, if rows are whole cache lines."""
    item = out.element_size()
    if out.shape[0] * len(columns) * storage.shape[1] * item < _STREAMED_BYTES:
        return False
    places = (out.data_ptr(), out.stride(0) * item, storage.shape[1] * item, *(column * item for column in columns))
    return all(at % 64 == 0 for at in places)


@cache
def copy_kernel(row_bytes: int, key: str) -> Kernel:
    """Build the lookup of rows that are copied as they are."""

    @kernel
    def gather_copy(call):  # type: ignore[no-untyped-def]
        _ = key
        storage, rows, row_size, out = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2], call[OPERANDS + 3]
        places = int64_at(call[OPERANDS + 4])
        size, features = call[OPERANDS + 6], call[OPERANDS + 7]
        width, item = call[OPERANDS + 8], call[OPERANDS + 9]
        blocks, last = call[1], size * features - 1
        streamed = call[OPERANDS + 10] != 0
        block = take_ticket(call)
        while block < blocks:
            n = size * block // blocks * features
            for b in range(size * block // blocks, size * (block + 1) // blocks):
                for f in range(features):
                    later = min(n + _AHEAD, last)
                    start = storage + row_bytes * read_whole(rows, later, row_size)
                    for byte in range(0, row_bytes, 64):
                        prefetch_second(start + byte)
                    row = read_whole(rows, n, row_size)
                    target = out + item * (b * width + places[f])
                    if streamed:
                        stream_lines(target, storage + row_bytes * row, row_bytes)
                    else:
                        copy_bytes(target, storage + row_bytes * row, row_bytes)
                    n += 1
            block = take_ticket(call)

    return gather_copy


@cache
def scale_kernel(dim: int, kind: int, out_kind: int, key: str) -> Kernel:
    """Build the lookup of rows that are multiplied or change their type."""
    row_bytes = dim * (4 if kind == 0 else 2)

    @kernel
    def gather_scale(call):  # type: ignore[no-untyped-def]
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
                    later = min(n + _AHEAD, last)
                    start = storage + row_bytes * read_whole(rows, later, row_size)
                    for byte in range(0, row_bytes, 64):
                        prefetch_second(start + byte)
                    row = read_whole(rows, n, row_size)
                    factor = weights[n] if weighted != 0 else float32(1.0)
                    target = b * width + places[f]
                    # By way of the stack, which overlaps with nothing: both loops then need no checks.
                    for j in range(dim):
                        values[j] = factor * load(storage, row * dim + j, kind)
                    for j in range(dim):
                        store(out, target + j, values[j], out_kind)
                    n += 1
            block = take_ticket(call)

    return gather_scale


@cache
def pool_kernel(dim: int, kind: int, out_kind: int, key: str) -> Kernel:
    """Build the pooling."""
    row_bytes = dim * (4 if kind == 0 else 2)

    @kernel
    def pool(call):  # type: ignore[no-untyped-def]
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
                    later = min(n + _AHEAD, last)
                    start = storage + row_bytes * read_whole(rows, later, row_size)
                    for byte in range(0, row_bytes, 64):
                        prefetch_second(start + byte)
                    row = read_whole(rows, n, row_size)
                    factor = weights[n] if weighted != 0 else float32(1.0)
                    for j in range(dim):
                        total[j] += factor * load(storage, row * dim + j, kind)
                target = k % size * width + places[k // size]
                for j in range(dim):
                    store(out, target + j, total[j], out_kind)
            block = take_ticket(call)

    return pool

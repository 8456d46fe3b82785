"""Sums over pairs on the CPU: one pass forward, one backward, for a fixed width; a ticket is a block of samples."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from numba import float32
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, native_operator, num_threads, sources
from viviane.ops.native.memory import float32_at, stack_floats, take_ticket

_BLOCKS_PER_THREAD = 4


def pair_sums(vectors: Tensor) -> Tensor:
    """Return ((sum_i e_i)^2 - sum_i e_i^2) / 2, (B, D)."""
    return cast(Tensor, _PairSums.apply(vectors))  # type: ignore[no-untyped-call]


class _PairSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        vectors = vectors.contiguous()
        out, sums = sums_of_pairs(vectors)
        ctx.save_for_backward(vectors, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        vectors, sums = ctx.saved_tensors
        return gradient_of_pairs(vectors, sums, grad_outputs[0].contiguous())


@native_operator
def sums_of_pairs(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over pairs and the sums of the vectors, (B, D) each, of contiguous vectors (B, S, D)."""
    size, _, dim = vectors.shape
    out, sums = vectors.new_empty(size, dim), vectors.new_empty(size, dim)
    _run(sum_kernel(dim, sources()), vectors, (vectors, sums, out))
    return out, sums


@native_operator
def gradient_of_pairs(vectors: Tensor, sums: Tensor, given: Tensor) -> Tensor:
    """Return the gradient of the vectors, (B, S, D), from that of the sums over pairs (`given`); all are contiguous."""
    gradient = torch.empty_like(vectors)
    _run(spread_kernel(vectors.shape[2], sources()), vectors, (vectors, sums, given, gradient))
    return gradient


def _run(run: Kernel, vectors: Tensor, tensors: tuple[Tensor, ...]) -> None:
    size, count, _ = vectors.shape
    threads = num_threads(vectors.numel())
    places = (one.data_ptr() for one in tensors)
    run((size, count, *places), tickets=min(threads * _BLOCKS_PER_THREAD, size), threads=threads)


@cache
def sum_kernel(dim: int, key: str) -> Kernel:
    """Build the forward kernel, which keeps the sums of the vectors for backward."""

    @kernel
    def sum_pairs(call):  # type: ignore[no-untyped-def]
        _ = key
        size, count, blocks = call[OPERANDS], call[OPERANDS + 1], call[1]
        vectors, sums, out = (
            float32_at(call[OPERANDS + 2]),
            float32_at(call[OPERANDS + 3]),
            float32_at(call[OPERANDS + 4]),
        )
        total, squares = stack_floats(dim), stack_floats(dim)
        block = take_ticket(call)
        while block < blocks:
            for b in range(size * block // blocks, size * (block + 1) // blocks):
                for j in range(dim):
                    total[j] = float32(0.0)
                    squares[j] = float32(0.0)
                for i in range(count):
                    at = (b * count + i) * dim
                    for j in range(dim):
                        one = vectors[at + j]
                        total[j] += one
                        squares[j] += one * one
                for j in range(dim):
                    sums[b * dim + j] = total[j]
                for j in range(dim):
                    out[b * dim + j] = float32(0.5) * (total[j] * total[j] - squares[j])
            block = take_ticket(call)

    return sum_pairs


@cache
def spread_kernel(dim: int, key: str) -> Kernel:
    """Build the backward kernel: each vector's gradient is g * (the sums - the vector)."""

    @kernel
    def spread_gradient(call):  # type: ignore[no-untyped-def]
        _ = key
        size, count, blocks = call[OPERANDS], call[OPERANDS + 1], call[1]
        vectors, sums = float32_at(call[OPERANDS + 2]), float32_at(call[OPERANDS + 3])
        given, gradient = float32_at(call[OPERANDS + 4]), float32_at(call[OPERANDS + 5])
        g, base = stack_floats(dim), stack_floats(dim)
        block = take_ticket(call)
        while block < blocks:
            for b in range(size * block // blocks, size * (block + 1) // blocks):
                for j in range(dim):
                    g[j] = given[b * dim + j]
                    base[j] = g[j] * sums[b * dim + j]
                for i in range(count):
                    at = (b * count + i) * dim
                    for j in range(dim):
                        gradient[at + j] = base[j] - g[j] * vectors[at + j]
            block = take_ticket(call)

    return spread_gradient

"""The dot interaction on the CPU: a sample's vectors and products stay in the first cache; a ticket is some samples.

Forward turns a sample's vectors on their side, so that one of them is multiplied with all others in wide pieces.
Backward lays the gradient out as the symmetric matrix G, and dz = G z.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, cast

import torch
from numba import float32, njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.ops.dot_interaction.reference import num_pairs
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, native_operator, num_threads, sources
from viviane.ops.native.memory import float32_at, stack_floats, take_ticket

_LANES: Final = 8
_BLOCKS_PER_THREAD = 4


def dot_interaction(dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool) -> Tensor:
    """Return [dense | dots of all pairs | zero], (B, W)."""
    return cast(Tensor, _Dots.apply(dense, embeddings, pad, itself))  # type: ignore[no-untyped-call]


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool) -> Tensor:
        dense, embeddings = None if dense is None else dense.contiguous(), embeddings.contiguous()
        ctx.save_for_backward(dense, embeddings)
        ctx.pad, ctx.itself = pad, itself
        return dots_of_pairs(dense, embeddings, pad, itself)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        dense, embeddings = ctx.saved_tensors
        found = gradients_of_dots(dense, embeddings, grad_outputs[0].contiguous(), ctx.pad, ctx.itself)
        return *found, None, None


@native_operator
def dots_of_pairs(dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool) -> Tensor:
    """Return [dense | dots of all pairs | zero], (B, W), of contiguous inputs."""
    size, s, dim = embeddings.shape
    front = 0 if dense is None else 1
    out = embeddings.new_empty(size, front * dim + num_pairs(s + front, itself) + int(pad))
    _run(dots_kernel(s + front, front, dim, pad, itself, sources()), embeddings, (dense, embeddings, out))
    return out


@native_operator
def gradients_of_dots(
    dense: Tensor | None, embeddings: Tensor, given: Tensor, pad: bool, itself: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of `dense` and `embeddings` from that of the output (`given`); all are contiguous."""
    front, (_, s, dim) = 0 if dense is None else 1, embeddings.shape
    found = None if dense is None else torch.empty_like(dense), torch.empty_like(embeddings)
    run = spread_kernel(s + front, front, dim, pad, itself, sources())
    _run(run, embeddings, (dense, embeddings, given, *found))
    return found


def _run(run: Kernel, embeddings: Tensor, tensors: tuple[Tensor | None, ...]) -> None:
    size, s, _ = embeddings.shape
    threads = num_threads(embeddings.numel() * s)
    places = (0 if one is None else one.data_ptr() for one in tensors)
    run((size, *places), tickets=min(threads * _BLOCKS_PER_THREAD, size), threads=threads)


@njit(forceinline=True)
def copy_numbers(target, to, source, start, step, count):  # type: ignore[no-untyped-def]
    """Copy numbers that lie together to places `step` apart."""
    for k in range(count):
        target[to + k * step] = source[start + k]


@njit(forceinline=True)
def multiply_with_all(sides, i, dots, wide, dim):  # type: ignore[no-untyped-def]
    """Multiply vector i with all vectors, which are transposed."""
    for j in range(wide):
        dots[j] = float32(0.0)
    for k in range(dim):
        one = sides[k * wide + i]
        for j in range(wide):
            dots[j] += one * sides[k * wide + j]


@cache
def dots_kernel(count: int, front: int, dim: int, pad: bool, itself: bool, key: str) -> Kernel:
    """Build the forward kernel for `count` vectors a sample, the dense one (`front`) among them."""
    wide, own = -(-count // _LANES) * _LANES, int(itself)
    width, buffer_size = front * dim + num_pairs(count, itself) + int(pad), dim * wide

    @kernel
    def dot_all_pairs(call):  # type: ignore[no-untyped-def]
        _ = key
        size, blocks = call[OPERANDS], call[1]
        dense, embeddings = float32_at(call[OPERANDS + 1]), float32_at(call[OPERANDS + 2])
        out = float32_at(call[OPERANDS + 3])
        sides, dots = stack_floats(buffer_size), stack_floats(wide)
        for j in range(buffer_size):
            sides[j] = float32(0.0)
        block = take_ticket(call)
        while block < blocks:
            for b in range(size * block // blocks, size * (block + 1) // blocks):
                place = b * width
                if front != 0:
                    copy_numbers(sides, 0, dense, b * dim, wide, dim)
                    copy_numbers(out, place, dense, b * dim, 1, dim)
                    place += dim
                for j in range(front, count):
                    copy_numbers(sides, j, embeddings, (b * (count - front) + j - front) * dim, wide, dim)
                for i in range(1 - own, count):
                    multiply_with_all(sides, i, dots, wide, dim)
                    copy_numbers(out, place, dots, 0, 1, i + own)
                    place += i + own
                if pad:
                    out[place] = float32(0.0)
            block = take_ticket(call)

    return dot_all_pairs


@njit(forceinline=True)
def lay_out(matrix, grad, place, count, own):  # type: ignore[no-untyped-def]
    """Write the gradients of a sample's pairs as a symmetric matrix; z_i . z_i counts twice."""
    for i in range(1 - own, count):
        for j in range(i):
            matrix[i * count + j] = grad[place + j]
            matrix[j * count + i] = grad[place + j]
        matrix[i * count + i] = float32(2.0) * grad[place + i] if own != 0 else float32(0.0)
        place += i + own


@njit(forceinline=True)
def sum_of_vectors(total, matrix, at, vectors, start, count, dim):  # type: ignore[no-untyped-def]
    """Add `count` neighbouring vectors, each by a number of the matrix, to a total on the stack."""
    for j in range(count):
        one = matrix[at + j]
        for k in range(dim):
            total[k] += one * vectors[start + j * dim + k]


@cache
def spread_kernel(count: int, front: int, dim: int, pad: bool, itself: bool, key: str) -> Kernel:
    """Build the backward kernel."""
    own, rest, buffer_size = int(itself), count - front, count * count
    width = front * dim + num_pairs(count, itself) + int(pad)

    @kernel
    def spread_dots(call):  # type: ignore[no-untyped-def]
        _ = key
        size, blocks = call[OPERANDS], call[1]
        dense, embeddings = float32_at(call[OPERANDS + 1]), float32_at(call[OPERANDS + 2])
        grad, to_dense = float32_at(call[OPERANDS + 3]), float32_at(call[OPERANDS + 4])
        to_embeddings = float32_at(call[OPERANDS + 5])
        matrix, total = stack_floats(buffer_size), stack_floats(dim)
        matrix[0] = float32(0.0)  # of the first vector with itself
        block = take_ticket(call)
        while block < blocks:
            for b in range(size * block // blocks, size * (block + 1) // blocks):
                lay_out(matrix, grad, b * width + front * dim, count, own)
                for i in range(count):
                    for k in range(dim):
                        total[k] = float32(0.0)
                    if front != 0:
                        sum_of_vectors(total, matrix, i * count, dense, b * dim, 1, dim)
                    sum_of_vectors(total, matrix, i * count + front, embeddings, b * rest * dim, rest, dim)
                    if front != 0 and i == 0:
                        for k in range(dim):
                            to_dense[b * dim + k] = total[k] + grad[b * width + k]
                    else:
                        copy_numbers(to_embeddings, (b * rest + i - front) * dim, total, 0, 1, dim)
            block = take_ticket(call)

    return spread_dots

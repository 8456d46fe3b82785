"""The dot interaction on a GPU: several samples a program, their vectors read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from viviane.ops.dot_interaction.gpu_kernels import interaction_backward_kernel, interaction_forward_kernel
from viviane.ops.dot_interaction.reference import num_pairs
from viviane.ops.triton_parts.arithmetic import KINDS, dot_precision
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two
from viviane.ops.watch import watched


class PackShape(NamedTuple):
    """What one program does: samples, rows of each (S up to a power of two), columns at a time, warps."""

    samples: int
    block: int
    columns: int
    warps: int


def pack_shape(s: int, dim: int, item_bytes: int) -> PackShape:
    """Choose the shape: small programs, of which many load while others multiply.

    Example:
        >>> pack_shape(27, 128, 2)
        PackShape(samples=1, block=32, columns=128, warps=4)
    """
    block = power_of_two(s)
    columns = max(16, min(power_of_two(dim), 256 // item_bytes))
    return PackShape(max(1, 32 // block), block, columns, 4 if block <= 64 else 8)


def forward(dense: Tensor | None, embeddings: Tensor, pad: bool, itself: bool, dtype: torch.dtype) -> Tensor:
    """Return [dense | dots of all pairs | zero], (B, W)."""
    size, s, _ = embeddings.shape
    out = _output(embeddings if dense is None else dense, dense, (size, s), pad, itself)
    _forward(dense, embeddings.contiguous(), None, out, s, pad, itself, dtype)
    return out


def forward_of_rows(
    dense: Tensor | None, table: Tensor, rows: Tensor, out_dtype: torch.dtype, pad: bool, itself: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Do what `forward` does with table[rows], (B, s, D), without writing these vectors to memory."""
    out = _output(table if dense is None else dense, dense, rows.shape, pad, itself, out_dtype)
    _forward(dense, table, rows.contiguous(), out, rows.shape[1], pad, itself, dtype)
    return out


def _output(
    like: Tensor, dense: Tensor | None, shape: Sequence[int], pad: bool, itself: bool, dtype: torch.dtype | None = None
) -> Tensor:
    size, s = shape
    front, s = (0, s) if dense is None else (dense.shape[1], s + 1)
    return like.new_empty(size, front + num_pairs(s, itself) + int(pad), dtype=dtype)


def _forward(
    dense: Tensor | None, vectors: Tensor, rows: Tensor | None, out: Tensor, s: int, pad: bool, itself: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    dense = None if dense is None else dense.contiguous()
    dim = vectors.shape[-1]
    s += dense is not None
    shape = pack_shape(s, dim, dtype.itemsize)
    with on_device(vectors):
        interaction_forward_kernel[(ceil_div(len(out), shape.samples),)](
            dense, vectors, rows, out, len(out), out.shape[1],
            s=s, dim=dim, front=0 if dense is None else dim, pad=pad, itself=itself, kind=KINDS[dtype],
            precision=dot_precision(), block=shape.block, samples=shape.samples, columns=shape.columns,
            num_warps=shape.warps,
        )  # fmt: skip


def backward(grad: Tensor, dense: Tensor | None, embeddings: Tensor, itself: bool, dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients of the embeddings and, where there is one, of the dense vector."""
    grad, embeddings = grad.contiguous(), embeddings.contiguous()
    dense = None if dense is None else dense.contiguous()
    size, s, dim = embeddings.shape
    s += dense is not None
    found = [torch.empty_like(embeddings)]
    if dense is not None:
        found.append(torch.empty_like(dense))
    shape = pack_shape(s, dim, dtype.itemsize)
    watch = watched(grad.device)
    with on_device(embeddings):
        interaction_backward_kernel[(ceil_div(size, shape.samples),)](
            grad, dense, embeddings, found[0], None if dense is None else found[1],
            None if watch is None else watch.status, size, grad.shape[1],
            s=s, dim=dim, front=0 if dense is None else dim, itself=itself, kind=KINDS[dtype],
            precision=dot_precision(), block=shape.block, samples=shape.samples, columns=shape.columns,
            num_warps=shape.warps,
        )  # fmt: skip
    if watch is not None:
        for one in found:
            watch.add(one)
    return found

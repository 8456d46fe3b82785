"""Lookup and pooling of 8-bit rows on a GPU: tiles of several rows, all of whose loads are in flight together."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.embedding_bag.gpu import gather_shape, pool_shape
from viviane.ops.int8_rows.gpu_kernels import gather_kernel, pool_kernel
from viviane.ops.triton_parts.launch import ceil_div, find_columns, on_device, power_of_two


def gather_rows(
    storage: Tensor, dim: int, rows: Tensor, out: Tensor, columns: tuple[int, ...], weights: Tensor | None
) -> None:
    """out[b, columns[f] : + D] = weights[b, f] * row rows[b, f]."""
    width = out.stride(0)
    if not rows.numel():
        return
    shape = gather_shape(dim, 4)  # as many rows at a time as of float32: the numbers are that wide in registers
    places = find_columns(columns, width, out.device)
    with on_device(storage):
        gather_kernel[(ceil_div(rows.numel(), shape.rows),)](
            storage, storage.view(torch.float32), rows, weights, places.places, out, rows.numel(), len(columns), width,
            places.first, places.step, dim=dim, row_bytes=storage.shape[1], block=power_of_two(dim),
            aligned=places.aligned, num_rows=shape.rows, num_warps=shape.warps,
        )  # fmt: skip


def pool_rows(
    storage: Tensor, dim: int, rows: Tensor, offsets: Tensor, out: Tensor, columns: tuple[int, ...],
    weights: Tensor | None,
) -> None:  # fmt: skip
    """out[b, columns[f] : + D] = sum of weights[n] * row rows[n] over bag f * B + b."""
    size, width = len(out), out.stride(0)
    bags = size * len(columns)
    if not bags:
        return
    shape = pool_shape(dim, len(rows) / bags)
    places = find_columns(columns, width, out.device)
    with on_device(storage):
        pool_kernel[(ceil_div(bags, shape.bags),)](
            storage, storage.view(torch.float32), rows, offsets, weights, places.places, out, bags, len(rows), size,
            width, places.first, places.step, dim=dim, row_bytes=storage.shape[1], block=power_of_two(dim),
            aligned=places.aligned, num_bags=shape.bags, ahead=shape.ahead, num_warps=shape.warps,
        )  # fmt: skip

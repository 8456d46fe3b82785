"""Lookup and pooling on a GPU: tiles of several rows, all of whose loads are in flight together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from viviane.ops.embedding_bag.gpu_kernels import (
    bag_sources_kernel,
    entry_sources_kernel,
    gather_kernel,
    pool_kernel,
)
from viviane.ops.triton_parts.launch import (
    WARP,
    ceil_div,
    few_programs,
    find_columns,
    on_device,
    power_of_two,
    warps_for,
)

_LONG_BAGS = 16
_SHORT_BAGS = 2
_SOURCES = 1024  # that a program writes, or writes at a time


class GatherShape(NamedTuple):
    """What one program of the lookup does: rows it copies, its warps, and the caches' hint for table rows."""

    rows: int
    warps: int
    keep: str


class PoolShape(NamedTuple):
    """What one program of the pooling does: bags it sums, entries of each in flight at once, its warps, cache hint."""

    bags: int
    ahead: int
    warps: int
    keep: str = ""


def gather_shape(dim: int, item_bytes: int) -> GatherShape:
    """Choose the lookup's shape: 2 KiB of rows in flight a warp, each warp a program of its own.

    Example:
        >>> gather_shape(128, 4)
        GatherShape(rows=4, warps=1, keep='evict_last')
    """
    warps = warps_for(dim)
    together = 2048 * warps // (power_of_two(dim) * item_bytes)
    return GatherShape(max(1, min(256, together)), warps, "evict_last")


def aside_shape(dim: int, item_bytes: int) -> GatherShape:
    """Choose the shape of a lookup of few programs: each has four times as many warps and rows on their way.

    Example:
        >>> aside_shape(128, 4)
        GatherShape(rows=16, warps=4, keep='evict_last')
    """
    usual = gather_shape(dim, item_bytes)
    return GatherShape(min(256, 4 * usual.rows), min(8, 4 * usual.warps), usual.keep)


def pool_shape(dim: int, mean_length: float) -> PoolShape:
    """Choose the pooling's shape: 32 numbers a thread in flight, spread over bags or along them by their length.

    Example:
        >>> pool_shape(128, 8.2)
        PoolShape(bags=4, ahead=2, warps=1, keep='')
    """
    warps = warps_for(dim)
    together = max(1, min(64, 32 * WARP * warps // power_of_two(dim)))
    wanted = 8 if mean_length >= _LONG_BAGS else 2 if mean_length >= _SHORT_BAGS else 1
    ahead = min(wanted, together)
    return PoolShape(together // ahead, ahead, warps)


def gather_rows(
    storage: Tensor,
    rows: Tensor,
    out: Tensor,
    columns: tuple[int, ...],
    weights: Tensor | None,
    *,
    aside: bool = False,
) -> None:
    """out[b, columns[f] : + D] = weights[b, f] * storage[rows[b, f]]."""
    dim, width = storage.shape[1], out.stride(0)
    if not rows.numel() or not dim:
        return
    shape = aside_shape(dim, storage.element_size()) if aside else gather_shape(dim, storage.element_size())
    places = find_columns(columns, width, out.device)
    programs = ceil_div(rows.numel(), shape.rows)
    with on_device(storage):
        gather_kernel[(min(programs, few_programs(out.device)) if aside else programs,)](
            storage, rows, weights, places.places, out, rows.numel(), len(columns), width, places.first, places.step,
            dim=dim, block=power_of_two(dim), aligned=places.aligned, num_rows=shape.rows, keep=shape.keep, aside=aside,
            num_warps=shape.warps,
        )  # fmt: skip


def pool_rows(
    storage: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, columns: tuple[int, ...], weights: Tensor | None
) -> None:
    """out[b, columns[f] : + D] = sum of weights[n] * storage[rows[n]] over bag f * B + b."""
    dim, size, width = storage.shape[1], len(out), out.stride(0)
    bags = size * len(columns)
    if not bags or not dim:
        return
    shape = pool_shape(dim, len(rows) / bags)
    places = find_columns(columns, width, out.device)
    with on_device(storage):
        pool_kernel[(ceil_div(bags, shape.bags),)](
            storage, rows, offsets, weights, places.places, out, bags, len(rows), size, width, places.first,
            places.step, dim=dim, block=power_of_two(dim), aligned=places.aligned, num_bags=shape.bags,
            ahead=shape.ahead, keep=shape.keep, num_warps=shape.warps,
        )  # fmt: skip


def entry_sources(offsets: Tensor | None, columns: tuple[int, ...], size: int, apart: int, out: Tensor) -> None:
    """Write where in a flat gradient of rows `apart` from one another each entry's vector begins."""
    if not len(out):
        return
    bags = size * len(columns)
    places = find_columns(columns, 0, out.device)  # as for any width: what they are does not depend on it
    with on_device(out):
        if offsets is None:
            entry_sources_kernel[(ceil_div(len(out), _SOURCES),)](
                places.places, out, len(out), len(columns), apart, places.first, places.step, block=_SOURCES
            )
            return
        mean_length = len(out) / bags
        ahead = 32 if mean_length >= _LONG_BAGS else 8 if mean_length >= 2 * _SHORT_BAGS else 2
        num_bags = _SOURCES // ahead
        bag_sources_kernel[(ceil_div(bags, num_bags),)](
            offsets, places.places, out, bags, len(out), size, apart, places.first, places.step, num_bags=num_bags,
            ahead=ahead,
        )  # fmt: skip

"""Blocks, the output and pooled columns on a GPU: one kernel each."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from viviane.ops.capture import refuse_capture
from viviane.ops.embedding_bag.gpu import pool_shape
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two, whole_programs
from viviane.ops.wire_blocks import SUMMED_TOGETHER, Columns, PooledPiece, Segments
from viviane.ops.wire_blocks.gpu_kernels import (
    cut_kernel,
    difference_kernel,
    difference_record_kernel,
    join_kernel,
    pack_kernel,
    pool_kernel,
    sum_kernel,
)

_TILE = 2048  # numbers of a program
_WIDEST = 128
_TALL = 8  # rows of a program, which reads its columns' lines once: few, since one waits for the other
_ASIDE_WARPS = 32
"""Of a program beside matrix products: it takes one multiprocessor whole, where small ones on all of them would leave
no product the registers that it needs (four H200: DLRM 1.12 to 1.10 ms, DLRM-DCNv2 3.34 to 3.27)."""
_SUMMED = 512 * _ASIDE_WARPS  # numbers of a program of sums at a time: a thread's are 32 bytes where they have 16 bits
_FIX = "run an iteration with such a batch before the capture"


def pack_rows(rows: Tensor, columns: Columns, out: Tensor) -> None:
    """out[start_k + b * width_k] = part(rows[b, source_k])."""
    size, count = rows.shape[0], len(columns)
    if not size or not count:
        return
    wide = min(_WIDEST, max(32, power_of_two(count)))
    with on_device(rows):
        pack_kernel[(ceil_div(count, wide) * ceil_div(size, _TALL),)](
            rows, columns.table, out, size, count, rows.shape[1], tall=_TALL, wide=wide, divides=columns.divides,
            num_warps=wide // 32,
        )  # fmt: skip


def join_blocks(taken: Tensor, segments: Segments, out: Tensor, factors: Tensor | None) -> None:
    """out[b, segment s] = [out +] factors[b, s] * sum over its sources."""
    count, shape = len(segments.items), _shape(segments, out)
    if len(out) and count:
        with on_device(out):
            join_kernel[(count * ceil_div(len(out), shape.rows),)](
                taken, segments.lines, segments.sources, factors, out, len(out), count, segments.num_sources,
                shape.width, block=shape.block, num_rows=shape.rows, aligned=shape.aligned,
            )  # fmt: skip


def cut_blocks(
    gradient: Tensor, segments: Segments, out: Tensor, factors: Tensor | None, *, aside: bool = False
) -> None:
    """out[source + b * width] = factors[b, s] * gradient[b, segment s]."""
    count, shape = segments.num_sources, _shape(segments, gradient)
    warps = _ASIDE_WARPS if aside else 4
    rows = shape.rows * warps // 4
    programs = count * ceil_div(len(gradient), rows)
    if programs:
        with on_device(gradient):
            cut_kernel[(min(programs, whole_programs(gradient.device)) if aside else programs,)](
                gradient, segments.lines, segments.sources, factors, out, len(gradient), len(segments.items), count,
                shape.width, block=shape.block, num_rows=rows, aligned=shape.aligned, aside=aside, num_warps=warps,
            )  # fmt: skip


class _Shape(NamedTuple):
    """Rows and columns of a program's tile, how far the matrix's rows are apart, and what divides all places."""

    rows: int
    block: int
    width: int
    aligned: int


def _shape(segments: Segments, matrix: Tensor) -> _Shape:
    block, width = power_of_two(segments.widest), matrix.stride(0)
    return _Shape(max(1, min(64, _TILE // block)), block, width, math.gcd(segments.aligned, width))


def first_difference(found: Tensor, truth: Tensor) -> Tensor:
    """[any, place, found[place]] of the first place at which two lists differ."""
    count = len(found)
    place = torch.full((1,), count, dtype=torch.int64, device=found.device)
    record = torch.zeros(3, dtype=torch.int64, device=found.device)
    if count:
        with on_device(found):
            difference_kernel[(ceil_div(count, 1024),)](found, truth, place, count, block=1024)
            difference_record_kernel[(1,)](found, place, record, count, num_warps=1)
    return record


def pool_columns(
    storage: Tensor, rows: Tensor, pieces: tuple[PooledPiece, ...], out: Tensor, weights: Tensor | None, num_rows: int
) -> None:
    """out[b, target : + D] = sum of weights[b, c] * storage[rows[b, c]]; pieces of like length share a launch."""
    (size, row_width), dim, width = rows.shape, storage.shape[1], out.stride(0)
    if not size or not dim:
        return
    aligned, block = math.gcd(16, width, *(one.target for one in pieces)), power_of_two(dim)
    for bags, ahead, warps, table in _classes(pieces, dim, storage.device):
        with on_device(storage):
            pool_kernel[(len(table) * ceil_div(size, bags),)](
                storage, rows, weights, table, out, size, len(table), row_width, width, num_rows, dim=dim, block=block,
                bags=bags, ahead=ahead, aligned=aligned, num_warps=warps,
            )  # fmt: skip


def sum_pieces(base: Tensor, starts: Tensor, first: int, stop: int) -> None:
    """base[starts[p] + i] = sum over p of base[starts[p] + i], first <= i < stop."""
    programs = ceil_div(stop - first, _SUMMED)
    if programs > 0:
        with on_device(base):
            sum_kernel[(min(programs, whole_programs(base.device)),)](
                base, starts, first, stop, pieces=len(starts), block=_SUMMED, together=SUMMED_TOGETHER,
                num_warps=_ASIDE_WARPS,
            )  # fmt: skip


@cache
def _classes(
    pieces: tuple[PooledPiece, ...], dim: int, device: torch.device
) -> tuple[tuple[int, int, int, Tensor], ...]:
    """Sort pieces by the shape of program that suits their length; kept for good, since graphs read them."""
    refuse_capture(device, "a new kind of batch", fix=_FIX)
    found: dict[tuple[int, int, int], list[list[int]]] = {}
    for piece in pieces:
        shape = pool_shape(dim, piece.count)
        line = [piece.first, piece.count, piece.target]
        found.setdefault((shape.bags, shape.ahead, shape.warps), []).append(line)
    order = sorted(found.items(), key=lambda one: -one[0][1])  # long ones first: short ones fill the end
    return tuple((*shape, torch.tensor(lines, dtype=torch.int64).to(device)) for shape, lines in order)

"""The readable truth in plain torch; it serves CPUs too, where torch's own loops are the fast ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from viviane.ops.wire_blocks import Columns, PooledPiece, Segments, Source


def pack_rows(rows: Tensor, columns: Columns, out: Tensor) -> None:
    """out[start_k + b * width_k] = part(rows[b, source_k])."""
    size = rows.shape[0]
    for source, start, width, low, high, stride, offset, base, null in columns.lines:
        row = rows[:, source].to(torch.int64)
        own = row - low
        inside = (own >= 0) & (row < high) & (own.remainder(stride) == offset)
        out.as_strided((size,), (width,), out.storage_offset() + start).copy_(
            torch.where(inside, own // stride + base, null)
        )


def join_blocks(taken: Tensor, segments: Segments, out: Tensor, factors: Tensor | None) -> None:
    """out[b, segment s] = [out +] factors[b, s] * sum over its sources."""
    size = out.shape[0]
    for i, segment in enumerate(segments.items):
        total = _block(taken, size, segment.dim, segment.sources[0]).float()
        for source in segment.sources[1:]:
            total = total + _block(taken, size, segment.dim, source).float()
        if factors is not None:
            total = total * factors[:, i : i + 1]
        target = out[:, segment.column : segment.column + segment.dim]
        target.copy_(target.float() + total if segment.adds else total)


def cut_blocks(
    gradient: Tensor, segments: Segments, out: Tensor, factors: Tensor | None, *, aside: bool = False
) -> None:
    """out[source + b * width] = factors[b, s] * gradient[b, segment s]."""
    size = gradient.shape[0]
    for i, segment in enumerate(segments.items):
        part = gradient[:, segment.column : segment.column + segment.dim]
        if factors is not None:
            part = part.float() * factors[:, i : i + 1]
        for source in segment.sources:
            _block(out, size, segment.dim, source).copy_(part)


def first_difference(found: Tensor, truth: Tensor) -> Tensor:
    """[any, place, found[place]] of the first place at which two lists differ."""
    places = (found != truth).nonzero().view(-1)[:1]
    if not len(places):
        return torch.zeros(3, dtype=torch.int64, device=found.device)
    return torch.cat([torch.ones_like(places), places, found[places].to(torch.int64)])


def pool_columns(
    storage: Tensor, rows: Tensor, pieces: Sequence[PooledPiece], out: Tensor, weights: Tensor | None, num_rows: int
) -> None:
    """out[b, target : + D] = sum of weights[b, c] * storage[rows[b, c]]; rows of zeros are read as any other."""
    dim = storage.shape[1]
    for piece in pieces:
        total = torch.zeros(rows.shape[0], dim, device=out.device)
        for column in range(piece.first, piece.first + piece.count):
            vectors = storage.index_select(0, rows[:, column]).float()
            total += vectors if weights is None else vectors * weights[:, column : column + 1]
        out[:, piece.target : piece.target + dim] = total


def sum_pieces(base: Tensor, starts: Tensor, first: int, stop: int) -> None:
    """base[starts[p] + i] = sum over p of base[starts[p] + i], first <= i < stop."""
    pieces = [base[start + first : start + stop] for start in starts.tolist()]
    total = pieces[0].float().clone()  # not 0 + it, which would lose the sign of -0
    for piece in pieces[1:]:
        total += piece.float()
    for piece in pieces:
        piece.copy_(total)


def _block(flat: Tensor, size: int, dim: int, source: Source) -> Tensor:
    return flat.as_strided((size, dim), (source.width, 1), flat.storage_offset() + source.start)

"""Packing around the exchange: rows into blocks that are sent, blocks into the output, and back.

Shapes: B rows of the batch, C columns of rows, K columns of all blocks, N numbers of a flat tensor, W columns of the
output, S segments of it, D the width of a row, P pieces.

A block is a matrix inside a flat tensor: row b of a column that begins at `start` is at start + b * width. Every
function is one pass over memory; on a GPU one kernel each, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.dispatch import kernels_serve, load
from viviane.ops.embedding_bag import has_whole_rows

__all__ = [
    "SUMMED_TOGETHER",
    "Columns",
    "PooledPiece",
    "Segment",
    "Segments",
    "Source",
    "cut_blocks",
    "first_difference",
    "has_whole_rows",
    "join_blocks",
    "pack_rows",
    "pool_columns",
    "sum_pieces",
]


SUMMED_TOGETHER: Final = 16
"""Numbers that `sum_pieces` moves at once: pieces and ranges begin and end at multiples of it."""


class Columns:
    """Columns of rows on their way to blocks, one line each.

    A row r of the whole table becomes (r - low) // stride + base where low <= r < high and (r - low) mod stride is
    `offset`, and `null` elsewhere.

    Args:
        lines: for each column [source column, start, width, low, high, stride, offset, base, null].
        device: of the rows.
    """

    def __init__(self, lines: Sequence[Sequence[int]], device: torch.device) -> None:
        self.lines = [list(line) for line in lines]
        self.divides = any(line[5] > 1 for line in self.lines)
        self.table = torch.tensor(self.lines, dtype=torch.int64).view(-1, 9).to(device)

    def __len__(self) -> int:
        return len(self.lines)


@dataclass(frozen=True)
class Source:
    """Numbers of a segment in a block: row b of them begins at start + b * width."""

    start: int
    width: int


@dataclass(frozen=True)
class Segment:
    """Columns of the output, and the sources whose sum they are.

    Args:
        column: where they begin.
        dim: how many.
        sources: what is added.
        adds: whether to add to what the output has there.
    """

    column: int
    dim: int
    sources: tuple[Source, ...]
    adds: bool = False


class Segments:
    """All segments of an output, with their numbers on the device.

    Args:
        items: in order; each has a source, or more.
        device: of the output.
    """

    def __init__(self, items: Sequence[Segment], device: torch.device) -> None:
        self.items = tuple(items)
        self.num_sources = sum(len(one.sources) for one in items)
        self.widest = max([one.dim for one in items], default=1)
        lines: list[list[int]] = []
        sources: list[list[int]] = []
        for i, one in enumerate(items):
            lines.append([one.column, one.dim, len(sources), len(one.sources), int(one.adds)])
            sources += [[source.start, source.width, i] for source in one.sources]
        self.aligned = math.gcd(
            16, *(n for line in lines for n in line[:2]), *(n for line in sources for n in line[:2])
        )
        """Divides every start, width and dim."""
        self.lines = torch.tensor(lines, dtype=torch.int64).view(-1, 5).to(device)
        self.sources = torch.tensor(sources, dtype=torch.int64).view(-1, 3).to(device)


@dataclass(frozen=True)
class PooledPiece:
    """Neighbouring columns of rows whose vectors are summed: first to first + count, into `target` of the output."""

    first: int
    count: int
    target: int


def pack_rows(rows: Tensor, columns: Columns, out: Tensor) -> None:
    """Put rows of whole tables into blocks as rows of parts: out[start_k + b * width_k] = part(rows[b, source_k]).

    Args:
        rows: (B, C), int32 or int64, contiguous.
        columns: K of them.
        out: (N,), int32 or int64.

    Example:
        >>> out = torch.zeros(4, dtype=torch.int32)
        >>> halves = Columns([[0, 0, 1, 0, 9, 2, 0, 0, 99], [0, 2, 1, 0, 9, 2, 1, 0, 99]], out.device)
        >>> pack_rows(torch.tensor([[4], [7]]), halves, out)
        >>> out.tolist()
        [2, 99, 99, 3]
    """
    if rows.dim() != 2 or not rows.is_contiguous():
        raise VivianeError("rows must be a contiguous matrix (B, C)", value=tuple(rows.shape))
    _module(rows.device).pack_rows(rows, columns, out)


def join_blocks(taken: Tensor, segments: Segments, out: Tensor, factors: Tensor | None = None) -> None:
    """Sum blocks into the output: out[b, segment s] = [out +] factors[b, s] * sum over its sources.

    Args:
        taken: (N,), the blocks; of any floating type.
        segments: S of them.
        out: (B, W), contiguous or columns of a wider one.
        factors: (B, S), float32, contiguous; None: ones.

    Example:
        >>> out = torch.zeros(2, 3)
        >>> both = Segments([Segment(1, 2, (Source(0, 2), Source(4, 2)))], out.device)
        >>> join_blocks(torch.arange(8.0), both, out)
        >>> out.tolist()
        [[0.0, 4.0, 6.0], [0.0, 8.0, 10.0]]
    """
    _check(out, segments, factors)
    _module(out.device).join_blocks(taken, segments, out, factors)


def cut_blocks(
    gradient: Tensor, segments: Segments, out: Tensor, factors: Tensor | None = None, *, aside: bool = False
) -> None:
    """Give every source of a segment its gradient: out[source + b * width] = factors[b, s] * gradient[b, segment s].

    Args:
        gradient: (B, W), contiguous or columns of a wider one.
        segments: S of them.
        out: (N,), the blocks; of any floating type.
        factors: as in `join_blocks`.
        aside: leave most of a GPU to other kernels: for an `out` behind a link, which is slower than the memory.

    Example:
        >>> out = torch.zeros(4)
        >>> one = Segments([Segment(1, 2, (Source(0, 2),))], out.device)
        >>> cut_blocks(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), one, out)
        >>> out.tolist()
        [2.0, 3.0, 5.0, 6.0]
    """
    _check(gradient, segments, factors)
    _module(gradient.device).cut_blocks(gradient, segments, out, factors, aside=aside)


def first_difference(found: Tensor, truth: Tensor) -> Tensor:
    """Return [any, place, found[place]] of the first place at which two lists differ, (3,), int64.

    Where they agree the first number is 0, and the others are undefined.

    Args:
        found, truth: (N,), int32 or int64, contiguous.

    Example:
        >>> first_difference(torch.tensor([0, 2, 5]), torch.tensor([0, 2, 4])).tolist()
        [1, 2, 5]
    """
    if found.shape != truth.shape or found.dim() != 1:
        raise VivianeError("two lists of one length are compared", value=f"{tuple(found.shape)}, {tuple(truth.shape)}")
    record: Tensor = _module(found.device).first_difference(found, truth)
    return record


def pool_columns(
    storage: Tensor,
    rows: Tensor,
    pieces: Sequence[PooledPiece],
    out: Tensor,
    weights: Tensor | None = None,
    *,
    num_rows: int | None = None,
) -> None:
    """Sum the vectors of neighbouring columns: out[b, target : + D] = sum of weights[b, c] * storage[rows[b, c]].

    Args:
        storage: (R, D), contiguous.
        rows: (B, C), int32 or int64, contiguous, 0 <= row < R.
        pieces: P of them; sums are made in float32, in the order of the columns.
        out: (B, W), contiguous or columns of a wider one.
        weights: (B, C), float32, contiguous, or None for ones.
        num_rows: rows from this one on are zeros, which a GPU does not read: of a table that is sharded by rows, most
            columns name such a row. None: no row is known to be.

    Example:
        >>> out = torch.zeros(1, 3)
        >>> pool_columns(torch.eye(3), torch.tensor([[0, 2, 2]]), [PooledPiece(0, 3, 0)], out)
        >>> out.tolist()
        [[1.0, 0.0, 2.0]]
    """
    if rows.dim() != 2 or not rows.is_contiguous() or out.shape[0] != rows.shape[0] or not has_whole_rows(out):
        raise VivianeError("rows (B, C) must be contiguous, the output (B, W) of whole rows", value=tuple(rows.shape))
    some = len(storage) if num_rows is None else num_rows
    _module(storage.device).pool_columns(storage, rows, tuple(pieces), out, weights, some)


def sum_pieces(base: Tensor, starts: Tensor, first: int, stop: int) -> None:
    """Replace a range of several pieces by its sum over them: base[starts[p] + i] = sum over q of base[starts[q] + i].

    Sums are made in float32, in the order of the pieces, and rounded once.

    Args:
        base: the flat tensor whose first number `starts` counts from, of a floating type.
        starts: (P,), int64, on the device: where pieces begin, multiples of `SUMMED_TOGETHER`. On a GPU a piece may be
            outside of `base`, in the memory of another GPU.
        first, stop: the range i of the pieces, multiples of `SUMMED_TOGETHER`.

    Raises:
        VivianeError: a bound is no such multiple.

    Example:
        >>> pieces = torch.arange(32.0)
        >>> sum_pieces(pieces, torch.tensor([0, 16]), 0, 16)
        >>> pieces[[0, 15, 16, 31]].tolist()
        [16.0, 46.0, 16.0, 46.0]
    """
    if first % SUMMED_TOGETHER or stop % SUMMED_TOGETHER:
        raise VivianeError(
            "a range of pieces begins or ends between numbers that are summed together", value=f"{first} to {stop}",
            allowed=f"multiples of {SUMMED_TOGETHER}",
        )  # fmt: skip
    _module(base.device).sum_pieces(base, starts, first, stop)


def _module(device: torch.device) -> ModuleType:
    return load("wire_blocks", "gpu" if kernels_serve(device) else "reference")


def _check(matrix: Tensor, segments: Segments, factors: Tensor | None) -> None:
    if matrix.dim() != 2 or not has_whole_rows(matrix):
        raise VivianeError("the output and its gradient are matrices (B, W) of whole rows", value=tuple(matrix.shape))
    if factors is not None and (factors.shape != (len(matrix), len(segments.items)) or factors.dtype != torch.float32):
        raise VivianeError("factors must be float32, (B, S)", value=f"{tuple(factors.shape)} of {factors.dtype}")

"""What goes over the wire in a lookup: ids to the shards, vectors back, gradients to the shards.

Shapes: n processes, B_s rows of process s's batch, G the sum of all B_s, P_r pieces of process r, W_r its columns,
W columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.batch import Bag
from viviane.parallel.group import Group
from viviane.parallel.layout import Piece


def exchange_singles(group: Group, rows: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Send each process the columns of its pieces, and return what all batches ask of this one.

    Args:
        rows: (B, sum of counts), by process.
        counts: P_r of each process.
        sizes: B_s of each process.

    Returns:
        (G, P), the batches one after another.
    """
    mine, size = counts[group.rank], rows.shape[0]
    if group.size == 1:
        return rows
    flat = rows.t().contiguous().view(-1)
    taken = group.all_to_all(flat, [count * size for count in counts], [mine * one for one in sizes])
    if len(set(sizes)) == 1:
        return taken.view(group.size, mine, size).transpose(1, 2).reshape(group.size * size, mine)
    parts = torch.split(taken, [mine * one for one in sizes])
    return torch.cat([part.view(mine, one).t() for part, one in zip(parts, sizes, strict=True)])


def exchange_bags(
    group: Group,
    bags: Sequence[Bag],
    counts: Sequence[int],
    sizes: Sequence[int],
    weighted: Sequence[bool],
    hotness: Sequence[int | None],
) -> list[Bag]:
    """Send each process the bags of its pieces, and return what all batches ask of this one.

    Args:
        bags: of all pieces, by process.
        counts: number of bag pieces of each process.
        sizes: B_s of each process.
        weighted: for each piece, whether its bags have weights, the same on every process.
        hotness: for each piece, the ids of every bag, where they are equally many: where all pieces say it, no lengths
            are sent, and nothing waits for a GPU.

    Returns:
        a bag (G rows) for each piece of this process.
    """
    if group.size == 1:
        return list(bags)
    first, mine = sum(counts[: group.rank]), counts[group.rank]
    bounds = [sum(counts[:rank]) for rank in range(group.size + 1)]
    own = slice(first, first + mine)
    if all(one is not None for one in hotness):
        asked = [[size * (one or 0) for one in hotness[own]] for size in sizes]
        total = sum(sizes)
        offsets = [torch.arange(total + 1, device=bags[0].offsets.device) * (one or 0) for one in hotness[own]]
    else:
        theirs = _exchange_lengths(group, bags, counts, sizes)
        # Ids of each piece, by process: the one wait for a GPU.
        asked = torch.stack([part.sum(1) for part in theirs]).tolist()
        both = [torch.cat([part[i] for part in theirs]).to(torch.int64) for i in range(mine)]
        offsets = [torch.cat([one.new_zeros(1), one.cumsum(0)]) for one in both]
    values = _exchange_entries(group, [bag.values for bag in bags], bounds, asked)
    heavy = [i for i in range(len(bags)) if weighted[i]]
    heavy_bounds = [sum(i < bound for i in heavy) for bound in bounds]
    heavy_asked = [[n for i, n in enumerate(one) if weighted[first + i]] for one in asked]
    weights = iter(_exchange_entries(group, [_weights(bags[i]) for i in heavy], heavy_bounds, heavy_asked))
    return [Bag(values[i], offsets[i], next(weights) if weighted[first + i] else None) for i in range(mine)]


def _exchange_lengths(group: Group, bags: Sequence[Bag], counts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Return the lengths of the bags that each process asks of this one, (P, B_s)."""
    mine, size = counts[group.rank], sizes[group.rank]
    given = torch.cat([bag.offsets.diff().to(torch.int32) for bag in bags])
    taken = group.all_to_all(given, [count * size for count in counts], [mine * one for one in sizes])
    parts = torch.split(taken, [mine * one for one in sizes])
    return [part.view(mine, one) for part, one in zip(parts, sizes, strict=True)]


def _weights(bag: Bag) -> Tensor:
    assert bag.weights is not None
    return bag.weights


def _exchange_entries(
    group: Group, parts: Sequence[Tensor], bounds: Sequence[int], asked: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Exchange entries of bags, and put those of one piece behind one another, in order of rank."""
    if bounds[-1] == 0:
        return []
    given = [sum(len(part) for part in parts[a:b]) for a, b in pairwise(bounds)]
    taken = group.all_to_all(torch.cat(list(parts)), given, [sum(one) for one in asked])
    pieces = torch.split(taken, [count for one in asked for count in one])
    mine = len(asked[0])
    return [torch.cat(pieces[i::mine]) for i in range(mine)]


@dataclass(frozen=True)
class Move:
    """Columns start to stop of a block go to column `target` of the output, or are added to what is there."""

    block: int
    start: int
    stop: int
    target: int
    adds: bool


@dataclass(frozen=True)
class Assembly:
    """How blocks of vectors become the output.

    Args:
        widths: W_r of each process.
        moves: blocks 0 to n - 1 are those of the processes, block n that of replicated tables.
        width: W.
        wire: type of vectors and gradients on the wire.
    """

    widths: tuple[int, ...]
    moves: tuple[Move, ...]
    width: int
    wire: torch.dtype


def assemble(pieces: Sequence[Piece], size: int, width: int, wire: torch.dtype) -> Assembly:
    """Work out the columns of every process's block, and where they go.

    Args:
        pieces: of all features.
        size: n.
        width: W.
        wire: type of vectors and gradients on the wire.
    """
    widths = [0] * (size + 1)
    moves: list[Move] = []
    written: set[int] = set()
    for piece in pieces:
        block = size if piece.shard.rank is None else piece.shard.rank
        start, stop = widths[block], widths[block] + piece.shard.dim
        widths[block] = stop
        adds = piece.column in written
        written.add(piece.column)
        last = moves[-1] if moves else None
        run = last and last.block == block and last.stop == start and last.adds == adds
        if last and run and last.target + last.stop - last.start == piece.column:
            moves[-1] = Move(block, last.start, stop, last.target, adds)
        else:
            moves.append(Move(block, start, stop, piece.column, adds))
    return Assembly(tuple(widths[:-1]), tuple(moves), width, wire)


def _blocks(flat: Tensor, size: int, widths: Sequence[int]) -> list[Tensor]:
    """See a flat tensor as one matrix (size, width) after another."""
    parts = torch.split(flat, [size * width for width in widths])
    return [part.view(size, width) for part, width in zip(parts, widths, strict=True)]


class Return(torch.autograd.Function):
    """Vectors go back to where the ids came from; in backward, their gradients go to the shards."""

    @staticmethod
    def forward(
        ctx: Any, looked_up: Tensor, local: Tensor, group: Group, assembly: Assembly, sizes: Sequence[int]
    ) -> Tensor:
        """Return the output, (B, W), of vectors looked up here, (G, W_r), and of replicated tables, (B, W_local)."""
        ctx.group, ctx.assembly, ctx.sizes, ctx.types = group, assembly, sizes, (looked_up.dtype, local.dtype)
        size, mine = sizes[group.rank], assembly.widths[group.rank]
        sent = looked_up.to(assembly.wire).reshape(-1)
        splits = [size * width for width in assembly.widths]
        taken = group.all_to_all(sent, [mine * one for one in sizes], splits)
        blocks = [*_blocks(taken, size, assembly.widths), local]
        out = torch.empty(size, assembly.width, dtype=local.dtype, device=local.device)
        for move in assembly.moves:
            target = out[:, move.target : move.target + move.stop - move.start]
            part = blocks[move.block][:, move.start : move.stop]
            if move.adds:
                target += part
            else:
                target.copy_(part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send each shard the gradients of its vectors."""
        group, assembly, sizes = ctx.group, ctx.assembly, ctx.sizes
        (gradient,) = gradients
        size, mine = sizes[group.rank], assembly.widths[group.rank]
        sent = torch.empty(size * sum(assembly.widths), dtype=assembly.wire, device=gradient.device)
        splits = [size * width for width in assembly.widths]
        local_width = max([m.stop for m in assembly.moves if m.block == group.size], default=0)
        local = torch.empty(size, local_width, dtype=ctx.types[1], device=gradient.device)
        blocks = [*_blocks(sent, size, assembly.widths), local]
        for move in assembly.moves:
            target = gradient[:, move.target : move.target + move.stop - move.start]
            blocks[move.block][:, move.start : move.stop].copy_(target)
        taken = group.all_to_all(sent, splits, [mine * one for one in sizes])
        return taken.view(sum(sizes), mine).to(ctx.types[0]), local, None, None, None

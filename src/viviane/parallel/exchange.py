"""The all-to-all exchanges of jagged lookups: input_dist of ids, output_dist of vectors, grad_dist of gradients.

Shapes: n ranks, B_s rows of rank s's local batch, G the sum of all B_s, P_r feature shards of rank r, W_r its output
columns, W columns of the output.
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
from viviane.core.errors import ProcessError
from viviane.parallel.feature_shards import FeatureShard
from viviane.parallel.group import Group


def exchange_singles(group: Group, rows: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Send each rank the one-hot columns of its feature shards, and return the columns for this rank.

    Args:
        rows: (B, sum of counts), ordered by rank.
        counts: P_r of each rank.
        sizes: B_s of each rank.

    Returns:
        (G, P), the local batches one after another.
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
    """Send each rank the bags of its feature shards, and return the bags for this rank.

    Args:
        bags: of all feature shards, ordered by rank.
        counts: number of feature shards with bags of each rank.
        sizes: B_s of each rank.
        weighted: for each feature shard, whether its bags have weights; the same on every rank.
        hotness: for each feature shard, the number of ids of every bag if it is constant. If all are, no lengths are
            sent and nothing waits for a GPU.

    Returns:
        a bag (G rows) for each feature shard of this rank.
    """
    if group.size == 1:
        return list(bags)
    first, mine = sum(counts[: group.rank]), counts[group.rank]
    bounds = [sum(counts[:rank]) for rank in range(group.size + 1)]
    own = slice(first, first + mine)
    if all(one is not None for one in hotness):
        inputs = [[size * (one or 0) for one in hotness[own]] for size in sizes]
        total = sum(sizes)
        offsets = [torch.arange(total + 1, device=bags[0].offsets.device) * (one or 0) for one in hotness[own]]
    else:
        theirs = _exchange_lengths(group, bags, counts, sizes)
        # Number of ids of each feature shard, by rank: the only wait for a GPU.
        inputs = torch.stack([part.sum(1) for part in theirs]).tolist()
        both = [torch.cat([part[i] for part in theirs]).to(torch.int64) for i in range(mine)]
        offsets = [torch.cat([one.new_zeros(1), one.cumsum(0)]) for one in both]
    values = _exchange_entries(group, [bag.values for bag in bags], bounds, inputs)
    heavy = [i for i in range(len(bags)) if weighted[i]]
    heavy_bounds = [sum(i < bound for i in heavy) for bound in bounds]
    heavy_inputs = [[n for i, n in enumerate(one) if weighted[first + i]] for one in inputs]
    weights = iter(_exchange_entries(group, [_weights(bags[i]) for i in heavy], heavy_bounds, heavy_inputs))
    return [Bag(values[i], offsets[i], next(weights) if weighted[first + i] else None) for i in range(mine)]


def _exchange_lengths(group: Group, bags: Sequence[Bag], counts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Return the lengths of the bags that each rank sends to this one, (P, B_s)."""
    mine, size = counts[group.rank], sizes[group.rank]
    given = torch.cat([bag.offsets.diff().to(torch.int32) for bag in bags])
    taken = group.all_to_all(given, [count * size for count in counts], [mine * one for one in sizes])
    parts = torch.split(taken, [mine * one for one in sizes])
    if taken.is_cpu and taken.numel() and int(taken.min()) < 0:  # offsets would fall; a GPU would have to be waited for
        rank = next(place for place, part in enumerate(parts) if part.numel() and int(part.min()) < 0)
        raise ProcessError("another process sent a bag of negative length", where=f"rank {rank}",
                           value=int(parts[rank].min()))  # fmt: skip
    return [part.view(mine, one) for part, one in zip(parts, sizes, strict=True)]


def _weights(bag: Bag) -> Tensor:
    assert bag.weights is not None
    return bag.weights


def _exchange_entries(
    group: Group, parts: Sequence[Tensor], bounds: Sequence[int], inputs: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Exchange the entries of bags and concatenate those of each feature shard in the order of ranks."""
    if bounds[-1] == 0:
        return []
    given = [sum(len(part) for part in parts[a:b]) for a, b in pairwise(bounds)]
    taken = group.all_to_all(torch.cat(list(parts)), given, [sum(one) for one in inputs])
    pieces = torch.split(taken, [count for one in inputs for count in one])
    mine = len(inputs[0])
    return [torch.cat(pieces[i::mine]) for i in range(mine)]


@dataclass(frozen=True)
class Move:
    """Columns start to stop of a block are copied to column `target` of the output, or added to it."""

    block: int
    start: int
    stop: int
    target: int
    adds: bool


@dataclass(frozen=True)
class Assembly:
    """How blocks of vectors are assembled into the output.

    Args:
        widths: W_r of each rank.
        moves: blocks 0 to n - 1 come from the ranks, block n from replicated tables.
        width: W.
        wire: type of vectors and gradients in transit.
    """

    widths: tuple[int, ...]
    moves: tuple[Move, ...]
    width: int
    wire: torch.dtype


def assemble(pieces: Sequence[FeatureShard], size: int, width: int, wire: torch.dtype) -> Assembly:
    """Compute the columns of every rank's block and their output columns.

    Args:
        pieces: the shards of all features.
        size: n.
        width: W.
        wire: type of vectors and gradients in transit.
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
    """Return views of a flat tensor as consecutive matrices (size, width)."""
    parts = torch.split(flat, [size * width for width in widths])
    return [part.view(size, width) for part, width in zip(parts, widths, strict=True)]


class OutputDist(torch.autograd.Function):
    """Sends vectors to the ranks whose batches need them; in backward sends their gradients to the shards."""

    @staticmethod
    def forward(
        ctx: Any, looked_up: Tensor, local: Tensor, group: Group, assembly: Assembly, sizes: Sequence[int]
    ) -> Tensor:
        """Return the output (B, W) from vectors of shards (G, W_r) and of replicated tables (B, W_local)."""
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
        """Send the gradients of vectors to the shards that hold their rows (grad_dist)."""
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

"""One batch's lookups: the parts of each storage, their forward, and what backward keeps of them.

Shapes: B rows of the batch, S places (columns of D in the output) of a part, N entries, W the output's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.embedding.storage import RowGradients, Storage
from viviane.ops.embedding_bag import embedding_bag, embedding_lookup, entry_bags

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class Run:
    """Neighbouring places of a part that are neighbours in the output too."""

    first: int
    last: int
    start: int
    """Column of the output where place `first` begins."""


@dataclass(frozen=True)
class Part:
    """Lookups in one storage.

    Args:
        rows: (B, S) without offsets, each place one row; (N,) with offsets, bags of rows, and S is 1.
        weights: shaped as rows, or None.
        runs: where the S places stand in the output.
        places: which places have a trainable table; None means all.
        tables: names of the trainable tables among them.
    """

    storage: Storage
    rows: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    runs: tuple[Run, ...]
    places: tuple[int, ...] | None
    tables: frozenset[str]


def gather(parts: Sequence[Part], size: int, width: int) -> Tensor:
    """Look everything up: (B, W)."""
    if len(parts) == 1 and len(parts[0].runs) == 1:
        return _values(parts[0], size).view(size, width)
    out = parts[0].storage.weight.new_empty(size, width)
    for part in parts:
        values = _values(part, size)
        dim = part.storage.dim
        for run in part.runs:
            stop = run.start + (run.last - run.first) * dim
            out[:, run.start : stop] = values[:, run.first * dim : run.last * dim]
    return out


def _values(part: Part, size: int) -> Tensor:
    weight = part.storage.weight
    if part.offsets is not None:
        return embedding_bag(weight, part.rows, part.offsets, part.weights)
    values = embedding_lookup(weight, part.rows.view(-1))
    if part.weights is not None:
        values *= part.weights.reshape(-1, 1)
    return values.view(size, part.rows.shape[1] * part.storage.dim)


class Lookup(torch.autograd.Function):
    """The lookup as autograd sees it: backward hands gradients to the storages and returns none.

    A table's gradient never becomes a tensor of the table's size. `anchor` is an empty tensor that requires
    grad, without which autograd would not call backward.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, parts: Sequence[Part], size: int, width: int) -> Tensor:
        """Gather, and keep what to look up for backward."""
        ctx.parts = parts  # type: ignore[attr-defined]
        return gather(parts, size, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Hand the gradients of the touched rows to their storages."""
        gradient = grad_outputs[0].contiguous()
        for part in ctx.parts:
            if part.tables:
                for one in _row_gradients(part, gradient):
                    part.storage.add_gradients(one)
        return None, None, None, None


def _row_gradients(part: Part, gradient: Tensor) -> list[RowGradients]:
    size, width = gradient.shape
    dim = part.storage.dim
    if width % dim == 0 and all(run.start % dim == 0 for run in part.runs):
        # The whole gradient seen as vectors of D: no copy, each entry says which vector is its own.
        per_row = width // dim
        blocks = [run.start // dim + i for run in part.runs for i in range(run.last - run.first)]
        return [_entries(part, gradient.view(size * per_row, dim), per_row, blocks)]
    columns = [gradient[:, run.start : run.start + (run.last - run.first) * dim] for run in part.runs]
    matrix = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
    per_row = matrix.shape[1] // dim
    return [_entries(part, matrix.reshape(size * per_row, dim), per_row, list(range(per_row)))]


def _entries(part: Part, gradients: Tensor, per_row: int, blocks: list[int]) -> RowGradients:
    """Say for each entry which of the gradient vectors is its own: row b's block k is vector b * per_row + k."""
    size = len(gradients) // per_row if per_row else 0
    device = gradients.device
    if part.offsets is not None:
        sources = entry_bags(part.offsets, len(part.rows))
        if per_row != 1:
            sources = sources * per_row + blocks[0]
        return RowGradients(part.rows, gradients, sources, part.weights, part.tables)
    rows, weights = part.rows, part.weights
    if part.places is not None:
        blocks = [blocks[place] for place in part.places]
        live = _constant(part.places, device)
        rows = rows[:, live]
        weights = None if weights is None else weights[:, live]
    picked: Tensor | None = None
    if blocks != list(range(per_row)):
        first = torch.arange(size, device=device).unsqueeze(1) * per_row
        picked = (first + _constant(tuple(blocks), device)).view(-1)
    flat_weights = None if weights is None else weights.reshape(-1)
    return RowGradients(rows.reshape(-1), gradients, picked, flat_weights, part.tables)


@lru_cache(maxsize=256)
def _constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a few numbers on a device; kept, since copying them to a GPU would wait for it."""
    return torch.tensor(values, device=device)

"""Update the touched rows of a table: sum the gradients of equal rows, then apply an optimizer's rule.

Shapes: R rows of the storage, D its width, N entries, M gradient vectors, U distinct rows.

No function here makes a temporary of the table's size. Rows move in blocks that stay in the processor's
cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.core.errors import VivianeError

__all__ = ["adagrad_update", "adam_update", "sgd_update", "sum_duplicates"]

_BLOCK_ELEMENTS = 1 << 17  # 512 KiB of float32: rows, state and temporaries of a block stay in the cache
_INT32_ROWS = 2**31


def sum_duplicates(
    rows: Tensor,
    gradients: Tensor,
    sources: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum gradients by row: sums[u] = sum of weights[n] * gradients[sources[n]] over n with rows[n] == unique[u].

    The entries of a row are added in their order: the same input gives the same bits, whatever the number of
    threads. A row that stands 100,000 times costs no more than 100,000 rows.

    Args:
        rows: (N,), int64.
        gradients: (M, D), float32.
        sources: (N,), int64, which gradient belongs to each entry; None means entry n has gradient n.
        weights: (N,), float32, or None for ones.
        num_rows: R, all rows lie below it; below 2^31 the sort handles half the bytes.

    Returns:
        unique rows in rising order, (U,), int64, and their sums, (U, D).

    Example:
        >>> rows, gradients = torch.tensor([7, 2, 7]), torch.tensor([[1.0], [2.0], [4.0]])
        >>> [part.tolist() for part in sum_duplicates(rows, gradients)]
        [[2, 7], [[2.0], [5.0]]]
    """
    if sources is None and len(rows) != len(gradients):
        raise VivianeError("without sources, each row needs one gradient", value=f"{len(rows)} and {len(gradients)}")
    if len(rows) == 0:
        return rows.new_empty(0), gradients.new_zeros(0, gradients.shape[1])
    narrow = rows.to(torch.int32) if num_rows is not None and num_rows <= _INT32_ROWS else rows
    sorted_rows, order = torch.sort(narrow, stable=True)
    first = torch.cat([sorted_rows.new_ones(1, dtype=torch.bool), sorted_rows[1:] != sorted_rows[:-1]])
    starts = first.nonzero().squeeze(1)  # where each distinct row begins, (U,)
    offsets = torch.cat([starts, starts.new_full((1,), len(rows))])
    entries = order if sources is None else sources[order]
    by_order = None if weights is None else weights[order]
    sums = F.embedding_bag(
        entries, gradients, offsets, mode="sum", per_sample_weights=by_order, include_last_offset=True
    )
    return sorted_rows[starts].to(torch.int64), sums


def sgd_update(storage: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, weight_decay: float = 0.0) -> None:
    """w -= lr (g + weight_decay w), in place, on distinct rows.

    Args:
        storage: (R, D), float32.
        rows: (U,), int64, all different.
        gradients: (U, D).

    Example:
        >>> table = torch.ones(3, 1)
        >>> sgd_update(table, torch.tensor([1]), torch.tensor([[2.0]]), lr=0.1)
        >>> [round(w, 6) for w in table[:, 0].tolist()]
        [1.0, 0.8, 1.0]
    """
    for block, g in _blocks(rows, gradients):
        w = storage.index_select(0, block)
        if weight_decay:
            g = g.add(w, alpha=weight_decay)  # noqa: PLW2901
        storage.index_copy_(0, block, w.sub_(g, alpha=lr))


def adagrad_update(
    storage: Tensor,
    accumulator: Tensor,
    rows: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    epsilon: float,
    weight_decay: float = 0.0,
) -> None:
    """s += g^2; w -= lr g / (sqrt(s) + epsilon), in place, on distinct rows.

    Args:
        storage: w, (R, D), float32.
        accumulator: s, (R, D).
        rows: (U,), int64, all different.
        gradients: (U, D); weight_decay * w is added to them.

    Source: Duchi et al. 2011.
    """
    for block, g in _blocks(rows, gradients):
        w = storage.index_select(0, block)
        if weight_decay:
            g = g.add(w, alpha=weight_decay)  # noqa: PLW2901
        s = accumulator.index_select(0, block).addcmul_(g, g)
        accumulator.index_copy_(0, block, s)
        storage.index_copy_(0, block, w.addcdiv_(g, s.sqrt_().add_(epsilon), value=-lr))


def adam_update(
    storage: Tensor,
    m: Tensor,
    v: Tensor,
    rows: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | Tensor,
    weight_decay: float = 0.0,
) -> None:
    """Lazy Adam, in place, on distinct rows; other rows and their state stay as they are.

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        a = lr sqrt(1 - beta2^t) / (1 - beta1^t);  w -= a m / (sqrt(v) + epsilon)

    Args:
        storage: w, (R, D), float32.
        m, v: running means, (R, D).
        rows: (U,), int64, all different.
        gradients: (U, D); weight_decay * w is added to them.
        step: t from 1; a tensor (U,) where rows have different ages.

    Source: Kingma and Ba 2015.
    """
    ages = step.to(torch.float64) if isinstance(step, Tensor) else None
    alpha = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) if not isinstance(step, Tensor) else 1.0
    start = 0
    for block, g in _blocks(rows, gradients):
        w = storage.index_select(0, block)
        if weight_decay:
            g = g.add(w, alpha=weight_decay)  # noqa: PLW2901
        new_m = m.index_select(0, block).lerp_(g, 1 - beta1)
        new_v = v.index_select(0, block).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        m.index_copy_(0, block, new_m)
        v.index_copy_(0, block, new_v)
        if ages is not None:
            t = ages[start : start + len(block)]
            new_m.mul_((lr * (1 - beta2**t).sqrt() / (1 - beta1**t)).to(new_m.dtype).unsqueeze(1))
        storage.index_copy_(0, block, w.addcdiv_(new_m, new_v.sqrt_().add_(epsilon), value=-alpha))
        start += len(block)


def _blocks(rows: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if gradients.dim() != 2 or len(rows) != len(gradients):
        raise VivianeError("each row needs one gradient", value=f"{len(rows)} and {tuple(gradients.shape)}")
    size = max(1, _BLOCK_ELEMENTS // gradients.shape[1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size], gradients[start : start + size]

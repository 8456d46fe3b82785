"""The normaliser of a softmax over candidates, without the matrix of all scores.

Shapes: B rows, C candidates, d the width of their vectors.

    L_b = log(exp o_b + sum over j with another id than b's of exp(u_b . v_j - c_j))

Scores are made for some rows at a time, that many as the processor's cache holds, and made again by backward: the
products cost less than reading and writing (B, C) numbers for each of the steps between them. On a GPU they never leave
the processors (`viviane.ops.candidate_sums`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.ops import candidate_sums

_CACHED_BYTES = 1 << 20
_MOST_SCORES_BYTES = 1 << 29  # on a GPU, at a time


def log_sum_over_candidates(
    u: Tensor,
    v: Tensor,
    correction: Tensor,
    own: Tensor,
    ids: Tensor,
    of: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """Return L, (B, 1).

    Args:
        u: (B, d).
        v: candidates, (C, d).
        correction: c, (C,); infinite where there is no candidate.
        own: o, (B, 1): the score of the row's own item, finite.
        ids: of the rows' items, (B, 1).
        of: ids of the candidates, (C,).
        counts: (B,), bool: rows that are needed; a GPU leaves the others out, their L is any number and has no
            gradient. None takes all.

    Example:
        >>> one, ids = torch.ones(2, 1), torch.tensor([[5], [6]])
        >>> log_sum_over_candidates(one, one, torch.zeros(2), one, ids, ids.flatten())[0].item()  # log(2 e)
        1.6931471824645996
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        scores = _scores(u, v, correction, ids, of)
        return torch.cat([own, scores], 1).logsumexp(1, keepdim=True)
    if candidate_sums.reason(u, v) is None and not correction.requires_grad:
        needed = torch.ones(len(u), dtype=torch.bool, device=u.device) if counts is None else counts
        return cast(Tensor, _LogSumKernels.apply(u, v, correction, own, ids, of, needed))  # type: ignore[no-untyped-call]
    return cast(Tensor, _LogSum.apply(u, v, correction, own, ids, of))  # type: ignore[no-untyped-call]


class _LogSumKernels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, v: Tensor, correction: Tensor, own: Tensor, ids: Tensor, of: Tensor, counts: Tensor
    ) -> Tensor:
        order, count = candidate_sums.rows_first(counts)
        sums = candidate_sums.forward(u, v, correction, own.flatten(), ids.flatten(), of, order, count)
        ctx.save_for_backward(u, v, correction, own, ids, of, counts, order, count, sums)
        return sums.unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        u, v, correction, own, ids, of, counts, order, count, sums = ctx.saved_tensors
        grad = torch.where(counts, grad_outputs[0].flatten(), 0.0)
        du, dv = candidate_sums.backward(u, v, correction, sums, ids.flatten(), of, order, count, grad)
        return du, dv, None, ((own.flatten() - sums).exp() * grad).unsqueeze(1), None, None, None


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor, correction: Tensor, own: Tensor, ids: Tensor, of: Tensor) -> Tensor:
        sums = torch.empty_like(own)
        for rows in _blocks(u, v):
            scores = _scores(u[rows], v, correction, ids[rows], of)
            top = torch.maximum(own[rows], scores.amax(1, keepdim=True))
            total = scores.sub_(top).exp_().sum(1, keepdim=True).add_((own[rows] - top).exp_())
            sums[rows] = total.log_().add_(top)
        ctx.save_for_backward(u, v, correction, own, ids, of, sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        u, v, correction, own, ids, of, sums = ctx.saved_tensors
        (grad,) = grad_outputs
        du, dv, shares = torch.empty_like(u), torch.zeros_like(v), torch.zeros_like(correction)
        for rows in _blocks(u, v):
            scores = _scores(u[rows], v, correction, ids[rows], of)
            parts = scores.sub_(sums[rows]).exp_().mul_(grad[rows])
            torch.mm(parts, v, out=du[rows])
            dv.addmm_(parts.t(), u[rows])
            if ctx.needs_input_grad[2]:
                shares -= parts.sum(0)
        return du, dv, shares if ctx.needs_input_grad[2] else None, (own - sums).exp_().mul_(grad), None, None


def _scores(u: Tensor, v: Tensor, correction: Tensor, ids: Tensor, of: Tensor) -> Tensor:
    """Return u . v - c, (rows, C), minus infinity where a candidate is the row's own item."""
    return torch.addmm(-correction, u, v.t()).masked_fill_(of == ids, -torch.inf)


def _blocks(u: Tensor, v: Tensor) -> Iterator[slice]:
    """Give slices of rows: whose scores fit into a processor's cache, or on a GPU into a part of its memory."""
    size = len(u)
    budget = _CACHED_BYTES if u.device.type == "cpu" else _MOST_SCORES_BYTES
    step = max(1, budget // (max(1, len(v)) * u.element_size()))
    for start in range(0, size, max(1, step)):
        yield slice(start, min(start + step, size))

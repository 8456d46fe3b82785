"""The plain truth of row updates: sum by row, then the rule as the books write it, in any floating type."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.ops.row_update import Entries
from viviane.ops.row_update.rounding import noise, round_bfloat16, round_float16
from viviane.ops.rules import rule_of


def sum_rows(
    entries: Entries, dim: int, *, first_row: int = 0, num_rows: int, scratch: object = None
) -> tuple[Tensor, Tensor]:
    """Sum gradients by row; float64 gradients are summed in float64, all others in float32."""
    dtype = torch.float64 if entries.gradients.dtype == torch.float64 else torch.float32
    rows = entries.rows.to(torch.int64) - first_row
    vectors = _vectors(entries, dim).to(dtype)
    if entries.weights is not None:
        vectors = vectors * entries.weights.to(dtype).unsqueeze(1)
    inside = (rows >= 0) & (rows < num_rows)
    unique, place = torch.unique(rows[inside], return_inverse=True)
    sums = torch.zeros(len(unique), dim, dtype=dtype, device=rows.device)
    return unique, sums.index_add_(0, place, vectors[inside])


def _vectors(entries: Entries, dim: int) -> Tensor:
    if entries.sources is None:
        return entries.gradients.view(-1, dim)
    columns = torch.arange(dim, device=entries.rows.device)
    return entries.gradients[entries.sources.to(torch.int64).unsqueeze(1) + columns]


def update_rows(
    weight: Tensor,
    state: MutableMapping[str, Tensor],
    entries: Entries,
    rule: AnyOptimizer,
    *,
    lr: float,
    step: int,
    scale: float | Tensor = 1.0,
    first_row: int = 0,
    seed: int = 0,
    scratch: object = None,
    names: Tensor | None = None,
    first_name: int = 0,
) -> None:
    """Sum the gradients of equal rows, and move rows and state in place."""
    rows, g = sum_rows(entries, weight.shape[1], first_row=first_row, num_rows=len(weight))
    g = g * scale
    if rule.clip_row_norm is not None:
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        g = g * (rule.clip_row_norm / norm.clamp_min(rule.clip_row_norm))
    if getattr(rule, "update", "local") == "global":
        whole = torch.zeros(weight.shape, dtype=g.dtype, device=g.device)
        rows, g = torch.arange(len(weight), device=rows.device), whole.index_copy_(0, rows, g)
    w = weight[rows].to(g.dtype)
    own = {name: part[rows] for name, part in state.items()}
    arithmetic = rule_of(rule)
    w = arithmetic.update(w, g + arithmetic.decay * w, own, lr, step)
    for name, part in own.items():
        state[name][rows] = part.to(state[name].dtype)
    weight[rows] = _rounded(w, weight.dtype, rows if names is None else names[rows] - first_name, seed, step)


def _rounded(w: Tensor, dtype: torch.dtype, rows: Tensor, seed: int, step: int) -> Tensor:
    if dtype in (torch.float32, torch.float64):
        return w.to(dtype)
    random = noise(seed, step, rows, w.shape[1])
    return (round_bfloat16 if dtype == torch.bfloat16 else round_float16)(w.to(torch.float32), random)

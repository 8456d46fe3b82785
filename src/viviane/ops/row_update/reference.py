"""The plain truth of row updates: sum by row, then the rule as the books write it, in any floating type."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor

from viviane.config.optimizers import SGD, AdaGrad, Adam, AnyOptimizer, Ftrl, RMSProp
from viviane.ops.row_update.entries import Entries
from viviane.ops.row_update.rounding import noise, round_bfloat16, round_float16

_FTRL_EPSILON = 2.0**-23


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
    w = move(w, g + rule.weight_decay * w, own, rule, lr, step)
    for name, part in own.items():
        state[name][rows] = part.to(state[name].dtype)
    weight[rows] = _rounded(w, weight.dtype, rows, seed, step)


def _rounded(w: Tensor, dtype: torch.dtype, rows: Tensor, seed: int, step: int) -> Tensor:
    if dtype in (torch.float32, torch.float64):
        return w.to(dtype)
    random = noise(seed, step, rows, w.shape[1])
    return (round_bfloat16 if dtype == torch.bfloat16 else round_float16)(w.to(torch.float32), random)


def move(w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], rule: AnyOptimizer, lr: float, step: int) -> Tensor:
    """Return the new rows (U, D) from rows, gradients and their state, which is replaced."""
    if isinstance(rule, SGD):
        return _sgd(w, g, state, rule, lr)
    if isinstance(rule, AdaGrad):
        square = (g * g).mean(1) if rule.row_wise else g * g
        s = state["accumulator"] = state["accumulator"] + square
        return w - lr * g / _root(s.unsqueeze(1) if rule.row_wise else s, rule)
    if isinstance(rule, RMSProp):
        s = state["accumulator"] = rule.decay * state["accumulator"] + (1 - rule.decay) * g * g
        return w - lr * g / _root(s, rule)
    if isinstance(rule, Adam):
        return _adam(w, g, state, rule, lr, step)
    return _ftrl(w, g, state, rule, lr)


def _root(s: Tensor, rule: AdaGrad | RMSProp | Adam) -> Tensor:
    return (s + rule.epsilon).sqrt() if rule.epsilon_inside_root else s.sqrt() + rule.epsilon


def _sgd(w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], rule: SGD, lr: float) -> Tensor:
    if not rule.momentum:
        return w - lr * g
    before = state["momentum"]
    after = state["momentum"] = rule.momentum * before - lr * g
    return w + ((1 + rule.momentum) * after - rule.momentum * before if rule.nesterov else after)


def _adam(w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], rule: Adam, lr: float, step: int) -> Tensor:
    m, v = state["m"], state["v"]
    alpha = lr * math.sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
    if rule.update == "lazy_global":
        rested = (step - 1 - state["last_step"]).to(w.dtype).unsqueeze(1)
        # A row never touched has m = v = 0 and makes up for nothing.
        missed = alpha * rule.beta1 * (1 - rule.beta1**rested) / (1 - rule.beta1)
        w = w - missed * m / _root(v, rule)
        m, v = m * rule.beta1**rested, v * rule.beta2**rested
        state["last_step"] = torch.full_like(state["last_step"], step)
    m = state["m"] = rule.beta1 * m + (1 - rule.beta1) * g
    v = state["v"] = rule.beta2 * v + (1 - rule.beta2) * g * g
    return w - alpha * m / _root(v, rule)


def _ftrl(w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], rule: Ftrl, lr: float) -> Tensor:
    n = state["n"]
    after = state["n"] = n + g * g
    root = (after + _FTRL_EPSILON).sqrt()
    z = state["z"] = state["z"] + g + ((n + _FTRL_EPSILON).sqrt() - root) * w / lr
    moved = (z.sign() * rule.lambda1 - z) / (root / lr + rule.lambda2 + rule.beta / lr)
    return torch.where(z.abs() <= rule.lambda1, torch.zeros_like(w), moved)

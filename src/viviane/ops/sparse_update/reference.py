"""The plain truth of sparse updates: one row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sum_duplicates(
    rows: Tensor, gradients: Tensor, sources: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum, in the order of the entries, the gradients of equal rows."""
    sums: dict[int, Tensor] = {}
    for n, row in enumerate(rows.tolist()):
        g = gradients[n if sources is None else int(sources[n])] * (1.0 if weights is None else weights[n])
        sums[row] = sums[row] + g if row in sums else g.clone()
    unique = sorted(sums)
    stacked = torch.stack([sums[row] for row in unique]) if unique else gradients.new_zeros(0, gradients.shape[1])
    return torch.tensor(unique, dtype=torch.int64), stacked


def sgd_update(storage: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, weight_decay: float = 0.0) -> None:
    """w -= lr (g + weight_decay w)."""
    for row, g in zip(rows.tolist(), gradients, strict=True):
        storage[row] -= lr * (g + weight_decay * storage[row])


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
    """s += g^2; w -= lr g / (sqrt(s) + epsilon)."""
    for row, gradient in zip(rows.tolist(), gradients, strict=True):
        g = gradient + weight_decay * storage[row]
        accumulator[row] += g * g
        storage[row] -= lr * g / (accumulator[row].sqrt() + epsilon)


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
    """Lazy Adam with bias correction by the step."""
    for u, (row, gradient) in enumerate(zip(rows.tolist(), gradients, strict=True)):
        t = int(step[u]) if isinstance(step, Tensor) else step
        g = gradient + weight_decay * storage[row]
        m[row] = beta1 * m[row] + (1 - beta1) * g
        v[row] = beta2 * v[row] + (1 - beta2) * g * g
        alpha = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        storage[row] -= alpha * m[row] / (v[row].sqrt() + epsilon)

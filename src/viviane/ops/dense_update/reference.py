"""The dense update in plain torch: the readable truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from viviane.ops.rules import DenseNumbers, dense_rules

if TYPE_CHECKING:
    from viviane.ops.dense_update import Workspace


def move_tensors(
    rule: str,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    numbers: Tensor | Sequence[float],
    *,
    inside: bool,
    decays: bool,
    scale: Tensor | None,
    gate: Tensor | None,
    workspace: Workspace,
) -> None:
    """Move parameters and state in place."""
    if gate is not None and not bool(gate):
        return
    taken = DenseNumbers.of(numbers.tolist() if isinstance(numbers, Tensor) else numbers)
    shaped = []
    for w, gradient in zip(params, gradients, strict=True):
        g = gradient.to(w.dtype)
        g = g if scale is None else g * scale.to(torch.float32)
        shaped.append(g + taken.decay * w if decays else g)
    dense_rules()[rule].update_dense(list(params), shaped, [list(one) for one in states], taken, inside)


def check_finite(tensors: Sequence[Tensor], status: Tensor, workspace: Workspace) -> None:
    """Set status[0] where any number is NaN or infinite."""
    if not all(bool(torch.isfinite(one).all()) for one in tensors):
        status[0] = 1


def mark(records: Sequence[Tensor], status: Tensor) -> None:
    """Set status[0] where the first number of one of the records is not 0."""
    if any(record[0] != 0 for record in records):
        status[0] = 1


def update_status(loss: Tensor | None, status: Tensor, gate: Tensor) -> None:
    """Decide whether a step may move weights, and count it."""
    if loss is not None and not bool(torch.isfinite(loss)):
        status[0] = 1
    if status[0] != 0 and status[1] < 0:
        status[1] = status[2]
    status[2] += 1
    gate.fill_(int(status[0] == 0))


def update_scaled_status(
    loss: Tensor, status: Tensor, overflow: Tensor, scaling: Tensor, gate: Tensor, *, interval: int, largest: float
) -> None:
    """Decide as `update_status` does, under a loss scale that follows overflows."""
    overflowed = overflow[0] != 0
    overflow.zero_()
    if overflowed and scaling[0] <= 1:
        status[0] = 1
    update_status(loss, status, gate)
    if status[0] != 0:
        return
    if overflowed:
        scaling.copy_(torch.stack([scaling[0] / 2, torch.zeros_like(scaling[1]), scaling[2] + 1]))
        gate.zero_()
        return
    scaling[1] += 1
    if scaling[1] >= interval and scaling[0] < largest:
        scaling[0] *= 2
        scaling[1] = 0

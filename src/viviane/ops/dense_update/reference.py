"""The dense update in plain torch, one tensor after another: the readable truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from viviane.ops.dense_update import Room

FTRL_EPSILON = 2.0**-23


def move_tensors(
    rule: str,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    numbers: Tensor,
    *,
    inside: bool,
    decays: bool,
    scale: Tensor | None,
    gate: Tensor | None,
    room: Room,
) -> None:
    """Move parameters and state in place."""
    if gate is not None and not bool(gate):
        return
    rate, decay, epsilon, first, second, less_first, less_second = numbers.tolist()
    for i, w in enumerate(params):
        own, gradient = [state[i] for state in states], gradients[i]
        g = gradient.to(w.dtype)
        g = g if scale is None else g * scale.to(torch.float32)
        g = g + decay * w if decays else g
        if rule == "sgd":
            w.sub_(rate * g)
        elif rule in ("momentum", "nesterov"):
            _momentum(w, g, own[0], rate, first, nesterov=rule == "nesterov")
        elif rule == "ftrl":
            _ftrl(w, g, own[0], own[1], rate, epsilon, first)
        else:
            if rule == "adagrad":
                own[0] += g * g
            elif rule == "rmsprop":
                own[0].mul_(first).add_(g * g, alpha=less_first)
            else:
                own[0].add_(g - own[0], alpha=less_first)
                own[1].mul_(second).add_(g * g, alpha=less_second)
            squares = own[-1]
            root = (squares + epsilon).sqrt() if inside else squares.sqrt() + epsilon
            w.sub_(rate * ((own[0] if rule == "adam" else g) / root))


def _momentum(w: Tensor, g: Tensor, a: Tensor, rate: float, momentum: float, *, nesterov: bool) -> None:
    if nesterov:
        w -= momentum * a
    a.mul_(momentum).sub_(rate * g)
    w += (1 + momentum) * a if nesterov else a


def _ftrl(w: Tensor, g: Tensor, n: Tensor, z: Tensor, inverse: float, lambda1: float, offset: float) -> None:
    before = (n + FTRL_EPSILON).sqrt()
    n += g * g
    root = (n + FTRL_EPSILON).sqrt()
    z += g + (before - root) * w * inverse
    moved = (z.sign() * lambda1 - z) / (root * inverse + offset)
    w.copy_(torch.where(z.abs() <= lambda1, torch.zeros_like(w), moved))


def check_finite(tensors: Sequence[Tensor], status: Tensor, room: Room) -> None:
    """Set status[0] where any number is NaN or infinite."""
    if not all(bool(torch.isfinite(one).all()) for one in tensors):
        status[0] = 1


def mark(records: Sequence[Tensor], status: Tensor) -> None:
    """Set status[0] where the first number of one of the records is not 0."""
    if any(record[0] != 0 for record in records):
        status[0] = 1


def judge(loss: Tensor | None, status: Tensor, gate: Tensor) -> None:
    """Decide whether a step may move weights, and count it."""
    if loss is not None and not bool(torch.isfinite(loss)):
        status[0] = 1
    if status[0] != 0 and status[1] < 0:
        status[1] = status[2]
    status[2] += 1
    gate.fill_(int(status[0] == 0))


def judge_scaled(
    loss: Tensor, status: Tensor, overflow: Tensor, scaling: Tensor, gate: Tensor, *, interval: int, largest: float
) -> None:
    """Decide as `judge` does, under a loss scale that follows overflows."""
    overflowed = overflow[0] != 0
    overflow.zero_()
    if overflowed and scaling[0] <= 1:
        status[0] = 1
    judge(loss, status, gate)
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

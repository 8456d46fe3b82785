"""SGD, with momentum or Nesterov's.

SGD        w -= lr g
momentum   b = momentum a - lr g;  w += b;  a = b
Nesterov   b = momentum a - lr g;  w += (1 + momentum) b - momentum a;  a = b
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import SGD
from viviane.ops.rules.gpu_steps import store_lr
from viviane.ops.rules.rule import LR, OWN, DenseNumbers, DenseRule, Rule
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: SGD) -> Rule:
    """Return the variant for some settings."""
    if not settings.momentum:
        return Plain(settings)
    return Nesterov(settings) if settings.nesterov else Momentum(settings)


# CPU ---------------------------------------------------------------------------------------------------------


@njit(forceinline=True)
def cpu_plain(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """w -= lr g."""
    lr = float32(numbers[LR])
    for j in range(dim):
        w[j] -= lr * g[j]


@njit(forceinline=True)
def cpu_momentum(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """b = momentum a - lr g; w += b; a = b."""
    lr, keep, at = float32(numbers[LR]), float32(numbers[OWN]), row * dim
    for j in range(dim):
        after = keep * s[at + j] - lr * g[j]
        s[at + j] = after
        w[j] += after


@njit(forceinline=True)
def cpu_nesterov(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """b = momentum a - lr g; w += (1 + momentum) b - momentum a; a = b."""
    lr, keep, at = float32(numbers[LR]), float32(numbers[OWN]), row * dim
    for j in range(dim):
        before = s[at + j]
        after = keep * before - lr * g[j]
        s[at + j] = after
        w[j] += (float32(1.0) + keep) * after - keep * before


# GPU: numbers are lr, momentum -------------------------------------------------------------------------------


@jit
def gpu_plain(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """w -= lr g."""
    return w - numbers[0] * g, first, second, own


@jit
def gpu_momentum(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """b = momentum a - lr g; w += b; a = b."""
    after = numbers[1] * first - numbers[0] * g
    return w + after, after, second, own


@jit
def gpu_nesterov(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """b = momentum a - lr g; w += (1 + momentum) b - momentum a; a = b."""
    after = numbers[1] * first - numbers[0] * g
    w += (1.0 + numbers[1]) * after - numbers[1] * first
    return w, after, second, own


@jit
def gpu_dense_plain(w, g, first, second, numbers, inside: tl.constexpr):
    """w -= lr g."""
    return w - tl.load(numbers).to(tl.float32) * g, first, second


@jit
def gpu_dense_momentum(w, g, first, second, numbers, inside: tl.constexpr):
    """a = momentum a - lr g; w += a."""
    first = first * tl.load(numbers + 3).to(tl.float32) - tl.load(numbers).to(tl.float32) * g
    return w + first, first, second


@jit
def gpu_dense_nesterov(w, g, first, second, numbers, inside: tl.constexpr):
    """w -= momentum a; a = momentum a - lr g; w += (1 + momentum) a."""
    momentum = tl.load(numbers + 3).to(tl.float32)
    w -= momentum * first
    first = first * momentum - tl.load(numbers).to(tl.float32) * g
    w += (1.0 + momentum) * first
    return w, first, second


# Rules -------------------------------------------------------------------------------------------------------


class Plain(DenseRule):
    """w -= lr g."""

    name = "sgd"
    rests = True
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_plain, gpu_plain, store_lr, gpu_dense_plain
    settings: SGD

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return w - lr g."""
        return w - lr * g

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return the momentum."""
        return [self.settings.momentum]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return learning rate and momentum."""
        return lr, self.settings.momentum

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return rate, decay and momentum."""
        return DenseNumbers(group["lr"], group["weight_decay"], first=group.get("momentum", 0.0))

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return learning rate and momentum."""
        return [numbers[0], numbers[3]]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """w -= lr g."""
        torch._foreach_add_(params, gradients, alpha=-numbers.rate)


class Momentum(Plain):
    """b = momentum a - lr g; w += b; a = b."""

    name = "momentum"
    states = ("momentum",)
    rests = False
    cpu, gpu, gpu_dense = cpu_momentum, gpu_momentum, gpu_dense_momentum

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        after = state["momentum"] = self.settings.momentum * state["momentum"] - lr * g
        return w + after

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """a = momentum a - lr g; w += a."""
        (velocities,) = states
        torch._foreach_mul_(velocities, numbers.first)
        torch._foreach_add_(velocities, gradients, alpha=-numbers.rate)
        torch._foreach_add_(params, velocities, alpha=1.0)


class Nesterov(Momentum):
    """b = momentum a - lr g; w += (1 + momentum) b - momentum a; a = b."""

    name = "nesterov"
    cpu, gpu, gpu_dense = cpu_nesterov, gpu_nesterov, gpu_dense_nesterov

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        momentum, before = self.settings.momentum, state["momentum"]
        after = state["momentum"] = momentum * before - lr * g
        return w + ((1 + momentum) * after - momentum * before)

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """w -= momentum a; a = momentum a - lr g; w += (1 + momentum) a."""
        (velocities,) = states
        torch._foreach_add_(params, velocities, alpha=-numbers.first)
        torch._foreach_mul_(velocities, numbers.first)
        torch._foreach_add_(velocities, gradients, alpha=-numbers.rate)
        torch._foreach_add_(params, velocities, alpha=1 + numbers.first)


RULES = (Plain, Momentum, Nesterov)

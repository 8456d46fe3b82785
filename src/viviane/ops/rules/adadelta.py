"""Adadelta: steps as long as earlier ones were, in relation to the gradients.

    s = decay s + (1 - decay) g^2;   d = sqrt(r + epsilon) / sqrt(s + epsilon) g
    r = decay r + (1 - decay) d^2;   w -= lr d

Source: Zeiler 2012.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import Adadelta
from viviane.ops.rules.gpu_steps import store_lr
from viviane.ops.rules.rule import LR, OWN, DenseNumbers, DenseRule, Rule
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: Adadelta) -> Rule:
    """Return the rule for some settings."""
    return AdadeltaRule(settings)


@njit(forceinline=True)
def cpu_adadelta(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """s = decay s + (1 - decay) g^2; d = root(r) / root(s) g; r = decay r + (1 - decay) d^2; w -= lr d."""
    lr, epsilon, at = float32(numbers[LR]), float32(numbers[OWN]), row * dim
    keep, take = float32(numbers[OWN + 1]), float32(numbers[OWN + 2])
    for j in range(dim):
        s[at + j] = keep * s[at + j] + take * g[j] * g[j]
    for j in range(dim):
        g[j] *= np.sqrt(t[at + j] + epsilon) / np.sqrt(s[at + j] + epsilon)
    for j in range(dim):
        t[at + j] = keep * t[at + j] + take * g[j] * g[j]
    for j in range(dim):
        w[j] -= lr * g[j]


@jit
def gpu_adadelta(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """The same; numbers are lr, epsilon, decay, 1 - decay."""
    first = numbers[2] * first + numbers[3] * g * g
    moved = g * tl.sqrt(second + numbers[1]) / tl.sqrt(first + numbers[1])
    second = numbers[2] * second + numbers[3] * moved * moved
    w -= numbers[0] * moved
    return w, first, second, own


@jit
def gpu_dense_adadelta(w, g, first, second, numbers, inside: tl.constexpr):
    """The same for dense parameters."""
    keep, take = tl.load(numbers + 3).to(tl.float32), tl.load(numbers + 5).to(tl.float32)
    epsilon = tl.load(numbers + 2).to(tl.float32)
    first = first * keep + take * (g * g)
    moved = tl.div_rn(tl.sqrt_rn(second + epsilon), tl.sqrt_rn(first + epsilon)) * g
    second = second * keep + take * (moved * moved)
    w -= tl.load(numbers).to(tl.float32) * moved
    return w, first, second


class AdadeltaRule(DenseRule):
    """s = decay s + (1 - decay) g^2; d = root(r) / root(s) g; r = decay r + (1 - decay) d^2; w -= lr d."""

    name = "adadelta"
    states = ("accumulator", "steps")
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_adadelta, gpu_adadelta, store_lr, gpu_dense_adadelta
    settings: Adadelta

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        decay, epsilon = self.settings.decay, self.settings.epsilon
        s = state["accumulator"] = decay * state["accumulator"] + (1 - decay) * g * g
        moved = (state["steps"] + epsilon).sqrt() / (s + epsilon).sqrt() * g
        state["steps"] = decay * state["steps"] + (1 - decay) * moved * moved
        return w - lr * moved

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return epsilon, decay and 1 - decay."""
        return [self.settings.epsilon, self.settings.decay, 1 - self.settings.decay]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return learning rate, epsilon, decay and 1 - decay."""
        return lr, self.settings.epsilon, self.settings.decay, 1 - self.settings.decay

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return rate, weight decay, epsilon and the means' decay."""
        return DenseNumbers(group["lr"], group["weight_decay"], group["epsilon"], group["decay"])

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return learning rate, epsilon, decay and 1 - decay."""
        return [numbers[0], numbers[2], numbers[3], numbers[5]]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """s = decay s + (1 - decay) g^2; d = root(r) / root(s) g; r = decay r + (1 - decay) d^2; w -= lr d."""
        squares, steps = states
        torch._foreach_mul_(squares, numbers.first)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - numbers.first)
        moved = torch._foreach_sqrt(torch._foreach_add(steps, numbers.epsilon))
        torch._foreach_div_(moved, torch._foreach_sqrt(torch._foreach_add(squares, numbers.epsilon)))
        torch._foreach_mul_(moved, gradients)
        torch._foreach_mul_(steps, numbers.first)
        torch._foreach_addcmul_(steps, moved, moved, value=1 - numbers.first)
        torch._foreach_add_(params, moved, alpha=-numbers.rate)


RULES = (AdadeltaRule,)

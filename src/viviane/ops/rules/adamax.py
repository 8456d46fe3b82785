"""Adamax: Adam with a decaying maximum in the place of the second moment.

    m = beta1 m + (1 - beta1) g;   u = max(beta2 u, |g|);   w -= lr / (1 - beta1^t) m / (u + epsilon)

Source: Kingma and Ba 2015, section 7.1.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import Adamax
from viviane.ops.rules.gpu_steps import device_power, power
from viviane.ops.rules.rule import OWN, DenseNumbers, DenseRule, Rule
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: Adamax) -> Rule:
    """Return the rule for some settings."""
    return AdamaxRule(settings)


@njit(forceinline=True)
def cpu_adamax(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """m = beta1 m + (1 - beta1) g; u = max(beta2 u, |g|); w -= a m / (u + epsilon)."""
    at, epsilon, alpha = row * dim, float32(numbers[OWN]), float32(numbers[OWN + 4])
    keep_m, take_m, keep_u = float32(numbers[OWN + 1]), float32(numbers[OWN + 2]), float32(numbers[OWN + 3])
    for j in range(dim):
        t[at + j] = max(keep_u * t[at + j], np.abs(g[j]))
    for j in range(dim):
        g[j] = keep_m * s[at + j] + take_m * g[j]
        s[at + j] = g[j]
    for j in range(dim):
        w[j] -= alpha * g[j] / (t[at + j] + epsilon)


@jit
def gpu_adamax(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """The same; numbers are a, epsilon, beta1, 1 - beta1, beta2."""
    first = numbers[2] * first + numbers[3] * g
    second = tl.maximum(numbers[4] * second, tl.abs(g))
    w -= numbers[0] * first / (second + numbers[1])
    return w, first, second, own


@jit
def store_alpha(numbers, lr, step, first, second, third):
    """a = lr / (1 - beta1^t) is the first number."""
    tl.store(numbers, (lr / (1.0 - device_power(first, step))).to(tl.float32))


@jit
def gpu_dense_adamax(w, g, first, second, numbers, inside: tl.constexpr):
    """The same for dense parameters, m as m + (1 - beta1) (g - m)."""
    first += tl.load(numbers + 5).to(tl.float32) * (g - first)
    second = tl.maximum(second * tl.load(numbers + 4).to(tl.float32), tl.abs(g))
    w -= tl.load(numbers).to(tl.float32) * tl.div_rn(first, second + tl.load(numbers + 2).to(tl.float32))
    return w, first, second


class AdamaxRule(DenseRule):
    """m = beta1 m + (1 - beta1) g; u = max(beta2 u, |g|); w -= a m / (u + epsilon)."""

    name = "adamax"
    states = ("m", "u")
    uses_step = True
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_adamax, gpu_adamax, store_alpha, gpu_dense_adamax
    settings: Adamax

    @property
    def exact(self) -> tuple[float, float, float]:
        """Return beta1."""
        return self.settings.beta1, 0.0, 0.0

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        beta1 = self.settings.beta1
        m = state["m"] = beta1 * state["m"] + (1 - beta1) * g
        u = state["u"] = torch.maximum(self.settings.beta2 * state["u"], g.abs())
        return w - lr / (1 - beta1**step) * m / (u + self.settings.epsilon)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return epsilon, beta1, 1 - beta1, beta2 and a."""
        beta1 = self.settings.beta1
        return [self.settings.epsilon, beta1, 1 - beta1, self.settings.beta2, lr / (1 - beta1**step)]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return a, epsilon, beta1, 1 - beta1 and beta2."""
        beta1 = self.settings.beta1
        return lr / (1 - power(beta1, step)), self.settings.epsilon, beta1, 1 - beta1, self.settings.beta2

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return a, decay, epsilon, beta1 and beta2; step 0, before anything has moved, counts as 1."""
        rate = group["lr"] / (1 - group["beta1"] ** max(1, group["step"]))
        return DenseNumbers(rate, group["weight_decay"], group["epsilon"], group["beta1"], group["beta2"])

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return a, epsilon, beta1, 1 - beta1, beta2 and a."""
        rate, _, epsilon, beta1, beta2, take_m = numbers[:6]
        return [rate, epsilon, beta1, take_m, beta2, rate]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """m += (1 - beta1) (g - m); u = max(beta2 u, |g|); w -= a m / (u + epsilon)."""
        m, u = states
        torch._foreach_lerp_(m, gradients, 1 - numbers.first)
        torch._foreach_mul_(u, numbers.second)
        torch._foreach_maximum_(u, torch._foreach_abs(gradients))
        divisors = torch._foreach_add(u, numbers.epsilon)
        torch._foreach_addcdiv_(params, m, divisors, value=-numbers.rate)


RULES = (AdamaxRule,)

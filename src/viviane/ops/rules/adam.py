"""Adam, and Adam whose rows make up for the steps in which they were not touched ("lazy_global").

    m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
    a = lr sqrt(1 - beta2^t) / (1 - beta1^t);   w -= a m / root(v)

root(v) is sqrt(v) + epsilon or sqrt(v + epsilon). A row that rested for k steps first takes

    w -= a m beta1 (1 - beta1^k) / (1 - beta1) / root(v);   m *= beta1^k;   v *= beta2^k

Source: Kingma and Ba 2015.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numba import float32, float64, njit
from torch import Tensor

from viviane.config.optimizers import Adam
from viviane.ops.rules.gpu_steps import device_power, exact_root, gpu_root, power
from viviane.ops.rules.rule import OWN, DenseNumbers, DenseRule, Rule, dense_roots, root, root_numbers
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: Adam) -> Rule:
    """Return the variant for some settings."""
    return LazyGlobal(settings) if settings.update == "lazy_global" else Standard(settings)


# CPU ---------------------------------------------------------------------------------------------------------


@njit(forceinline=True)
def cpu_adam(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w -= a m / root(v)."""
    inside, outside, at = float32(numbers[OWN]), float32(numbers[OWN + 1]), row * dim
    keep_m, take_m = float32(numbers[OWN + 2]), float32(numbers[OWN + 3])
    keep_v, take_v = float32(numbers[OWN + 4]), float32(numbers[OWN + 5])
    alpha = float32(numbers[OWN + 6])
    for j in range(dim):
        t[at + j] = keep_v * t[at + j] + take_v * g[j] * g[j]
    for j in range(dim):
        g[j] = keep_m * s[at + j] + take_m * g[j]
        s[at + j] = g[j]
    for j in range(dim):
        w[j] -= alpha * g[j] / (np.sqrt(t[at + j] + inside) + outside)


@njit(forceinline=True)
def cpu_lazy(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """Make up for the steps since own[row], then Adam's step."""
    inside, outside, at = float32(numbers[OWN]), float32(numbers[OWN + 1]), row * dim
    step = numbers[OWN + 7]
    rested = step - 1.0 - float64(own[row])
    own[row] = float32(step)
    if rested > 0.0:
        beta1, beta2 = numbers[OWN + 2], numbers[OWN + 4]
        keep_m, keep_v = float32(beta1**rested), float32(beta2**rested)
        missed = float32(numbers[OWN + 6] * beta1 * (1.0 - beta1**rested) / (1.0 - beta1))
        for j in range(dim):
            w[j] -= missed * s[at + j] / (np.sqrt(t[at + j] + inside) + outside)
        for j in range(dim):
            s[at + j] *= keep_m
        for j in range(dim):
            t[at + j] *= keep_v
    cpu_adam(w, g, s, t, own, row, numbers, dim)


# GPU ---------------------------------------------------------------------------------------------------------
# Numbers are a, epsilon, beta1, 1 - beta1, beta2, 1 - beta2; lazy also log2 beta1, log2 beta2, a beta1 / (1 - beta1)
# and the step.


@jit
def gpu_adam(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w -= a m / root(v)."""
    first = numbers[2] * first + numbers[3] * g
    second = numbers[4] * second + numbers[5] * g * g
    w -= numbers[0] * first / gpu_root(second, numbers[1], inside)
    return w, first, second, own


@jit
def gpu_lazy(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """Make up for the steps since `own`, then Adam's step."""
    rested = numbers[9] - 1.0 - own
    kept = tl.exp2(rested * numbers[6])[:, None]
    w -= numbers[8] * (1.0 - kept) * first / gpu_root(second, numbers[1], inside)
    first, second = first * kept, second * tl.exp2(rested * numbers[7])[:, None]
    own = tl.zeros_like(own) + numbers[9]
    return gpu_adam(w, g, first, second, own, numbers, inside, dim)


@jit
def store_alpha(numbers, lr, step, first, second, third):
    """a = lr sqrt(1 - beta2^t) / (1 - beta1^t) is the first number."""
    alpha = lr * tl.sqrt(1.0 - device_power(second, step)) / (1.0 - device_power(first, step))
    tl.store(numbers, alpha.to(tl.float32))


@jit
def store_lazy(numbers, lr, step, first, second, third):
    """Besides, a beta1 / (1 - beta1) is the ninth and the step the tenth."""
    alpha = lr * tl.sqrt(1.0 - device_power(second, step)) / (1.0 - device_power(first, step))
    tl.store(numbers, alpha.to(tl.float32))
    tl.store(numbers + 8, (alpha * first / (1.0 - first)).to(tl.float32))
    tl.store(numbers + 9, step.to(tl.float32))


@jit
def gpu_dense_adam(w, g, first, second, numbers, inside: tl.constexpr):
    """The same for dense parameters, m as m + (1 - beta1) (g - m)."""
    first += tl.load(numbers + 5).to(tl.float32) * (g - first)
    second = second * tl.load(numbers + 4).to(tl.float32) + tl.load(numbers + 6).to(tl.float32) * (g * g)
    divisor = exact_root(second, tl.load(numbers + 2).to(tl.float32), inside)
    w -= tl.load(numbers).to(tl.float32) * tl.div_rn(first, divisor)
    return w, first, second


# Rules -------------------------------------------------------------------------------------------------------


def corrected_lr(group: Mapping[str, Any]) -> float:
    """Return a of a parameter group's present step; step 0, before anything has moved, counts as 1."""
    beta1, beta2, t = group["beta1"], group["beta2"], max(1, group["step"])
    return float(group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t))


class Rows(Rule):
    """Adam's arithmetic of rows."""

    states: ClassVar[tuple[str, ...]] = ("m", "v")
    uses_step = True
    settings: Any  # Adam, or AdamW

    @property
    def exact(self) -> tuple[float, float, float]:
        """Return beta1 and beta2."""
        return self.settings.beta1, self.settings.beta2, 0.0

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        beta1, beta2, _ = self.exact
        alpha = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        m = state["m"] = beta1 * state["m"] + (1 - beta1) * g
        v = state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
        return w - alpha * m / root(v, self.settings)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return the root's two numbers, beta1, 1 - beta1, beta2, 1 - beta2, a and the step."""
        beta1, beta2, _ = self.exact
        alpha = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return [*root_numbers(self.settings), beta1, 1 - beta1, beta2, 1 - beta2, alpha, step]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return a, epsilon, beta1, 1 - beta1, beta2, 1 - beta2."""
        beta1, beta2, _ = self.exact
        alpha = lr * math.sqrt(1 - power(beta2, step)) / (1 - power(beta1, step))
        return alpha, self.settings.epsilon, beta1, 1 - beta1, beta2, 1 - beta2


class Standard(Rows, DenseRule):
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w -= a m / root(v)."""

    name = "adam"
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_adam, gpu_adam, store_alpha, gpu_dense_adam

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return a, decay, epsilon, beta1 and beta2."""
        rate, decay = corrected_lr(group), group["weight_decay"]
        return DenseNumbers(rate, decay, group["epsilon"], group["beta1"], group["beta2"])

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return a, the root's two numbers, beta1, 1 - beta1, beta2, 1 - beta2 and a."""
        rate, _, epsilon, beta1, beta2, take_m, take_v = numbers[:7]
        return [rate, *([epsilon, 0.0] if inside else [0.0, epsilon]), beta1, take_m, beta2, take_v, rate]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2; w -= a m / root(v)."""
        m, v = states
        torch._foreach_lerp_(m, gradients, 1 - numbers.first)
        torch._foreach_mul_(v, numbers.second)
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - numbers.second)
        torch._foreach_addcdiv_(params, m, dense_roots(v, numbers.epsilon, inside), value=-numbers.rate)


class LazyGlobal(Rows):
    """Adam's step after the row has made up for the steps in which it was not touched."""

    name = "adam_lazy_global"
    states = ("m", "v", "last_step")
    per_row = frozenset({"last_step"})
    cpu, gpu, gpu_step_numbers = cpu_lazy, gpu_lazy, store_lazy

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        beta1, beta2, _ = self.exact
        alpha = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        rested = (step - 1 - state["last_step"]).to(w.dtype).unsqueeze(1)
        # A row that was never touched has m = v = 0 and makes up for nothing.
        missed = alpha * beta1 * (1 - beta1**rested) / (1 - beta1)
        w = w - missed * state["m"] / root(state["v"], self.settings)
        state["m"], state["v"] = state["m"] * beta1**rested, state["v"] * beta2**rested
        state["last_step"] = torch.full_like(state["last_step"], step)
        return super().update(w, g, state, lr, step)

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return Adam's numbers, log2 beta1, log2 beta2, a beta1 / (1 - beta1) and the step."""
        numbers, (beta1, beta2, _) = super().gpu_numbers(lr, step), self.exact
        return (*numbers, _log2(beta1), _log2(beta2), numbers[0] * beta1 / (1 - beta1), float(step))


def _log2(beta: float) -> float:
    # A beta of 0 forgets at once: 2^(-200 k) is 0 in float32 for k > 0, and 1 for k = 0.
    return math.log2(beta) if beta > 0 else -200.0


RULES = (Standard, LazyGlobal)

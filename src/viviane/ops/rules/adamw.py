"""AdamW: Adam with decoupled weight decay.

    w -= lr weight_decay w;   then Adam's step with the gradient alone

Of a table only the rows that move decay. Source: Loshchilov and Hutter 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import AdamW
from viviane.ops.rules.adam import Standard, corrected_lr, cpu_adam, gpu_adam, gpu_dense_adam, store_alpha
from viviane.ops.rules.rule import OWN, DenseNumbers, Rule
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: AdamW) -> Rule:
    """Return the rule for some settings."""
    return DecoupledAdam(settings)


@njit(forceinline=True)
def cpu_adamw(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """w -= lr weight_decay w; then Adam's step."""
    decay = float32(numbers[OWN + 8])
    for j in range(dim):
        w[j] -= decay * w[j]
    cpu_adam(w, g, s, t, own, row, numbers, dim)


@jit
def gpu_adamw(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """The same; the seventh number is lr weight_decay."""
    w -= numbers[6] * w
    return gpu_adam(w, g, first, second, own, numbers, inside, dim)


@jit
def store_adamw(numbers, lr, step, first, second, third):
    """a is the first number, lr weight_decay the seventh."""
    store_alpha(numbers, lr, step, first, second, third)
    tl.store(numbers + 6, (lr * third).to(tl.float32))


@jit
def gpu_dense_adamw(w, g, first, second, numbers, inside: tl.constexpr):
    """The same for dense parameters."""
    w -= tl.load(numbers + 7).to(tl.float32) * w
    return gpu_dense_adam(w, g, first, second, numbers, inside)


class DecoupledAdam(Standard):
    """w -= lr weight_decay w; then Adam's step."""

    name = "adamw"
    couples_decay = False
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_adamw, gpu_adamw, store_adamw, gpu_dense_adamw
    settings: AdamW

    @property
    def exact(self) -> tuple[float, float, float]:
        """Return beta1, beta2 and weight_decay."""
        return self.settings.beta1, self.settings.beta2, self.settings.weight_decay

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        return super().update(w - lr * self.settings.weight_decay * w, g, state, lr, step)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return Adam's numbers and lr weight_decay."""
        return [*super().cpu_numbers(lr, step), lr * self.settings.weight_decay]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return Adam's numbers and lr weight_decay."""
        return (*super().gpu_numbers(lr, step), lr * self.settings.weight_decay)

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return a, no coupled decay, epsilon, beta1, beta2 and lr weight_decay."""
        return DenseNumbers(
            corrected_lr(group), 0.0, group["epsilon"], group["beta1"], group["beta2"],
            third=group["lr"] * group["weight_decay"],
        )  # fmt: skip

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return Adam's numbers, an unused step, and lr weight_decay."""
        return [*super().cpu_dense_numbers(numbers, inside), 0.0, numbers[7]]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """w *= 1 - lr weight_decay; then Adam's step."""
        torch._foreach_mul_(params, 1 - numbers.third)
        super().update_dense(params, gradients, states, numbers, inside)


RULES = (DecoupledAdam,)

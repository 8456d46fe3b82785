"""RMSProp: s = decay s + (1 - decay) g^2; w -= lr g / root(s).

root(s) is sqrt(s) + epsilon or sqrt(s + epsilon). Source: Tieleman and Hinton 2012.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import RMSProp
from viviane.ops.rules.gpu_steps import exact_root, gpu_root, store_lr
from viviane.ops.rules.rule import LR, OWN, DenseNumbers, DenseRule, Rule, dense_roots, root, root_numbers
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: RMSProp) -> Rule:
    """Return the rule for some settings."""
    return RmsProp(settings)


@njit(forceinline=True)
def cpu_rmsprop(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """s = decay s + (1 - decay) g^2; w -= lr g / root(s)."""
    lr, inside, outside, at = float32(numbers[LR]), float32(numbers[OWN]), float32(numbers[OWN + 1]), row * dim
    keep, take = float32(numbers[OWN + 2]), float32(numbers[OWN + 3])
    for j in range(dim):
        mean_square = keep * s[at + j] + take * g[j] * g[j]
        s[at + j] = mean_square
        w[j] -= lr * g[j] / (np.sqrt(mean_square + inside) + outside)


@jit
def gpu_rmsprop(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """The same; numbers are lr, epsilon, decay, 1 - decay."""
    first = numbers[2] * first + numbers[3] * g * g
    w -= numbers[0] * g / gpu_root(first, numbers[1], inside)
    return w, first, second, own


@jit
def gpu_dense_rmsprop(w, g, first, second, numbers, inside: tl.constexpr):
    """The same for dense parameters."""
    first = first * tl.load(numbers + 3).to(tl.float32) + tl.load(numbers + 5).to(tl.float32) * (g * g)
    divisor = exact_root(first, tl.load(numbers + 2).to(tl.float32), inside)
    w -= tl.load(numbers).to(tl.float32) * tl.div_rn(g, divisor)
    return w, first, second


class RmsProp(DenseRule):
    """s = decay s + (1 - decay) g^2; w -= lr g / root(s)."""

    name = "rmsprop"
    states = ("accumulator",)
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_rmsprop, gpu_rmsprop, store_lr, gpu_dense_rmsprop
    settings: RMSProp

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        decay = self.settings.decay
        s = state["accumulator"] = decay * state["accumulator"] + (1 - decay) * g * g
        return w - lr * g / root(s, self.settings)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return the two numbers of the root, decay and 1 - decay."""
        return [*root_numbers(self.settings), self.settings.decay, 1 - self.settings.decay]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return learning rate, epsilon, decay and 1 - decay."""
        return lr, self.settings.epsilon, self.settings.decay, 1 - self.settings.decay

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return rate, decay, epsilon and the mean's decay."""
        return DenseNumbers(group["lr"], group["weight_decay"], group["epsilon"], group["decay"])

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return learning rate, the two numbers of the root, decay and 1 - decay."""
        return [numbers[0], *([numbers[2], 0.0] if inside else [0.0, numbers[2]]), numbers[3], numbers[5]]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """s = decay s + (1 - decay) g^2; w -= lr g / root(s)."""
        (squares,) = states
        torch._foreach_mul_(squares, numbers.first)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - numbers.first)
        torch._foreach_addcdiv_(params, gradients, dense_roots(squares, numbers.epsilon, inside), value=-numbers.rate)


RULES = (RmsProp,)

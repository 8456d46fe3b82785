"""AdaGrad, and AdaGrad with one accumulator for each row.

    AdaGrad    s += g^2;                          w -= lr g / root(s)
    row-wise   s += mean of g^2 over the row;     w -= lr g / root(s)

with root(s) = sqrt(s) + epsilon or sqrt(s + epsilon). Source: Duchi, Hazan and Singer 2011.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import AdaGrad
from viviane.ops.native.numbers import square_sum
from viviane.ops.rules.gpu_steps import exact_root, gpu_root, store_lr
from viviane.ops.rules.rule import LR, OWN, DenseNumbers, DenseRule, Rule, dense_roots, root, root_numbers
from viviane.ops.triton_parts.language import jit, tl

_SMALLEST_ROOT: Final = 1e-30


def rule_of(settings: AdaGrad) -> Rule:
    """Return the variant for some settings."""
    return RowWise(settings) if settings.row_wise else Full(settings)


# CPU ---------------------------------------------------------------------------------------------------------


@njit(forceinline=True)
def cpu_full(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """s += g^2; w -= lr g / root(s)."""
    lr, inside, outside, at = float32(numbers[LR]), float32(numbers[OWN]), float32(numbers[OWN + 1]), row * dim
    for j in range(dim):
        sum_squares = s[at + j] + g[j] * g[j]
        s[at + j] = sum_squares
        w[j] -= lr * g[j] / (np.sqrt(sum_squares + inside) + outside)


@njit(forceinline=True)
def cpu_row_wise(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """s += mean of g^2; w -= lr g / root(s)."""
    lr, inside, outside = float32(numbers[LR]), float32(numbers[OWN]), float32(numbers[OWN + 1])
    sum_squares = own[row] + square_sum(g, dim) / float32(dim)
    own[row] = sum_squares
    divisor = np.sqrt(sum_squares + inside) + outside
    if divisor > float32(_SMALLEST_ROOT):
        factor = lr / divisor
        for j in range(dim):
            w[j] -= factor * g[j]
    else:  # lr / divisor may be too large for a float32
        for j in range(dim):
            w[j] -= lr * g[j] / divisor


# GPU: numbers are lr, epsilon --------------------------------------------------------------------------------


@jit
def gpu_full(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """s += g^2; w -= lr g / root(s)."""
    first += g * g
    w -= numbers[0] * g / gpu_root(first, numbers[1], inside)
    return w, first, second, own


@jit
def gpu_row_wise(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """s += mean of g^2; w -= lr g / root(s), with one quotient for each row."""
    own += tl.sum(g * g, 1) / dim
    w -= (numbers[0] / gpu_root(own, numbers[1], inside))[:, None] * g
    return w, first, second, own


@jit
def gpu_dense_full(w, g, first, second, numbers, inside: tl.constexpr):
    """s += g^2; w -= lr g / root(s)."""
    first += g * g
    divisor = exact_root(first, tl.load(numbers + 2).to(tl.float32), inside)
    w -= tl.load(numbers).to(tl.float32) * tl.div_rn(g, divisor)
    return w, first, second


# Rules -------------------------------------------------------------------------------------------------------


class Full(DenseRule):
    """s += g^2; w -= lr g / root(s)."""

    name = "adagrad"
    states = ("accumulator",)
    rests = True
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_full, gpu_full, store_lr, gpu_dense_full
    settings: AdaGrad

    def initial(self) -> dict[str, float]:
        """Return the accumulator's first value."""
        return {"accumulator": self.settings.initial_accumulator}

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        s = state["accumulator"] = state["accumulator"] + g * g
        return w - lr * g / root(s, self.settings)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return the two numbers of the root."""
        return root_numbers(self.settings)

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return learning rate and epsilon."""
        return lr, self.settings.epsilon

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return rate, decay and epsilon."""
        return DenseNumbers(group["lr"], group["weight_decay"], group["epsilon"])

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return learning rate and the two numbers of the root."""
        return [numbers[0], *([numbers[2], 0.0] if inside else [0.0, numbers[2]])]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """s += g^2; w -= lr g / root(s)."""
        (sums,) = states
        torch._foreach_addcmul_(sums, gradients, gradients)
        torch._foreach_addcdiv_(params, gradients, dense_roots(sums, numbers.epsilon, inside), value=-numbers.rate)


class RowWise(Rule):
    """s += mean of g^2 over the row; w -= lr g / root(s)."""

    name = "adagrad_row_wise"
    states = ("accumulator",)
    per_row = frozenset(states)
    sums_rows = True
    rests = True
    cpu, gpu, gpu_step_numbers = cpu_row_wise, gpu_row_wise, store_lr
    settings: AdaGrad

    def initial(self) -> dict[str, float]:
        """Return the accumulator's first value."""
        return {"accumulator": self.settings.initial_accumulator}

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        s = state["accumulator"] = state["accumulator"] + (g * g).mean(1)
        return w - lr * g / root(s.unsqueeze(1), self.settings)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return the two numbers of the root."""
        return root_numbers(self.settings)

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return learning rate and epsilon."""
        return lr, self.settings.epsilon


RULES = (Full, RowWise)

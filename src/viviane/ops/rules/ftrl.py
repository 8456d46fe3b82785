"""FTRL-proximal: weights that matter little become exactly zero.

    n' = n + g^2;   z += g + (sqrt(n + e) - sqrt(n' + e)) w / lr;   e = 2^-23
    w = 0 where |z| <= lambda1
    w = (sign(z) lambda1 - z) / (sqrt(n' + e) / lr + lambda2 + beta / lr) elsewhere

Source: McMahan et al. 2013.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import Ftrl
from viviane.ops.native.numbers import select
from viviane.ops.rules.rule import LR, OWN, DenseNumbers, DenseRule, Rule
from viviane.ops.triton_parts.language import jit, tl

EPSILON: Final = 2.0**-23


def rule_of(settings: Ftrl) -> Rule:
    """Return the rule for some settings."""
    return FtrlProximal(settings)


@njit(forceinline=True)
def cpu_ftrl(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """n' = n + g^2; z += g + (sqrt(n + e) - sqrt(n' + e)) w / lr; w from z and n'."""
    per_lr, lambda1, extra = float32(1.0 / numbers[LR]), float32(numbers[OWN]), float32(numbers[OWN + 1])
    at = row * dim
    # w is computed from z and n; until then it holds (sqrt(n' + e) - sqrt(n + e)) w, with the difference of the roots
    # computed without subtracting nearly equal numbers. Longer loops would not be vectorized.
    for j in range(dim):
        square, before = g[j] * g[j], s[at + j]
        root = np.sqrt(before + square + float32(EPSILON))
        w[j] *= square / (np.sqrt(before + float32(EPSILON)) + root)
    for j in range(dim):
        s[at + j] += g[j] * g[j]
    for j in range(dim):
        g[j] = t[at + j] + (g[j] - w[j] * per_lr)
        t[at + j] = g[j]
    for j in range(dim):
        z, root = g[j], np.sqrt(s[at + j] + float32(EPSILON))
        # z moved by lambda1 towards zero, and zero where |z| <= lambda1; NaN stays NaN.
        above, below = z - lambda1, z + lambda1
        rest = select(above < 0, float32(0.0), above) + select(below > 0, float32(0.0), below)
        w[j] = (float32(0.0) - rest) / (root * per_lr + extra)


@jit
def gpu_ftrl(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """The same; numbers are lr, lambda1, lambda2 + beta / lr."""
    tiny: tl.constexpr = 1.1920928955078125e-07  # 2^-23
    after = first + g * g
    end = tl.sqrt(after + tiny)
    second += g + (tl.sqrt(first + tiny) - end) * w / numbers[0]
    toward = tl.where(second > 0, numbers[1], -numbers[1])
    moved = (toward - second) / (end / numbers[0] + numbers[2])
    return tl.where(tl.abs(second) <= numbers[1], 0.0, moved), after, second, own


@jit
def store_ftrl(numbers, lr, step, first, second, third):
    """lr and lambda2 + beta / lr."""
    tl.store(numbers, lr.to(tl.float32))
    tl.store(numbers + 2, (first + second / lr).to(tl.float32))


@jit
def gpu_dense_ftrl(w, g, first, second, numbers, inside: tl.constexpr):
    """The same for dense parameters; numbers are 1 / lr, -, lambda1, lambda2 + beta / lr."""
    tiny: tl.constexpr = 1.1920928955078125e-07  # 2^-23
    rate, lambda1 = tl.load(numbers).to(tl.float32), tl.load(numbers + 2).to(tl.float32)
    before = tl.sqrt_rn(first + tiny)
    first += g * g
    root = tl.sqrt_rn(first + tiny)
    second += g + (before - root) * w * rate
    sign = tl.where(second > 0, 1.0, tl.where(second < 0, -1.0, 0.0))
    moved = tl.div_rn(sign * lambda1 - second, root * rate + tl.load(numbers + 3).to(tl.float32))
    return tl.where(tl.abs(second) <= lambda1, 0.0, moved), first, second


class FtrlProximal(DenseRule):
    """n' = n + g^2; z += g + (sqrt(n + e) - sqrt(n' + e)) w / lr; w from z and n'."""

    name = "ftrl"
    states = ("n", "z")
    divides_by_rate = True
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_ftrl, gpu_ftrl, store_ftrl, gpu_dense_ftrl
    settings: Ftrl

    @property
    def exact(self) -> tuple[float, float, float]:
        """Return lambda2 and beta."""
        return self.settings.lambda2, self.settings.beta, 0.0

    def initial(self) -> dict[str, float]:
        """Return the first values of n and z."""
        return {"n": self.settings.initial_accumulator, "z": 0.0}

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        n, lambda1 = state["n"], self.settings.lambda1
        after = state["n"] = n + g * g
        end = (after + EPSILON).sqrt()
        z = state["z"] = state["z"] + g + ((n + EPSILON).sqrt() - end) * w / lr
        moved = (z.sign() * lambda1 - z) / (end / lr + self.settings.lambda2 + self.settings.beta / lr)
        return torch.where(z.abs() <= lambda1, torch.zeros_like(w), moved)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return lambda1 and lambda2 + beta / lr."""
        return [self.settings.lambda1, self.settings.lambda2 + self.settings.beta / lr]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return learning rate, lambda1 and lambda2 + beta / lr."""
        return lr, self.settings.lambda1, self.settings.lambda2 + self.settings.beta / lr

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return 1 / lr, decay, lambda1 in place of epsilon, lambda2 + beta / lr, and lr."""
        lr = group["lr"]
        offset = group["lambda2"] + group["beta"] / lr
        return DenseNumbers(1 / lr, group["weight_decay"], group["lambda1"], offset, third=lr)

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return learning rate, lambda1 and lambda2 + beta / lr."""
        return [1 / numbers[0], numbers[2], numbers[3]]

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """The same, one tensor after another."""
        inverse, lambda1, offset, lr = numbers.rate, numbers.epsilon, numbers.first, numbers.third
        for w, g, n, z in zip(params, gradients, *states, strict=True):
            before = (n + EPSILON).sqrt_()
            end = n.addcmul_(g, g).add(EPSILON).sqrt_()
            z.add_(g).add_((before - end) * w, alpha=inverse)
            moved = (z.sign() * lambda1 - z) / (end / lr + offset)
            w.copy_(torch.where(z.abs() <= lambda1, torch.zeros_like(w), moved))


RULES = (FtrlProximal,)

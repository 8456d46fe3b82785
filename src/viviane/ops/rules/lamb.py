"""LAMB: Adam's direction, scaled to the norm of the weights.

    m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay w
    w -= lr r u,   r = |w| / |u|, and 1 where one of the norms is 0

Norms are of a row of a table, and of a whole dense parameter. Source: You et al. 2020; FBGEMM uses norms of rows too.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import Lamb
from viviane.ops.native.numbers import square_sum
from viviane.ops.rules.gpu_steps import device_power, power
from viviane.ops.rules.rule import LR, OWN, DenseNumbers, DenseRule, Rule
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: Lamb) -> Rule:
    """Return the rule for some settings."""
    return LambRule(settings)


@njit(forceinline=True)
def cpu_lamb(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """Move a row by lr r u."""
    lr, at = float32(numbers[LR]), row * dim
    keep_m, take_m = float32(numbers[OWN]), float32(numbers[OWN + 1])
    keep_v, take_v = float32(numbers[OWN + 2]), float32(numbers[OWN + 3])
    correct_m, correct_v = float32(numbers[OWN + 4]), float32(numbers[OWN + 5])
    epsilon, decay = float32(numbers[OWN + 6]), float32(numbers[OWN + 7])
    for j in range(dim):
        t[at + j] = keep_v * t[at + j] + take_v * g[j] * g[j]
    for j in range(dim):
        g[j] = keep_m * s[at + j] + take_m * g[j]
        s[at + j] = g[j]
    for j in range(dim):
        g[j] = g[j] * correct_m / (np.sqrt(t[at + j] * correct_v) + epsilon) + decay * w[j]
    norm_w, norm_u = np.sqrt(square_sum(w, dim)), np.sqrt(square_sum(g, dim))
    factor = lr
    if norm_w > float32(0.0) and norm_u > float32(0.0):
        factor = lr * (norm_w / norm_u)
    for j in range(dim):
        w[j] -= factor * g[j]


@jit
def gpu_lamb(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """The same; numbers are lr, epsilon, beta1, 1 - beta1, beta2, 1 - beta2, both corrections, weight_decay."""
    first = numbers[2] * first + numbers[3] * g
    second = numbers[4] * second + numbers[5] * g * g
    u = first * numbers[6] / (tl.sqrt(second * numbers[7]) + numbers[1]) + numbers[8] * w
    norm_w, norm_u = tl.sqrt(tl.sum(w * w, 1)), tl.sqrt(tl.sum(u * u, 1))
    has_both = (norm_w > 0) & (norm_u > 0)
    ratio = tl.where(has_both, norm_w / tl.where(has_both, norm_u, 1.0), 1.0)
    w -= (numbers[0] * ratio)[:, None] * u
    return w, first, second, own


@jit
def store_lamb(numbers, lr, step, first, second, third):
    """lr is the first number, 1 / (1 - beta1^t) and 1 / (1 - beta2^t) are the seventh and eighth."""
    tl.store(numbers, lr.to(tl.float32))
    tl.store(numbers + 6, (1.0 / (1.0 - device_power(first, step))).to(tl.float32))
    tl.store(numbers + 7, (1.0 / (1.0 - device_power(second, step))).to(tl.float32))


class LambRule(DenseRule):
    """w -= lr r u with r = |w| / |u|."""

    name = "lamb"
    states = ("m", "v")
    uses_step = True
    sums_rows = True
    couples_decay = False
    cpu, gpu, gpu_step_numbers, gpu_dense = cpu_lamb, gpu_lamb, store_lamb, None
    settings: Lamb

    @property
    def exact(self) -> tuple[float, float, float]:
        """Return beta1 and beta2."""
        return self.settings.beta1, self.settings.beta2, 0.0

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        beta1, beta2, _ = self.exact
        m = state["m"] = beta1 * state["m"] + (1 - beta1) * g
        v = state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
        u = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + self.settings.epsilon)
        u = u + self.settings.weight_decay * w
        return w - lr * _ratio(w, u, dim=1) * u

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return beta1, 1 - beta1, beta2, 1 - beta2, both corrections, epsilon and weight_decay."""
        (beta1, beta2, _), own = self.exact, self.settings
        corrections = 1 / (1 - beta1**step), 1 / (1 - beta2**step)
        return [beta1, 1 - beta1, beta2, 1 - beta2, *corrections, own.epsilon, own.weight_decay]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return lr, epsilon, beta1, 1 - beta1, beta2, 1 - beta2, both corrections and weight_decay."""
        (beta1, beta2, _), own = self.exact, self.settings
        corrections = 1 / (1 - power(beta1, step)), 1 / (1 - power(beta2, step))
        return (lr, own.epsilon, beta1, 1 - beta1, beta2, 1 - beta2, *corrections, own.weight_decay)

    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return lr, weight_decay, epsilon, beta1, beta2 and both corrections."""
        beta1, beta2, t = group["beta1"], group["beta2"], max(1, group["step"])
        return DenseNumbers(
            group["lr"], group["weight_decay"], group["epsilon"], beta1, beta2, 1 / (1 - beta1**t), 1 / (1 - beta2**t)
        )

    @classmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return nothing: norms of whole tensors need plain torch operations."""
        return []

    @classmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """The same with norms of whole tensors; numbers may be 0-dim tensors on the device."""
        n = numbers
        for w, g, m, v in zip(params, gradients, *states, strict=True):
            m.mul_(n.first).add_(g * (1 - n.first))
            v.mul_(n.second).add_(g * g * (1 - n.second))
            u = (m * n.third) / ((v * n.fourth).sqrt() + n.epsilon) + w * n.decay
            w.sub_(u * (n.rate * _ratio(w, u)))


def _ratio(w: Tensor, u: Tensor, dim: int | None = None) -> Tensor:
    """Return |w| / |u|, and 1 where one of them is 0."""
    norm_w = torch.linalg.vector_norm(w, dim=dim, keepdim=dim is not None)
    norm_u = torch.linalg.vector_norm(u, dim=dim, keepdim=dim is not None)
    both = (norm_w > 0) & (norm_u > 0)
    return torch.where(both, norm_w / torch.where(both, norm_u, 1.0), 1.0)


RULES = (LambRule,)

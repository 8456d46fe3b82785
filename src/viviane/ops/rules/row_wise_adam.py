"""Row-wise Adam: Adam with one second moment for each row of a table.

    m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) mean of g^2 over the row
    a = lr sqrt(1 - beta2^t) / (1 - beta1^t);   w -= a m / root(v)

It needs half of Adam's optimizer state. FBGEMM has it as "partial row-wise Adam", with epsilon beside the corrected
root. Tables only.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import numpy as np
from numba import float32, njit
from torch import Tensor

from viviane.config.optimizers import RowWiseAdam
from viviane.ops.native.numbers import square_sum
from viviane.ops.rules.adam import store_alpha
from viviane.ops.rules.gpu_steps import gpu_root, power
from viviane.ops.rules.rule import OWN, Rule, root, root_numbers
from viviane.ops.triton_parts.language import jit, tl


def rule_of(settings: RowWiseAdam) -> Rule:
    """Return the rule for some settings."""
    return RowWise(settings)


@njit(forceinline=True)
def cpu_row_wise(w, g, s, t, own, row, numbers, dim):  # type: ignore[no-untyped-def]
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) mean of g^2; w -= a m / root(v)."""
    inside, outside, at = float32(numbers[OWN]), float32(numbers[OWN + 1]), row * dim
    keep_m, take_m = float32(numbers[OWN + 2]), float32(numbers[OWN + 3])
    keep_v, take_v = float32(numbers[OWN + 4]), float32(numbers[OWN + 5])
    alpha = float32(numbers[OWN + 6])
    mean_square = keep_v * own[row] + take_v * (square_sum(g, dim) / float32(dim))
    own[row] = mean_square
    divisor = np.sqrt(mean_square + inside) + outside
    for j in range(dim):
        g[j] = keep_m * s[at + j] + take_m * g[j]
        s[at + j] = g[j]
    for j in range(dim):
        w[j] -= alpha * g[j] / divisor


@jit
def gpu_row_wise(w, g, first, second, own, numbers, inside: tl.constexpr, dim: tl.constexpr):
    """The same; numbers are a, epsilon, beta1, 1 - beta1, beta2, 1 - beta2."""
    first = numbers[2] * first + numbers[3] * g
    own = numbers[4] * own + numbers[5] * (tl.sum(g * g, 1) / dim)
    w -= numbers[0] * first / gpu_root(own, numbers[1], inside)[:, None]
    return w, first, second, own


class RowWise(Rule):
    """m as Adam's, v one number for each row; w -= a m / root(v)."""

    name = "row_wise_adam"
    states = ("m", "v")
    per_row = frozenset({"v"})
    uses_step = True
    sums_rows = True
    cpu, gpu, gpu_step_numbers = cpu_row_wise, gpu_row_wise, store_alpha
    settings: RowWiseAdam

    @property
    def exact(self) -> tuple[float, float, float]:
        """Return beta1 and beta2."""
        return self.settings.beta1, self.settings.beta2, 0.0

    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows."""
        beta1, beta2, _ = self.exact
        alpha = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        m = state["m"] = beta1 * state["m"] + (1 - beta1) * g
        v = state["v"] = beta2 * state["v"] + (1 - beta2) * (g * g).mean(1)
        return w - alpha * m / root(v.unsqueeze(1), self.settings)

    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return the root's two numbers, beta1, 1 - beta1, beta2, 1 - beta2 and a."""
        beta1, beta2, _ = self.exact
        alpha = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return [*root_numbers(self.settings), beta1, 1 - beta1, beta2, 1 - beta2, alpha]

    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return a, epsilon, beta1, 1 - beta1, beta2, 1 - beta2."""
        beta1, beta2, _ = self.exact
        alpha = lr * math.sqrt(1 - power(beta2, step)) / (1 - power(beta1, step))
        return alpha, self.settings.epsilon, beta1, 1 - beta1, beta2, 1 - beta2


RULES = (RowWise,)

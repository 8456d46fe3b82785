"""The arithmetic of the rules on one row inside a kernel, as `viviane.config.optimizers` writes it.

Each function moves a row `w` by its summed gradient `g`, both float32 on the stack, and the row's state in place.
`s` and `t` are the states' memory, `at` the row's first element there. `numbers` are the settings, see `settings`.

A loop writes to one of the two states at most, and then does not read the other: the compiler, which cannot know that
they do not overlap, would take one number at a time. `g` carries what the next loop needs.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import float32, float64, njit

from viviane.config.optimizers import SGD, AdaGrad, Adam, AnyOptimizer, Ftrl, RMSProp
from viviane.ops.native.numbers import select, square_sum

PLAIN_SGD: Final = 0
MOMENTUM: Final = 1
NESTEROV: Final = 2
ADAGRAD: Final = 3
ROW_WISE: Final = 4
RMSPROP: Final = 5
ADAM: Final = 6
LAZY_ADAM: Final = 7
FTRL: Final = 8

# Places in `numbers`.
SCALE: Final = 0
CLIP: Final = 1
DECAY: Final = 2
_LR: Final = 3
_OWN: Final = 4
_FTRL_EPSILON: Final = 2.0**-23
_DIVISIBLE: Final = 1e-30


def rule_kind(rule: AnyOptimizer) -> int:
    """Return the constant that a kernel is built for."""
    if isinstance(rule, SGD):
        return (NESTEROV if rule.nesterov else MOMENTUM) if rule.momentum else PLAIN_SGD
    if isinstance(rule, AdaGrad):
        return ROW_WISE if rule.row_wise else ADAGRAD
    if isinstance(rule, Adam):
        return LAZY_ADAM if rule.update == "lazy_global" else ADAM
    return FTRL if isinstance(rule, Ftrl) else RMSPROP


def state_widths(rule: int, dim: int) -> tuple[int, int]:
    """Return how many numbers of a row stand in its first and in its second state, its clock apart."""
    first = {PLAIN_SGD: 0, ROW_WISE: 1}.get(rule, dim)
    return first, dim if rule in (ADAM, LAZY_ADAM, FTRL) else 0


def settings(rule: AnyOptimizer, lr: float, step: int, scale: float) -> list[float]:
    """Return a kernel's `numbers`: scale, clip (0: none), decay, lr, and then the rule's own.

    A root is sqrt(s + a) + b, with epsilon in a or in b.
    """
    shared = [scale, rule.clip_row_norm or 0.0, rule.weight_decay, lr]
    if isinstance(rule, SGD):
        return [*shared, rule.momentum]
    if isinstance(rule, Ftrl):
        return [*shared, rule.lambda1, rule.lambda2 + rule.beta / lr]
    root = [rule.epsilon, 0.0] if rule.epsilon_inside_root else [0.0, rule.epsilon]
    if isinstance(rule, AdaGrad):
        return [*shared, *root]
    if isinstance(rule, RMSProp):
        return [*shared, *root, rule.decay, 1 - rule.decay]
    alpha = lr * math.sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
    return [*shared, *root, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, alpha, step]


@njit(forceinline=True)
def sgd(w, g, numbers, dim):  # type: ignore[no-untyped-def]
    """w -= lr g."""
    lr = float32(numbers[_LR])
    for j in range(dim):
        w[j] -= lr * g[j]


@njit(forceinline=True)
def momentum(w, g, s, at, numbers, dim, nesterov):  # type: ignore[no-untyped-def]
    """b = momentum a - lr g; w += b, or (1 + momentum) b - momentum a; a = b."""
    lr, keep = float32(numbers[_LR]), float32(numbers[_OWN])
    for j in range(dim):
        before = s[at + j]
        after = keep * before - lr * g[j]
        s[at + j] = after
        w[j] += (float32(1.0) + keep) * after - keep * before if nesterov else after


@njit(forceinline=True)
def adagrad(w, g, s, at, numbers, dim):  # type: ignore[no-untyped-def]
    """s += g^2; w -= lr g / root(s)."""
    lr, inside, outside = float32(numbers[_LR]), float32(numbers[_OWN]), float32(numbers[_OWN + 1])
    for j in range(dim):
        sum_squares = s[at + j] + g[j] * g[j]
        s[at + j] = sum_squares
        w[j] -= lr * g[j] / (np.sqrt(sum_squares + inside) + outside)


@njit(forceinline=True)
def row_wise_adagrad(w, g, s, row, numbers, dim):  # type: ignore[no-untyped-def]
    """s += mean of g^2; w -= lr g / root(s)."""
    lr, inside, outside = float32(numbers[_LR]), float32(numbers[_OWN]), float32(numbers[_OWN + 1])
    sum_squares = s[row] + square_sum(g, dim) / float32(dim)
    s[row] = sum_squares
    root = np.sqrt(sum_squares + inside) + outside
    if root > float32(_DIVISIBLE):
        factor = lr / root
        for j in range(dim):
            w[j] -= factor * g[j]
    else:  # where next to nothing was ever summed, lr / root may be too large for a float32
        for j in range(dim):
            w[j] -= lr * g[j] / root


@njit(forceinline=True)
def rmsprop(w, g, s, at, numbers, dim):  # type: ignore[no-untyped-def]
    """s = decay s + (1 - decay) g^2; w -= lr g / root(s)."""
    lr, inside, outside = float32(numbers[_LR]), float32(numbers[_OWN]), float32(numbers[_OWN + 1])
    keep, take = float32(numbers[_OWN + 2]), float32(numbers[_OWN + 3])
    for j in range(dim):
        mean_square = keep * s[at + j] + take * g[j] * g[j]
        s[at + j] = mean_square
        w[j] -= lr * g[j] / (np.sqrt(mean_square + inside) + outside)


@njit(forceinline=True)
def make_up(w, s, t, at, clock, row, numbers, dim):  # type: ignore[no-untyped-def]
    """Adam, for the k steps a row rested: w -= a m beta1 (1 - beta1^k) / (1 - beta1) / root(v), and m, v decay."""
    inside, outside = float32(numbers[_OWN]), float32(numbers[_OWN + 1])
    step = numbers[_OWN + 7]
    rested = step - 1.0 - float64(clock[row])
    clock[row] = float32(step)
    if rested > 0.0:
        beta1, beta2 = numbers[_OWN + 2], numbers[_OWN + 4]
        keep_m, keep_v = float32(beta1**rested), float32(beta2**rested)
        missed = float32(numbers[_OWN + 6] * beta1 * (1.0 - beta1**rested) / (1.0 - beta1))
        for j in range(dim):
            w[j] -= missed * s[at + j] / (np.sqrt(t[at + j] + inside) + outside)
        for j in range(dim):
            s[at + j] *= keep_m
        for j in range(dim):
            t[at + j] *= keep_v


@njit(forceinline=True)
def adam(w, g, s, t, at, numbers, dim):  # type: ignore[no-untyped-def]
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w -= a m / root(v)."""
    inside, outside = float32(numbers[_OWN]), float32(numbers[_OWN + 1])
    keep_m, take_m = float32(numbers[_OWN + 2]), float32(numbers[_OWN + 3])
    keep_v, take_v = float32(numbers[_OWN + 4]), float32(numbers[_OWN + 5])
    alpha = float32(numbers[_OWN + 6])
    for j in range(dim):
        t[at + j] = keep_v * t[at + j] + take_v * g[j] * g[j]
    for j in range(dim):
        g[j] = keep_m * s[at + j] + take_m * g[j]
        s[at + j] = g[j]
    for j in range(dim):
        w[j] -= alpha * g[j] / (np.sqrt(t[at + j] + inside) + outside)


@njit(forceinline=True)
def ftrl(w, g, s, t, at, numbers, dim):  # type: ignore[no-untyped-def]
    """n' = n + g^2; z += g + (sqrt(n + e) - sqrt(n' + e)) w / lr; w from z and n'."""
    per_lr, lambda1, extra = float32(1.0 / numbers[_LR]), float32(numbers[_OWN]), float32(numbers[_OWN + 1])
    # The row comes anew from z and n; until then w holds (sqrt(n' + e) - sqrt(n + e)) w, with the difference of the
    # roots made without taking nearly equal numbers from one another. Longer loops would not run in wide pieces.
    for j in range(dim):
        square, before = g[j] * g[j], s[at + j]
        root = np.sqrt(before + square + float32(_FTRL_EPSILON))
        w[j] *= square / (np.sqrt(before + float32(_FTRL_EPSILON)) + root)
    for j in range(dim):
        s[at + j] += g[j] * g[j]
    for j in range(dim):
        g[j] = t[at + j] + (g[j] - w[j] * per_lr)
        t[at + j] = g[j]
    for j in range(dim):
        z, root = g[j], np.sqrt(s[at + j] + float32(_FTRL_EPSILON))
        # z without its lambda1 nearest to zero, and zero between them; NaN stays NaN.
        above, below = z - lambda1, z + lambda1
        rest = select(above < 0, float32(0.0), above) + select(below > 0, float32(0.0), below)
        w[j] = (float32(0.0) - rest) / (root * per_lr + extra)


@njit(forceinline=True)
def apply(rule, w, g, s, t, clock, row, numbers, dim):  # type: ignore[no-untyped-def]
    """Move a row by the rule that a kernel is built for: a constant, so that one branch is left of all."""
    at = row * dim
    if rule == PLAIN_SGD:
        sgd(w, g, numbers, dim)
    elif rule in (MOMENTUM, NESTEROV):
        momentum(w, g, s, at, numbers, dim, rule == NESTEROV)
    elif rule == ADAGRAD:
        adagrad(w, g, s, at, numbers, dim)
    elif rule == ROW_WISE:
        row_wise_adagrad(w, g, s, row, numbers, dim)
    elif rule == RMSPROP:
        rmsprop(w, g, s, at, numbers, dim)
    elif rule == FTRL:
        ftrl(w, g, s, t, at, numbers, dim)
    else:
        if rule == LAZY_ADAM:
            make_up(w, s, t, at, clock, row, numbers, dim)
        adam(w, g, s, t, at, numbers, dim)

"""The rules' arithmetic in Triton, on rows (T, D) of float32: see `viviane.config.optimizers`.

A rule's numbers come as a tuple, worked out on the host or, by `gpu_numbers`, on the device:

    SGD, MOMENTUM, NESTEROV    lr, momentum
    ADAGRAD, ROW_WISE          lr, epsilon
    RMSPROP                    lr, epsilon, decay, 1 - decay
    ADAM                       alpha, epsilon, beta1, 1 - beta1, beta2, 1 - beta2
    LAZY_ADAM                  the same, log2 beta1, log2 beta2, alpha beta1 / (1 - beta1), step
    FTRL                       lr, lambda1, lambda2 + beta / lr

Products are not fused with sums, by a setting of the launch, so that SGD gives the bits that a CPU gives. Quotients
and square roots are the GPU's quick ones, within 2 units in the last place: those rounded to nearest would take
longer than the memory traffic.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from viviane.config.optimizers import SGD, AdaGrad, Adam, AnyOptimizer, RMSProp

SUM: Final = 0  # no rule: sums are stored as they are
PLAIN: Final = 1
MOMENTUM: Final = 2
NESTEROV: Final = 3
ADAGRAD: Final = 4
ROW_WISE: Final = 5
RMSPROP: Final = 6
ADAM: Final = 7
LAZY_ADAM: Final = 8
FTRL: Final = 9

_plain = tl.constexpr(PLAIN)
_momentum = tl.constexpr(MOMENTUM)
_nesterov = tl.constexpr(NESTEROV)
_adagrad = tl.constexpr(ADAGRAD)
_row_wise = tl.constexpr(ROW_WISE)
_rmsprop = tl.constexpr(RMSPROP)
_lazy_adam = tl.constexpr(LAZY_ADAM)
_ftrl = tl.constexpr(FTRL)


MOST_NUMBERS: Final = 10


class Rule(NamedTuple):
    """A rule as kernels take it: its kind, where epsilon stands, and its numbers, a tuple or on the device."""

    kind: int
    inside: bool
    numbers: tuple[float, ...] | Tensor


def power(base: float, exponent: int) -> float:
    """Return base^exponent by squaring: the same products on the device give the same bits.

    Example:
        >>> power(0.5, 3)
        0.125
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def rule_of(rule: AnyOptimizer, lr: float, step: int) -> Rule:
    """Return a rule's kind and numbers at a step.

    Example:
        >>> rule_of(SGD(momentum=0.5), 0.1, 1)
        Rule(kind=2, inside=False, numbers=(0.1, 0.5))
    """
    if isinstance(rule, SGD):
        kind = NESTEROV if rule.nesterov else MOMENTUM if rule.momentum else PLAIN
        return Rule(kind, False, (lr, rule.momentum))
    if isinstance(rule, AdaGrad):
        return Rule(ROW_WISE if rule.row_wise else ADAGRAD, rule.epsilon_inside_root, (lr, rule.epsilon))
    if isinstance(rule, RMSProp):
        return Rule(RMSPROP, rule.epsilon_inside_root, (lr, rule.epsilon, rule.decay, 1 - rule.decay))
    if isinstance(rule, Adam):
        alpha = lr * math.sqrt(1 - power(rule.beta2, step)) / (1 - power(rule.beta1, step))
        numbers = (alpha, rule.epsilon, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2)
        if rule.update != "lazy_global":
            return Rule(ADAM, rule.epsilon_inside_root, numbers)
        missed = alpha * rule.beta1 / (1 - rule.beta1)
        lazy = (_log2(rule.beta1), _log2(rule.beta2), missed, float(step))
        return Rule(LAZY_ADAM, rule.epsilon_inside_root, (*numbers, *lazy))
    return Rule(FTRL, False, (lr, rule.lambda1, rule.lambda2 + rule.beta / lr))


def _log2(beta: float) -> float:
    # A beta of 0 forgets at once: 2^(-200 k) is 0 in float32 for k > 0, and 1 for k = 0.
    return math.log2(beta) if beta > 0 else -200.0


@triton.jit
def _root(s, epsilon, inside: tl.constexpr):
    return tl.sqrt(s + epsilon) if inside else tl.sqrt(s) + epsilon


@triton.jit
def _sgd(kind: tl.constexpr, w, g, before, numbers):
    after = before
    if kind == _plain:
        w -= numbers[0] * g
    else:
        after = numbers[1] * before - numbers[0] * g
        if kind == _nesterov:
            w += (1.0 + numbers[1]) * after - numbers[1] * before
        else:
            w += after
    return w, after


@triton.jit
def _adam(w, g, m, v, numbers, inside: tl.constexpr):
    m = numbers[2] * m + numbers[3] * g
    v = numbers[4] * v + numbers[5] * g * g
    w -= numbers[0] * m / _root(v, numbers[1], inside)
    return w, m, v


@triton.jit
def _caught_up(w, m, v, rested, numbers, inside: tl.constexpr):
    """Return row, m and v after `rested` (T,) steps without gradient."""
    kept = tl.exp2(rested * numbers[6])[:, None]
    w -= numbers[8] * (1.0 - kept) * m / _root(v, numbers[1], inside)
    return w, m * kept, v * tl.exp2(rested * numbers[7])[:, None]


@triton.jit
def _ftrl_move(w, g, n, z, numbers):
    tiny: tl.constexpr = 1.1920928955078125e-07  # 2^-23
    after = n + g * g
    end = tl.sqrt(after + tiny)
    z += g + (tl.sqrt(n + tiny) - end) * w / numbers[0]
    toward = tl.where(z > 0, numbers[1], -numbers[1])
    moved = (toward - z) / (end / numbers[0] + numbers[2])
    return tl.where(tl.abs(z) <= numbers[1], 0.0, moved), after, z


@triton.jit
def move(kind: tl.constexpr, inside: tl.constexpr, dim: tl.constexpr, w, g, first, second, own, numbers):
    """Return new rows and state: w, g, first, second are (T, D), zero beyond column D; own is (T,).

    `own` is what a row has once: the accumulator of ROW_WISE, the clock of LAZY_ADAM.
    """
    if kind <= _nesterov:
        w, first = _sgd(kind, w, g, first, numbers)
    elif kind == _adagrad:
        first += g * g
        w -= numbers[0] * g / _root(first, numbers[1], inside)
    elif kind == _row_wise:
        own += tl.sum(g * g, 1) / dim
        w -= (numbers[0] / _root(own, numbers[1], inside))[:, None] * g  # one quotient a row
    elif kind == _rmsprop:
        first = numbers[2] * first + numbers[3] * g * g
        w -= numbers[0] * g / _root(first, numbers[1], inside)
    elif kind == _ftrl:
        w, first, second = _ftrl_move(w, g, first, second, numbers)
    else:
        if kind == _lazy_adam:
            w, first, second = _caught_up(w, first, second, numbers[9] - 1.0 - own, numbers, inside)
            own = tl.zeros_like(own) + numbers[9]
        w, first, second = _adam(w, g, first, second, numbers, inside)
    return w, first, second, own

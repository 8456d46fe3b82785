"""A rule's numbers worked out on the device, from a learning rate, step and seed that lie there.

A CUDA graph repeats its launches with the arguments they had; numbers that change from step to step must therefore
come from memory. The arithmetic is that of `gpu_rules.rule_of`, operation by operation in float64, each rounded once,
so that both give the same bits.
"""

# Kernels are Python by syntax alone, as in gpu_rules.py.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.config.optimizers import Adam, AnyOptimizer, Ftrl
from viviane.ops.row_update.gpu_rules import ADAM, FTRL, LAZY_ADAM, MOST_NUMBERS, Rule, rule_of
from viviane.ops.triton_parts.launch import on_device

_LOW = 0xFFFFFFFF
_adam = tl.constexpr(ADAM)
_lazy_adam = tl.constexpr(LAZY_ADAM)
_ftrl = tl.constexpr(FTRL)
_most = tl.constexpr(MOST_NUMBERS)


def rule_on_device(
    rule: AnyOptimizer, lr: float | Tensor, step: int | Tensor, seed: int | Tensor, device: torch.device
) -> Rule:
    """Return a rule whose numbers lie on the device, (MOST_NUMBERS + 1,); the last has the bits of the dither.

    Args:
        rule: its settings.
        lr, step, seed: numbers, or 0-dim tensors on the device.
        device: of the table.
    """
    kind, inside, fixed = rule_of(rule, 1.0, 1)
    held = [
        part if isinstance(part, Tensor) else torch.full((), part, dtype=dtype, device=device)
        for part, dtype in ((lr, torch.float64), (step, torch.int64))
    ]
    start = seed if isinstance(seed, Tensor) else signed(seed)
    numbers = torch.empty(MOST_NUMBERS + 1, dtype=torch.float32, device=device)
    padded = (*fixed, *[0.0] * (MOST_NUMBERS - len(fixed)))
    with on_device(numbers):
        numbers_kernel[(1,)](
            *held, start, numbers, kind=kind, fixed=padded, **_exact(rule), num_warps=1, enable_fp_fusion=False
        )
    return Rule(kind, inside, numbers)


def signed(number: int) -> int:
    """Return the signed whole number of the same lowest 32 bits, the type of all small numbers in a kernel.

    Example:
        >>> signed(2**32 - 1)
        -1
    """
    low = number & _LOW
    return low - (1 << 32) if low >= 1 << 31 else low


def _exact(rule: AnyOptimizer) -> dict[str, Any]:
    """Return the settings that take part in arithmetic with the rate or the step."""
    if isinstance(rule, Ftrl):
        return {"first": rule.lambda2, "second": rule.beta}
    if isinstance(rule, Adam):
        return {"first": rule.beta1, "second": rule.beta2}
    return {"first": 0.0, "second": 0.0}


@triton.jit
def _power(beta, exponent):
    """beta^exponent by squaring, as `gpu_rules.power` does it."""
    result = tl.full([], 1.0, tl.float64)
    for _ in range(32):
        result = tl.where((exponent & 1) != 0, result * beta, result)
        beta *= beta
        exponent = exponent >> 1
    return result


@triton.jit(do_not_specialize=["seed"])
def numbers_kernel(
    lr, step, seed, numbers, kind: tl.constexpr, fixed: tl.constexpr, first: tl.constexpr, second: tl.constexpr
):
    """Write the numbers that depend on neither rate nor step, then those that do, then the dither."""
    rate = tl.load(lr).to(tl.float64)
    age = tl.load(step).to(tl.int64)
    for i in tl.static_range(_most):
        tl.store(numbers + i, tl.full([], fixed[i], tl.float32))
    one, two = tl.full([], first, tl.float64), tl.full([], second, tl.float64)
    if kind == _ftrl:
        tl.store(numbers, rate.to(tl.float32))
        tl.store(numbers + 2, (one + two / rate).to(tl.float32))
    elif kind == _adam or kind == _lazy_adam:  # noqa: SIM109 - Triton knows no `in`
        alpha = rate * tl.sqrt(1.0 - _power(two, age)) / (1.0 - _power(one, age))
        tl.store(numbers, alpha.to(tl.float32))
        if kind == _lazy_adam:
            tl.store(numbers + 8, (alpha * one / (1.0 - one)).to(tl.float32))
            tl.store(numbers + 9, age.to(tl.float32))
    else:
        tl.store(numbers, rate.to(tl.float32))
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    dither = (seed.to(tl.int64) + age * 0x9E3779B1).to(tl.uint32)
    tl.store((numbers + _most).to(tl.pointer_type(tl.uint32), bitcast=True), dither)


@triton.jit
def held_numbers(numbers):
    """Return what `numbers_kernel` wrote: the tuple of a rule's numbers, and the dither."""
    dither = tl.load((numbers + _most).to(tl.pointer_type(tl.int32), bitcast=True))
    own = (
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 2),
        tl.load(numbers + 3),
        tl.load(numbers + 4),
        tl.load(numbers + 5),
        tl.load(numbers + 6),
        tl.load(numbers + 7),
        tl.load(numbers + 8),
        tl.load(numbers + 9),
    )
    return own, dither

"""A rule's numbers of a step, computed on the host, or on the device from learning rate, step and seed there.

A CUDA graph repeats its launches with the arguments they had; numbers that change from step to step must therefore
come from memory. The arithmetic is that of the rules' `gpu_numbers`, operation by operation in float64, each rounded
once, so that both give the same bits.
"""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.ops.rules import rule_of
from viviane.ops.rules.rule import MAX_ROW_NUMBERS
from viviane.ops.triton_parts.launch import on_device

_LOW = 0xFFFFFFFF
_most = tl.constexpr(MAX_ROW_NUMBERS)


class StepRule(NamedTuple):
    """A rule as kernels take it in one step.

    Args:
        move: the rule's Triton function; None: sums are stored as they are.
        inside: whether epsilon is inside the root.
        numbers: a tuple, or a tensor on the device.
        sums_rows: whether the rule reduces over the numbers of a row.
    """

    move: Any
    inside: bool
    numbers: tuple[float, ...] | Tensor
    sums_rows: bool


SUMS = StepRule(None, False, (), False)
"""No rule: the sums of gradients themselves."""


def step_rule(rule: AnyOptimizer, lr: float, step: int) -> StepRule:
    """Return a rule with its numbers at a step.

    Example:
        >>> from viviane.config import SGD
        >>> step_rule(SGD(momentum=0.5), 0.1, 1).numbers
        (0.1, 0.5)
    """
    own = rule_of(rule)
    return StepRule(type(own).gpu, own.epsilon_inside, own.gpu_numbers(lr, step), own.sums_rows)


def step_rule_on_device(
    rule: AnyOptimizer, lr: float | Tensor, step: int | Tensor, seed: int | Tensor, device: torch.device
) -> StepRule:
    """Return a rule whose numbers lie on the device, (MAX_ROW_NUMBERS + 1,); the last has the bits of the dither.

    Args:
        rule: its settings.
        lr, step, seed: numbers, or 0-dim tensors on the device.
        device: of the table.
    """
    own, fixed = rule_of(rule), step_rule(rule, 1.0, 1)
    held = [
        part if isinstance(part, Tensor) else torch.full((), part, dtype=dtype, device=device)
        for part, dtype in ((lr, torch.float64), (step, torch.int64))
    ]
    start = seed if isinstance(seed, Tensor) else signed(seed)
    numbers = torch.empty(MAX_ROW_NUMBERS + 1, dtype=torch.float32, device=device)
    padded = (*fixed.numbers, *[0.0] * (MAX_ROW_NUMBERS - len(fixed.numbers)))
    with on_device(numbers):
        numbers_kernel[(1,)](
            *held, start, numbers, store=type(own).gpu_step_numbers, fixed=padded, exact=own.exact, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return fixed._replace(numbers=numbers)


def signed(number: int) -> int:
    """Return the signed whole number of the same lowest 32 bits, the type of all small numbers in a kernel.

    Example:
        >>> signed(2**32 - 1)
        -1
    """
    low = number & _LOW
    return low - (1 << 32) if low >= 1 << 31 else low


@triton.jit(do_not_specialize=["seed"])
def numbers_kernel(lr, step, seed, numbers, store: tl.constexpr, fixed: tl.constexpr, exact: tl.constexpr):
    """Write the numbers that depend on neither rate nor step, then those that do, then the dither."""
    rate = tl.load(lr).to(tl.float64)
    age = tl.load(step).to(tl.int64)
    for i in tl.static_range(_most):
        tl.store(numbers + i, tl.full([], fixed[i], tl.float32))
    first, second = tl.full([], exact[0], tl.float64), tl.full([], exact[1], tl.float64)
    store(numbers, rate, age, first, second, tl.full([], exact[2], tl.float64))
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

"""What GPU rules share: roots, powers, and the numbers of a step that are computed on the device.

A CUDA graph repeats its launches with the arguments they had; numbers that change from step to step come from memory.
The arithmetic on the device is that of the host, operation by operation in float64, each rounded once: same bits.
"""

from __future__ import annotations

from viviane.ops.triton_parts.language import jit, tl


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


@jit
def device_power(base, exponent):
    """base^exponent by squaring, as `power` does it."""
    result = tl.full([], 1.0, tl.float64)
    for _ in range(32):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base *= base
        exponent = exponent >> 1
    return result


@jit
def gpu_root(s, epsilon, inside: tl.constexpr):
    """sqrt(s + epsilon), or sqrt(s) + epsilon; the GPU's quick root."""
    return tl.sqrt(s + epsilon) if inside else tl.sqrt(s) + epsilon


@jit
def exact_root(squares, epsilon, inside: tl.constexpr):
    """The same with a root rounded to nearest, for dense parameters."""
    if inside:
        squares += epsilon
    root = tl.sqrt_rn(squares)
    return root if inside else root + epsilon


@jit
def store_lr(numbers, lr, step, first, second, third):
    """The learning rate is the first number, and nothing else depends on it or on the step."""
    tl.store(numbers, lr.to(tl.float32))

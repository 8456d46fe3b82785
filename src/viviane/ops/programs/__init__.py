"""A forward pass on the CPU as one call: a list of kernels that runs without Python between them.

A step is a kernel of `viviane.ops.native` and its operands, `call`, whose addresses are settled in advance. Kernels
are those that layers call outside of programs, too, when no gradients are asked for, and so give the same bits.
"""

from __future__ import annotations

from functools import cache

import torch

from viviane.ops.dispatch import choose
from viviane.ops.linear import machine_reason

__all__ = ["reason"]


@cache
def reason() -> str | None:
    """Return the reason why programs do not run here, or None.

    Example:
        >>> reason() is None or isinstance(reason(), str)
        True
    """
    if choose(torch.device("cpu")) != "cpu":
        return "kernels for CPUs are switched off"
    return machine_reason()

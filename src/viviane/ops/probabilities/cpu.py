"""Probabilities of logits on the CPU."""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numba import float32, float64
from torch import Tensor

from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, sources
from viviane.ops.native.memory import float32_at
from viviane.ops.native.numbers import float_of


def probabilities(logits: Tensor, shift: float) -> Tensor:
    """Return 1 / (1 + e^(shift - z)), float32."""
    z = logits.float().contiguous()
    out = torch.empty(z.shape)
    operands = [z.numel(), z.data_ptr(), 4, out.data_ptr(), 4, 1, bits_of(shift)]
    probabilities_kernel(sources())(operands, tickets=1, threads=1)
    return out


def bits_of(number: float) -> int:
    """Return the bits of a float32, as an operand."""
    return int(np.float32(number).view(np.uint32))


@cache
def probabilities_kernel(key: str) -> Kernel:
    """Build p = 1 / (1 + e^(s - z)), rounded once.

    Operands: size, z, bytes between its rows, p, likewise, width of a row, bits of s.
    """

    @kernel
    def probabilities_of_logits(call):
        _ = key
        shift = float64(float_of(np.uint32(call[OPERANDS + 6])))
        for b in range(call[OPERANDS]):
            z = float32_at(call[OPERANDS + 1] + b * call[OPERANDS + 2])
            p = float32_at(call[OPERANDS + 3] + b * call[OPERANDS + 4])
            for j in range(call[OPERANDS + 5]):
                p[j] = float32(1.0 / (1.0 + math.exp(shift - float64(z[j]))))

    return probabilities_of_logits

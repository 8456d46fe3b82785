"""Fully connected layers of predictions in 8 bits on the CPU; a ticket is a block of rows.

Each row of inputs gets a range of its own when it is computed, each output's weights theirs when they are packed:

    x_i ~ low + step q_i,  q_i in 0 .. 255        low = min(0, min x), step = (max(0, max x) - low) / 255
    w_ij ~ scale_i v_ij,   v_ij in -127 .. 127    scale_i = max |w_i| / 127
    y_i = scale_i (low sum_j v_ij + step sum_j q_j v_ij) + b_i

The sum of products is of whole numbers and exact, so a row's bits depend on nothing but the row.
"""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numba import float32
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.linear.cpu_int8_tiles import GROUP_BYTES, HEAD, factor_type, multiply_rounded, round_row
from viviane.ops.linear.cpu_tiles import PANEL, cross_rows
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel
from viviane.ops.native.memory import take_ticket

_LEAST: Final = 16
"""Inputs and outputs of the smallest layer that is worth it."""
_LARGEST: Final = 60_000
"""Inputs whose sum of products has 32 bits."""


class Rounded(NamedTuple):
    """Packed weights, and (3, outputs in whole panels) float32: scales, sums of the whole numbers, zeros for biases."""

    weights: Tensor
    numbers: Tensor


def reason_against_int8() -> str | None:
    """Return the reason why this machine has no layers in 8 bits, or None.

    Example:
        >>> reason_against_int8() is None or isinstance(reason_against_int8(), str)
        True
    """
    return None if factor_type() is not None else "the processor, or this LLVM, has no AVX-512 VNNI instructions"


def is_worth_it(weight: Tensor) -> bool:
    """Whether weights (n, k) are turned into 8 bits: small layers stay as they are."""
    n, k = weight.shape
    return n >= _LEAST and _LEAST <= k <= _LARGEST


def pack_int8(weight: Tensor) -> Rounded:
    """Return weights (n, k) in 8 bits, in the order in which the kernel reads them.

    Raises:
        VivianeError: a weight is not finite.
    """
    weight = weight.detach().float()
    if not bool(weight.isfinite().all()):
        raise VivianeError("weights that are not finite have no 8-bit form", value=tuple(weight.shape))
    n, k = weight.shape
    panels, groups = -(-n // PANEL), -(-k // 4)
    scales = weight.abs().amax(1) / 127
    whole = (weight / scales.where(scales > 0, 1.0).unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    padded = whole.new_zeros(panels * PANEL, groups * 4)
    padded[:n, :k] = whole
    numbers = torch.zeros(3, panels * PANEL)
    numbers[0, :n], numbers[1, :n] = scales, whole.to(torch.int32).sum(1).float()
    return Rounded(padded.view(panels, PANEL, groups, 4).transpose(1, 2).contiguous(), numbers)


def rounded_row_bytes(k: int) -> int:
    """Return the bytes of a row of k inputs in 8 bits, a multiple of 16."""
    return HEAD + -(-k // PANEL) * PANEL


def int8_operands(
    size: int, x: int, x_row: int, packed: Rounded, out: int, out_row: int, shape: tuple[int, int], relu: bool,
    block: int, crossed: list[int], room: int,
) -> list[int]:  # fmt: skip
    """Return the operands of `int8_kernel`.

    Args:
        size: rows.
        x, out: addresses; `x_row` and `out_row`: numbers between rows.
        packed: with the biases; the caller keeps it.
        shape: (n, k).
        block: rows of a ticket.
        crossed: addresses of x_0 and x_l, (size, n) each; 0 for no cross layer.
        room: address of `rounded_row_bytes` for each row.
    """
    places = packed.weights.data_ptr(), packed.numbers.data_ptr(), out
    return [size, x, 4 * x_row, *places, 4 * out_row, *shape, block, int(relu), *crossed, room]


@cache
def int8_kernel(key: str) -> Kernel:
    """Build out = act(x W^T + b), or x_l + x_0 * (x W^T + b), in 8 bits; for its operands see `int8_operands`."""

    @kernel
    def linear_rows_int8(call):
        _ = key
        size, x_row, out_row = call[OPERANDS], call[OPERANDS + 2], call[OPERANDS + 6]
        n, k, rows, blocks = call[OPERANDS + 7], call[OPERANDS + 8], call[OPERANDS + 9], call[1]
        lowest = float32(0.0) if call[OPERANDS + 10] != 0 else float32(-np.inf)
        first_layer, last_layer, room = call[OPERANDS + 11], call[OPERANDS + 12], call[OPERANDS + 13]
        row_bytes, groups = HEAD + (k + PANEL - 1) // PANEL * PANEL, (k + 3) // 4
        apart = (n + PANEL - 1) // PANEL * GROUP_BYTES
        block = take_ticket(call)
        while block < blocks:
            first = block * rows
            count = min(rows, size - first)
            x, out = call[OPERANDS + 1] + first * x_row, call[OPERANDS + 5] + first * out_row
            rounded = room + first * row_bytes
            for b in range(count):
                round_row(x + b * x_row, k, rounded + b * row_bytes)
            multiply_rounded(
                count, rounded, row_bytes, call[OPERANDS + 3], groups * GROUP_BYTES, groups, call[OPERANDS + 4], apart,
                out, out_row, n, lowest,
            )  # fmt: skip
            if first_layer != 0:
                at = 4 * first * n
                cross_rows(count, out, out_row, first_layer + at, last_layer + at, n)
            block = take_ticket(call)

    return linear_rows_int8


def linear_int8(x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool = False) -> Tensor:
    """Return act(x W^T + b), (B, n), in 8 bits.

    Args:
        x: (B, k), float32.
        weight: (n, k).
        bias: (n).
    """
    from viviane.ops.linear.cpu import ROWS
    from viviane.ops.native.kernels import num_threads, sources

    n, k = weight.shape
    x, size, packed = x.contiguous(), len(x), with_biases(pack_int8(weight), bias)
    out, room = torch.empty(size, n), torch.empty(size * rounded_row_bytes(k), dtype=torch.uint8)
    threads = num_threads(size * n * k // 1024)
    block = max(1, min(ROWS, -(-size // threads)))
    operands = int8_operands(
        size, x.data_ptr(), k, packed, out.data_ptr(), n, (n, k), relu, block, [0, 0], room.data_ptr()
    )  # fmt: skip
    int8_kernel(sources())(operands, tickets=-(-size // block), threads=threads)
    return out


def with_biases(packed: Rounded, bias: Tensor) -> Rounded:
    """Return packed weights with a layer's biases."""
    numbers = packed.numbers.clone()
    numbers[2, : len(bias)] = bias.detach()
    return packed._replace(numbers=numbers)

"""Fully connected layers of predictions on the CPU: products by packed weights; a ticket is a block of rows."""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch
from numba import float32
from torch import Tensor

from viviane.ops.linear.cpu_tiles import PANEL, PANEL_BYTES, cross_rows, multiply, multiply_narrow
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, num_threads, sources
from viviane.ops.native.memory import take_ticket

ROWS: Final = 96
"""Rows of a block: with `_DEPTH` inputs they stay in the second cache."""
_DEPTH: Final = 256
"""Inputs that are summed in registers: a panel of their weights stays in the first cache."""
_FEW: Final = 4
"""Up to so many outputs are sums of products over each row: panels would hold zeros for the most part."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, cross: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return act(x W^T + b), or x_l + x_0 * (x W^T + b)."""
    n, k = weight.shape
    rows = x.reshape(-1, k).contiguous()
    size = len(rows)
    packed = pack(weight)
    bias = torch.zeros(n) if bias is None else bias.contiguous()
    out = torch.empty(size, n)
    kept = [one.contiguous() for one in cross or ()]
    crossed = [one.data_ptr() for one in kept] or [0, 0]
    threads = num_threads(size * n * k // _DEPTH)
    block = min(ROWS, -(-size // threads))
    operands = linear_operands(size, rows.data_ptr(), k, packed, bias, out.data_ptr(), n, relu, block, crossed)
    linear_kernel(sources())(operands, tickets=-(-size // block), threads=threads)
    return out.view(*x.shape[:-1], n)


def pack(weight: Tensor) -> Tensor:
    """Return weights (n, k) as the kernel reads them: panels of 16 outputs, (ceil(n / 16), k, 16); a few as they are.

    The last panel is filled with zeros.
    """
    n, k = weight.shape
    weight = weight.detach()
    if n <= _FEW:
        return weight.contiguous()
    whole, rest = n // PANEL, n % PANEL
    packed = weight.new_empty(whole + (rest > 0), k, PANEL)
    packed[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, k).transpose(1, 2)
    if rest:
        packed[whole, :, :rest] = weight[whole * PANEL :].t()
        packed[whole, :, rest:] = 0
    return packed


def linear_operands(
    size: int, x: int, x_row: int, packed: Tensor, bias: Tensor, out: int, out_row: int, relu: bool, block: int,
    crossed: list[int],
) -> list[int]:  # fmt: skip
    """Return the operands of `linear_kernel`.

    Args:
        size: rows.
        x, out: addresses; `x_row` and `out_row`: numbers between rows.
        packed, bias: by `pack`, and (n); the caller keeps them.
        block: rows of a ticket.
        crossed: addresses of x_0 and x_l, (size, n) each; 0 for no cross layer.
    """
    n = len(bias)
    k = packed.shape[1]
    places = packed.data_ptr(), bias.data_ptr(), out
    return [size, x, 4 * x_row, *places, 4 * out_row, n, k, block, int(relu), *crossed]


@cache
def linear_kernel(key: str) -> Kernel:
    """Build out = act(x W^T + b), or x_l + x_0 * (x W^T + b); for its operands see `linear_operands`."""

    @kernel
    def linear_rows(call):
        _ = key
        size, x_row, bias, out_row = call[OPERANDS], call[OPERANDS + 2], call[OPERANDS + 4], call[OPERANDS + 6]
        n, k, rows, blocks = call[OPERANDS + 7], call[OPERANDS + 8], call[OPERANDS + 9], call[1]
        lowest = float32(0.0) if call[OPERANDS + 10] != 0 else float32(-np.inf)
        first_layer, last_layer = call[OPERANDS + 11], call[OPERANDS + 12]
        block = take_ticket(call)
        while block < blocks:
            first = block * rows
            count = min(rows, size - first)
            x, out = call[OPERANDS + 1] + first * x_row, call[OPERANDS + 5] + first * out_row
            if n <= _FEW:
                multiply_narrow(count, x, x_row, call[OPERANDS + 3], k, bias, out, out_row, n, lowest)
            else:
                for begin in range(0, k, _DEPTH):
                    depth = min(_DEPTH, k - begin)
                    start, start_row = (bias, 0) if begin == 0 else (out, out_row)
                    least = lowest if begin + depth == k else float32(-np.inf)
                    multiply(
                        count, x + 4 * begin, x_row, call[OPERANDS + 3] + begin * PANEL_BYTES, k * PANEL_BYTES, depth,
                        start, start_row, out, out_row, n, least,
                    )  # fmt: skip
            if first_layer != 0:
                at = 4 * first * n
                cross_rows(count, out, out_row, first_layer + at, last_layer + at, n)
            block = take_ticket(call)

    return linear_rows

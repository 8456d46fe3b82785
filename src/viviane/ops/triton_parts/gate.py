"""A gradient times a factor, or where an activation is positive, with the sums of its columns: one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

_ROWS = 128  # of one program: also those of one row of partial sums
_MOST_COLUMNS = 64
_STEP = 32


def gated_gradient(grad: Tensor, gate: Tensor | None, *, relu: bool, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Return grad * gate, or grad where gate > 0 if `relu`, and partial sums of its columns.

    Args:
        grad: (M, N); contiguous, or columns of a wider matrix.
        gate: (M, N), contiguous, or None for ones: the gradient itself is returned, contiguous.
        relu: see above.
        in_place: write over `grad`, which is contiguous.

    Returns:
        The result (M, N) in the gradient's dtype, and (P, N) float32, whose column sums are the result's.
    """
    size, width = grad.shape
    partial = torch.empty(max(1, ceil_div(size, _ROWS)), width, dtype=torch.float32, device=grad.device)
    if not grad.numel():
        return grad, partial.zero_()
    if gate is None or grad.stride(1) != 1:
        grad = grad.contiguous()
    out = grad if in_place or gate is None else torch.empty_like(grad, memory_format=torch.contiguous_format)
    columns = min(_MOST_COLUMNS, power_of_two(width))
    with on_device(grad):
        gate_kernel[(len(partial), ceil_div(width, columns))](
            grad, gate, out, partial, size, width, grad.stride(0), relu=relu, rows=_ROWS, step=_STEP, columns=columns,
            num_warps=4,
        )  # fmt: skip
    return out, partial


@triton.jit(do_not_specialize=["size"])
def gate_kernel(
    grad,
    gate,
    out,
    partial,
    size,
    width,
    apart,
    relu: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    columns: tl.constexpr,
):
    """Gate one block of rows and columns."""
    cols = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros([step, columns], dtype=tl.float32)
    for start in tl.static_range(0, rows, step):
        r = tl.program_id(0) * rows + start + tl.arange(0, step)
        here = (r < size)[:, None] & (cols < width)[None, :]
        place = (r.to(tl.int64) * width)[:, None] + cols[None, :]
        own = (r.to(tl.int64) * apart)[:, None] + cols[None, :]
        g = tl.load(grad + own, mask=here, other=0.0).to(tl.float32)
        if gate is not None:
            factor = tl.load(gate + place, mask=here, other=0.0).to(tl.float32)
            g = tl.where(factor > 0, g, 0.0) if relu else g * factor
            tl.store(out + place, g.to(out.dtype.element_ty), mask=here)
        total += g
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + cols, tl.sum(total, 0), mask=cols < width)

"""Sums of columns, in a fixed order: each kernel leaves one row of partial sums a program, these are added up here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.ops.triton_parts.launch import ceil_div, on_device

_ROWS, _COLUMNS = 256, 8


def column_sums(partial: Tensor, widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return the column sums of a float32 matrix (P, W), cut into up to three tensors of their own.

    Args:
        partial: (P, W), float32, contiguous.
        widths: of the results; together W.
        dtypes: of the results.
    """
    out = [torch.empty(n, dtype=kind, device=partial.device) for n, kind in zip(widths, dtypes, strict=True)]
    first, second, third = [*out, None, None][:3]
    with on_device(partial):
        column_sums_kernel[(ceil_div(partial.shape[1], _COLUMNS),)](
            partial, first, second, third, len(partial), partial.shape[1], widths[0], sum(widths[:2]),
            rows=_ROWS, columns=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["size"])
def column_sums_kernel(
    partial, first, second, third, size, width, end_one, end_two, rows: tl.constexpr, columns: tl.constexpr
):
    """Add up `columns` columns."""
    cols = tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for start in range(0, size, rows):
        r = start + tl.arange(0, rows)
        here = (r < size)[:, None] & (cols < width)[None, :]
        total += tl.load(partial + (r.to(tl.int64) * width)[:, None] + cols[None, :], mask=here, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(first + cols, sums.to(first.dtype.element_ty), mask=cols < end_one)
    if second is not None:
        here = (cols >= end_one) & (cols < end_two)
        tl.store(second + (cols - end_one), sums.to(second.dtype.element_ty), mask=here)
    if third is not None:
        here = (cols >= end_two) & (cols < width)
        tl.store(third + (cols - end_two), sums.to(third.dtype.element_ty), mask=here)

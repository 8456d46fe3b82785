"""Sums of columns, in a fixed order: each kernel leaves one row of partial sums a program, these are added up here."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.ops.triton_parts.launch import ceil_div, on_device

_ROWS, _COLUMNS = 256, 8


class _Wanted(NamedTuple):
    partial: Tensor
    out: Tensor
    pitch: int
    first: int
    width: int


class ColumnSums:
    """Column sums of several matrices: one launch adds up all that have equally many rows.

    Example:
        >>> sums = ColumnSums()
        >>> out = sums.of(torch.ones(4, 2), torch.float32)  # doctest: +SKIP
        >>> sums.compute()  # doctest: +SKIP
        >>> out.tolist()  # doctest: +SKIP
        [4.0, 4.0]
    """

    def __init__(self) -> None:
        self._wanted: dict[int, list[_Wanted]] = {}

    def of(self, partial: Tensor, dtype: torch.dtype, first: int = 0, count: int | None = None) -> Tensor:
        """Return a tensor that holds the sums of some columns once `compute` was called.

        Args:
            partial: (P, W), float32, contiguous.
            dtype: of the result.
            first, count: of the columns; by default all.
        """
        pitch = partial.shape[1]
        count = pitch - first if count is None else count
        out = torch.empty(count, dtype=dtype, device=partial.device)
        self._wanted.setdefault(partial.shape[0], []).append(_Wanted(partial, out, pitch, first, count))
        return out

    def compute(self) -> None:
        """Add the columns up."""
        for size, wanted in self._wanted.items():
            partials, outs, pitches, firsts, counts = zip(*wanted, strict=True)
            with on_device(outs[0]):
                column_sums_kernel[(ceil_div(max(counts), _COLUMNS), len(outs))](
                    partials, outs, pitches, firsts, counts, size, rows=_ROWS, columns=_COLUMNS, num_warps=4
                )
        self._wanted.clear()


@triton.jit(do_not_specialize=["size"])
def column_sums_kernel(partials, outs, pitches, firsts, counts, size, rows: tl.constexpr, columns: tl.constexpr):
    """Add up `columns` columns of one matrix; the second grid axis selects it."""
    for i in tl.static_range(len(outs)):
        if tl.program_id(1) == i:
            cols = tl.program_id(0) * columns + tl.arange(0, columns)
            total = tl.zeros([rows, columns], dtype=tl.float32)
            for start in range(0, size, rows):
                r = start + tl.arange(0, rows)
                here = (r < size)[:, None] & (cols < counts[i])[None, :]
                place = (r.to(tl.int64) * pitches[i])[:, None] + (firsts[i] + cols)[None, :]
                total += tl.load(partials[i] + place, mask=here, other=0.0)
            tl.store(outs[i] + cols, tl.sum(total, 0).to(outs[i].dtype.element_ty), mask=cols < counts[i])

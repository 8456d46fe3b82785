"""Rows of stacks on a GPU."""

from __future__ import annotations

from torch import Tensor

from viviane.ops.row_stacks import StackForm, rounded
from viviane.ops.row_stacks.gpu_kernels import take_rows_kernel
from viviane.ops.triton_parts.launch import ceil_div, on_device

_ROWS = 64  # of a program
_BLOCK = 1024  # words that it takes at a time


def take_rows(
    form: StackForm, target: Tensor, target_rows: int, first: int, source: Tensor, source_rows: int, order: Tensor
) -> None:
    """See `viviane.ops.row_stacks.take_rows`."""
    count = len(order)
    with on_device(target):
        take_rows_kernel[(ceil_div(count, _ROWS), len(form.widths))](
            target, source, order, form.table(target.device), count, first, rounded(target_rows), rounded(source_rows),
            rows=_ROWS, block=_BLOCK, num_warps=4,
        )  # fmt: skip

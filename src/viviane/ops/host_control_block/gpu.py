"""The host control block on a GPU: one small launch reads it, one writes the status back."""

from __future__ import annotations

from torch import Tensor

from viviane.ops.host_control_block.gpu_kernels import read_row_kernel, write_back_kernel
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

_BLOCK = 256


def read_row(rows: Tensor, count: Tensor, words: Tensor) -> None:
    """Read the row that is meant for the next step."""
    with on_device(words):
        read_row_kernel[(ceil_div(len(words), _BLOCK),)](
            rows.data_ptr(), count, words, len(rows), len(words), block=_BLOCK, num_warps=4
        )


def write_back(words: Tensor, loss: Tensor, held: Tensor, rows: Tensor, count: Tensor, signal: Tensor | None) -> None:
    """Write what a step found."""
    with on_device(words):
        write_back_kernel[(1,)](
            words, loss, held, rows.data_ptr(), count, signal, len(rows), len(held), block=power_of_two(len(held)),
            num_warps=1,
        )  # fmt: skip

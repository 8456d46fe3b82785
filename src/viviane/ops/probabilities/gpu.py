"""Probabilities of logits on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from viviane.ops.probabilities.gpu_kernels import probabilities_kernel
from viviane.ops.triton_parts.launch import ceil_div, on_device

_BLOCK = 128  # one number a thread: neighbours go to the host's memory in one write of a warp


def write_probabilities(
    logits: Tensor, out: Tensor, shift: float, records: Sequence[Tensor], flag: Tensor | None
) -> None:
    """Write 1 / (1 + e^(shift - z)), and whether a record is set."""
    size = logits.numel()
    with on_device(logits):
        probabilities_kernel[(ceil_div(size, _BLOCK),)](
            logits.contiguous(), out, flag, tuple(records) or None, size, shift, block=_BLOCK, num_warps=4
        )

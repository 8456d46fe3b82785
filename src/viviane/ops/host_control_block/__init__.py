"""Words that host and device exchange during replays of a CUDA graph, in page-locked host memory.

A copy to or from the device costs the host a call, and the device a wait between two replays. Here a graph reads the
row that the host has written for it, in page-locked memory, and writes its answer to another; the device counts its
steps, which selects the rows.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from viviane.ops.dispatch import kernels_serve, load

__all__ = ["read_row", "write_back"]


def read_row(rows: Tensor, count: Tensor, words: Tensor) -> None:
    """Read the row that is meant for the next step.

    Args:
        rows: (K, N), int64, contiguous, in page-locked memory of the host.
        count: how many steps there were, (1,), int64: row count % K is read.
        words: (N,), int64, on the device; is written to.

    Example:
        >>> import torch
        >>> rows, words = torch.arange(6).view(3, 2), torch.zeros(2, dtype=torch.int64)
        >>> read_row(rows, torch.tensor([4]), words); words.tolist()
        [2, 3]
    """
    if kernels_serve(words.device):
        load("host_control_block", "gpu").read_row(rows, count, words)
    else:
        words.copy_(rows[int(count) % len(rows)])


def write_back(
    words: Tensor, loss: Tensor, held: Tensor, rows: Tensor, count: Tensor, signal: Tensor | None = None
) -> None:
    """Write the loss to the address given by the host, and the step status to the host control block.

    Args:
        words: of `read_row`; the first is the address of a tensor of the loss's type.
        loss: 0-dim, on the device.
        held: (M,), int64, on the device.
        rows: (K, M + 1), int64, contiguous, in page-locked memory of the host.
        count: how many steps there were with this one, (1,), int64: row (count - 1) % K is written.
        signal: (1,), a whole number in float32, on the device; the last word of the row. None leaves that.

    Example:
        >>> import torch
        >>> loss, rows = torch.zeros(()), torch.zeros(2, 3, dtype=torch.int64)
        >>> words = torch.tensor([loss.data_ptr()])
        >>> write_back(words, torch.tensor(0.5), torch.tensor([7, 8]), rows, torch.tensor([2]), torch.tensor([9.0]))
        >>> loss.item(), rows.tolist()
        (0.5, [[0, 0, 0], [7, 8, 9]])
    """
    if kernels_serve(words.device):
        load("host_control_block", "gpu").write_back(words, loss, held, rows, count, signal)
        return
    ctypes.memmove(int(words[0]), loss.data_ptr(), loss.nbytes)
    row = rows[(int(count) - 1) % len(rows)]
    row[:-1].copy_(held)
    if signal is not None:
        row[-1:].copy_(signal)

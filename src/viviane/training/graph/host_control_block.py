"""The host control block: page-locked memory through which the host passes values to a replay, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from viviane.ops.host_control_block import read_row


class HostControlBlock:
    """One row per replay in flight: the address of its loss, the values of its step, the addresses of its batch.

    The device counts the steps. `read`, which is captured, reads the row of the next step.

    Args:
        device: device of the steps.
        num_numbers: number of values per step, float64.
        num_words: number of words per batch, int64; see `viviane.training.graph.static_batch.StaticBatch`.
        num_slots: number of rows. A row is reused after this many steps; its step must be finished by then.
        count: number of finished steps, (1,), int64, on the device.

    Example:
        >>> box = HostControlBlock(torch.device("cpu"), 2, 1, num_slots=2, count=torch.tensor([5]))
        >>> box.write(5, 4096, [0.5, 2.0], [7])
        >>> box.read(); box.words[0].item(), box.numbers.tolist(), box.batch.tolist()
        (4096, [0.5, 2.0], [7])
    """

    def __init__(self, device: torch.device, num_numbers: int, num_words: int, num_slots: int, count: Tensor) -> None:
        width = 1 + num_numbers + num_words
        self._count = count
        self._rows = torch.zeros(num_slots, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._ints = self._rows.numpy()  # writing through numpy takes a tenth of the time
        self._floats = self._ints.view(np.float64)
        self._numbers = slice(1, 1 + num_numbers)
        self.words = torch.zeros(width, dtype=torch.int64, device=device)
        """The row that `read` has read; the first word is the address of the loss."""
        self.numbers = self.words[self._numbers].view(torch.float64)
        self.batch = self.words[1 + num_numbers :]

    def write(self, step: int, loss: int, numbers: Sequence[float], batch: Sequence[int]) -> None:
        """Write the row of a step.

        Args:
            step: number of the step in the device's count.
            loss: address to which the device writes the loss.
            numbers, batch: values of the step and words of its batch.
        """
        slot = step % len(self._ints)
        row = self._ints[slot]
        row[0] = loss
        self._floats[slot, self._numbers] = numbers
        row[self._numbers.stop :] = batch

    def read(self) -> None:
        """Read the row of the next step on the device."""
        read_row(self._rows, self._count, self.words)

"""What the host tells a replay, in page-locked memory that the graph reads: nothing is copied between two replays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from viviane.ops.host_control_block import read_row


class HostControlBlock:
    """A row for each replay under way: where its loss goes, the numbers of its step, where its batch is.

    The device counts its steps and reads the row of the next one (`read`, which a graph repeats).

    Args:
        device: of the steps.
        num_numbers: numbers of a step, float64.
        num_words: whole numbers of a batch; see `viviane.training.static_batch.StaticBatch`.
        num_slots: how many rows there are: a row is written again after so many steps, when its own must be over.
        count: how many steps there were, (1,), int64, on the device.

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
        self._ints = self._rows.numpy()  # a number is set in a tenth of the time that a tensor takes
        self._floats = self._ints.view(np.float64)
        self._numbers = slice(1, 1 + num_numbers)
        self.words = torch.zeros(width, dtype=torch.int64, device=device)
        """What `read` has read; the first is the address of the loss."""
        self.numbers = self.words[self._numbers].view(torch.float64)
        self.batch = self.words[1 + num_numbers :]

    def write(self, step: int, loss: int, numbers: Sequence[float], batch: Sequence[int]) -> None:
        """Write the row of a step.

        Args:
            step: its number, as the device counts.
            loss: address of the memory that the loss is written to.
            numbers, batch: see the class.
        """
        slot = step % len(self._ints)
        row = self._ints[slot]
        row[0] = loss
        self._floats[slot, self._numbers] = numbers
        row[self._numbers.stop :] = batch

    def read(self) -> None:
        """Let the device read the row of its next step."""
        read_row(self._rows, self._count, self.words)

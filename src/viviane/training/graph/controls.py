"""The values of a step that the host decides, on the device: learning rates and hyper-parameters of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.rules import NUM_DENSE_NUMBERS
from viviane.optim import DenseOptimizer
from viviane.optim.dense import all_numbers

_RATES = 2


def step_values(lr: float, factor: float, optimizer: DenseOptimizer | None, means: Sequence[float] = ()) -> list[float]:
    """Return the values of a step in the order of `Controls`.

    Args:
        lr: the learning rate.
        factor: the schedule's factor.
        optimizer: its parameter groups have already counted this step.
        means: values of a running mean of weights.
    """
    values = [lr, factor]
    if optimizer is not None:
        for place in range(len(optimizer.param_groups)):
            values += all_numbers(optimizer, place)
    return [*values, *means]


class Controls:
    """A float64 vector on the device: learning rate, its factor, values of each parameter group, and of the mean.

    The host writes them to the `HostControlBlock` while the previous step's update still reads its own values; `take`
    copies them to where the step reads them. If steps may be skipped before the host knows it, the host writes one row
    for each possible number of skipped steps, and the device selects the right one.

    Args:
        device: device of the parameters.
        num_groups: number of parameter groups of the dense optimizer.
        num_means: number of values of a running mean of weights.
        num_rows: number of rows that the host writes; 1: there is nothing to select.

    Attributes:
        width: length of the packed vector.
    """

    def __init__(self, device: torch.device, num_groups: int, num_means: int = 0, num_rows: int = 1) -> None:
        size = _RATES + num_groups * NUM_DENSE_NUMBERS + num_means
        self._means = size - num_means
        self.num_rows = num_rows
        self._vector = torch.zeros(size, dtype=torch.float64, device=device)
        self.width = size if num_rows == 1 else num_rows * size + 1

    @property
    def lr(self) -> Tensor:
        """The learning rate, 0-dim."""
        return self._vector[0]

    @property
    def factor(self) -> Tensor:
        """The schedule's factor, 0-dim."""
        return self._vector[1]

    def group(self, place: int) -> Tensor:
        """Return the values of a parameter group, (NUM_DENSE_NUMBERS,)."""
        start = _RATES + place * NUM_DENSE_NUMBERS
        return self._vector[start : start + NUM_DENSE_NUMBERS]

    @property
    def means(self) -> Tensor:
        """The values of a running mean, (num_means,)."""
        return self._vector[self._means :]

    def pack(self, rows: Sequence[Sequence[float]], num_skipped: int = 0) -> list[float]:
        """Return the vector that the host writes for the next step, (width,).

        Args:
            rows: see `step_values`; row i applies if i steps in flight are skipped.
            num_skipped: number of skipped steps that the host has read.
        """
        if self.num_rows == 1:
            return list(rows[0])
        return [number for i in range(self.num_rows) for number in rows[min(i, len(rows) - 1)]] + [float(num_skipped)]

    def take(self, values: Tensor, num_skipped: Tensor | None = None) -> None:
        """Load a packed vector on the device; captured before anything that reads the values.

        Args:
            values: (width,), float64, on the device.
            num_skipped: number of skipped steps, 0-dim, float64; None if there is only one row.
        """
        if num_skipped is None:
            self._vector.copy_(values)
            return
        row = (num_skipped - values[-1]).to(torch.int64).view(1)
        self._vector.copy_(values[:-1].view(self.num_rows, -1).index_select(0, row)[0])

"""The running mean of a storage's rows, kept up to date only where a step moves them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NUMBERS = 3
"""How many `RowMean.numbers` are."""
_CHUNK_ROWS = 1 << 18


class RowMean:
    """Exponential mean a_t = d_t a_{t-1} + (1 - d_t) w_t of rows w, exact and lazy.

    While a row rests its weight w does not change, so over steps s + 1 to t its mean moves to

        a_t = w + (d_{s+1} ... d_t) (a_s - w)

    A row therefore needs no visit until a step moves it, and a step costs the rows of its batch alone. Each row
    keeps the logarithm of the product of all decays at its last visit.

    Args:
        weight: (R, D), the rows at the start.

    Example:
        >>> weight = torch.zeros(2, 1)
        >>> mean = RowMean(weight)
        >>> before = weight[:1].clone()
        >>> weight[0] = 1.0
        >>> mean.advance(0.5)
        >>> mean.visit(torch.tensor([0]), before, weight[:1])
        >>> mean.advance(0.5)
        >>> mean.catch_up(weight).mean.flatten().tolist()
        [0.75, 0.0]
    """

    def __init__(self, weight: Tensor) -> None:
        self.mean = weight.clone()
        self._log_decay = 0.0
        self._step_log = 0.0
        self._visited = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
        self.held: Tensor | None = None
        """`numbers` of a step on the device, (3,), float64, which recorded steps read."""

    @property
    def place(self) -> float:
        """The position of its steps; see `roll_back_to`."""
        return self._log_decay

    def roll_back_to(self, place: float) -> None:
        """Take steps back that moved no row and no mean."""
        self._log_decay = place

    @property
    def numbers(self) -> list[float]:
        """What the present step computes with: log of all decays so far, of its own, and its own."""
        return [self._log_decay, self._step_log, math.exp(self._step_log)]

    def advance(self, decay: float) -> None:
        """Begin a step whose decay is 0 < decay < 1."""
        self._step_log = math.log(decay)
        self._log_decay += self._step_log

    def visit(self, rows: Tensor, before: Tensor, after: Tensor, gate: Tensor | None = None) -> None:
        """Follow rows that this step moved.

        Args:
            rows: (N,), int64; rows may repeat.
            before, after: (N, D), its numbers.
            gate: of a recorded step, whose numbers are those of `held`; where it is 0 nothing is followed.
        """
        rest, old = self._visited.index_select(0, rows), self.mean.index_select(0, rows)
        if gate is None:
            all_logs, own_log, decay = self.numbers
            new = _followed(before, after, old, all_logs - own_log - rest, decay)
            self._visited.index_fill_(0, rows, all_logs)
        else:
            assert self.held is not None
            logs, own, kept = self.held.unbind()
            found = _followed(before, after, old, logs - own - rest, kept.to(torch.float32))
            new = torch.where(gate != 0, found, old)
            self._visited.index_copy_(0, rows, torch.where(gate != 0, logs, rest))
        self.mean.index_copy_(0, rows, new)

    def catch_up_rows(self, rows: Tensor, weight: Tensor) -> None:
        """Bring rows up to the present step, before they change outside of a step.

        Args:
            rows: (N,), int64; no row repeats.
            weight: (N, D), their numbers before the change.
        """
        rested = (self._log_decay - self._visited.index_select(0, rows)).exp().to(torch.float32).unsqueeze(1)
        self.mean.index_copy_(0, rows, weight + rested * (self.mean.index_select(0, rows) - weight))
        self._visited.index_fill_(0, rows, self._log_decay)

    def catch_up(self, weight: Tensor) -> RowMean:
        """Bring all rows up to the present step; at once where they are."""
        if self._log_decay == 0.0:
            return self
        for start in range(0, len(weight), _CHUNK_ROWS):
            chunk = slice(start, start + _CHUNK_ROWS)
            factor = (self._log_decay - self._visited[chunk]).exp().to(torch.float32).unsqueeze(1)
            self.mean[chunk].copy_(weight[chunk] + factor * (self.mean[chunk] - weight[chunk]))
        self._log_decay = 0.0  # from here on counted from 0, so that the sum never grows large
        self._visited.zero_()
        return self


def _followed(before: Tensor, after: Tensor, mean: Tensor, rested: Tensor, decay: float | Tensor) -> Tensor:
    """Return the means (N, D) after a step, of rows whose logs of decays while they rested add up to `rested`, (N,)."""
    caught_up = before + rested.exp().to(torch.float32).unsqueeze(1) * (mean - before)
    return torch.lerp(after, caught_up, decay)

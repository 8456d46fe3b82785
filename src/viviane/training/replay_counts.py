"""How many steps moved weights, where the host hears of a replay some steps later: counts of optimizer and mean."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from viviane.training.controls import step_values

if TYPE_CHECKING:
    from viviane.training.step import TrainStep


class ReplayCounts:
    """Counts replays as they start, and takes those back that moved nothing as soon as the host hears of them.

    Adam's correction of the first steps and the warm-up of a running mean count steps that moved weights. A replay
    whose gradients overflow is none, and those under way after it were counted one too far. So their numbers are
    written for every count that may turn out to be right, and the device takes the one that is (`Controls.take`).

    Args:
        step: whose optimizer and mean are counted.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._places: deque[tuple[float, ...]] = deque()  # of the mean, before each replay under way

    def start(self, rate: float, factor: float, num_rows: int) -> list[list[float]]:
        """Count a replay; return its numbers, and those where 1, 2, ... of the replays under way turn out to be none.

        Args:
            rate, factor: see `step_values`.
            num_rows: the most to return.
        """
        mean = self.step.mean
        self._count(1)
        self._places.append(() if mean is None else mean.place)
        rows = []
        for less in reversed(range(min(num_rows, len(self._places)))):
            numbers: list[float] = []
            if mean is not None:
                mean.go_back(self._places[-1 - less])
                mean.advance()
                numbers = mean.numbers
            self._count(-less)
            rows.append(step_values(rate, factor, self.step.optimizer, numbers))
            self._count(less)
        return rows[::-1]

    def end(self, *, skipped: bool) -> None:
        """Note that the host has heard of the oldest replay under way.

        Args:
            skipped: whether it moved nothing; then those after it come one step earlier.
        """
        if not skipped:
            self._places.popleft()
            return
        self._count(-1)
        self._go_back(self._places.pop())

    def roll_back(self) -> int:
        """Take back all replays under way; returns how many."""
        taken = len(self._places)
        if taken:
            self._count(-taken)
            self._go_back(self._places[0])
        self._places.clear()
        return taken

    def clear(self) -> None:
        """Leave replays under way as they are counted, without a look at them."""
        self._places.clear()

    def _go_back(self, place: tuple[float, ...]) -> None:
        if self.step.mean is not None:
            self.step.mean.go_back(place)

    def _count(self, steps: int) -> None:
        """Count steps of dense parameters as the optimizer does: where some of a group are trained."""
        if not steps:
            return
        for group in [] if self.step.optimizer is None else self.step.optimizer.param_groups:
            if any(param.requires_grad for param in group["params"]):
                group["step"] += steps

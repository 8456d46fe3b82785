"""Counts of the steps that updated weights, while the host reads the status of a replay some steps later."""

from __future__ import annotations

from collections import deque

from viviane.training.graph.controls import step_values
from viviane.training.step.program import TrainStep


class ReplayCounts:
    """Counts replays when they start, and rolls back skipped ones when the host reads their status.

    Adam's bias correction and the warm-up of a running mean depend on the number of steps that updated weights. A
    skipped replay is not such a step, but the replays in flight after it were counted as if it were. So the host
    writes their values for every possible count, and the device selects the right ones (`Controls.take`).

    Args:
        step: the training step, with its optimizer and running mean.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._places: deque[tuple[float, ...]] = deque()  # of the mean, before each replay in flight

    def start(self, rate: float, factor: float, num_rows: int) -> list[list[float]]:
        """Count a replay; return its values if 0, 1, 2, ... of the replays in flight are skipped.

        Args:
            rate, factor: see `step_values`.
            num_rows: maximum number of rows to return.
        """
        mean = self.step.mean
        self._count(1)
        self._places.append(() if mean is None else mean.place)
        rows = []
        for less in reversed(range(min(num_rows, len(self._places)))):
            numbers: list[float] = []
            if mean is not None:
                mean.roll_back_to(self._places[-1 - less])
                mean.advance()
                numbers = mean.numbers
            self._count(-less)
            rows.append(step_values(rate, factor, self.step.optimizer, numbers))
            self._count(less)
        return rows[::-1]

    def end(self, *, skipped: bool) -> None:
        """Finish the oldest replay in flight: the host has read its status.

        Args:
            skipped: whether the replay updated nothing; the counts of later replays are then reduced by one.
        """
        if not skipped:
            self._places.popleft()
            return
        self._count(-1)
        self._roll_back_to(self._places.pop())

    def roll_back(self) -> int:
        """Roll back all replays in flight and return their number."""
        taken = len(self._places)
        if taken:
            self._count(-taken)
            self._roll_back_to(self._places[0])
        self._places.clear()
        return taken

    def clear(self) -> None:
        """Forget the replays in flight; their counts stay."""
        self._places.clear()

    def _roll_back_to(self, place: tuple[float, ...]) -> None:
        if self.step.mean is not None:
            self.step.mean.roll_back_to(place)

    def _count(self, steps: int) -> None:
        """Count steps of dense parameters as the optimizer does: only for groups with trained parameters."""
        if not steps:
            return
        for group in [] if self.step.optimizer is None else self.step.optimizer.param_groups:
            if any(param.requires_grad for param in group["params"]):
                group["step"] += steps

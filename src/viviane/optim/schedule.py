"""The learning rate of each step: warm-up, constant, polynomial decay."""

from __future__ import annotations

from viviane.config import Solver
from viviane.core.errors import ConfigError


class LearningRateSchedule:
    """Learning rates by step, the first step being 1; a pure function of the solver, so nothing is to be saved.

        n < warmup_steps                    lr n / warmup_steps
        decay_start == 0 or n < decay_start lr
        n < decay_start + decay_steps       max(end_lr, lr ((decay_start + decay_steps - n) / decay_steps)^decay_power)
        afterwards                          end_lr

    Example:
        >>> schedule = LearningRateSchedule(Solver(lr=1.0, warmup_steps=4, decay_start=6, decay_steps=2))
        >>> [schedule.lr(n) for n in range(1, 10)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.25, 0.0, 0.0]

    Source: HugeCTR's LearningRateScheduler.
    """

    def __init__(self, solver: Solver) -> None:
        self.solver = solver

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 1."""
        if step < 1:
            raise ConfigError("steps count from 1", value=step)
        solver = self.solver
        if step < solver.warmup_steps:
            return solver.lr * step / solver.warmup_steps
        if solver.decay_start == 0 or step < solver.decay_start:
            return solver.lr
        left = solver.decay_start + solver.decay_steps - step
        if left > 0:
            return float(max(solver.end_lr, solver.lr * (left / solver.decay_steps) ** solver.decay_power))
        return solver.end_lr

    def factor(self, step: int) -> float:
        """Return lr(step) / solver.lr: what an optimizer's own learning rate is multiplied by."""
        return self.lr(step) / self.solver.lr

"""Hooks into `fit`, and the two callbacks that stop it: at a target value, or when patience runs out."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from viviane.config import Solver
from viviane.core.errors import ConfigError, suggest
from viviane.schema import Schema
from viviane.training.history import History, higher_is_better, is_better
from viviane.training.trainer_base import TrainerBase


class Callback:
    """Base of callbacks: override what you need.

    Example:
        >>> class Steps(Callback):
        ...     num_steps = 0
        ...     def on_step_end(self, step, loss):
        ...         self.num_steps += 1
        >>> Steps().on_step_end(1, None)
    """

    reason = "callback"
    """The value of `History.stopped` when this callback stops the run."""
    measures: tuple[str, ...] = ()
    """Names of the metrics that `measure` adds to each evaluation, "catalogue/...". Higher values are better.
    `patience` and `restore_best` follow the first one."""

    def measure(self, trainer: TrainerBase) -> dict[str, float]:
        """Return the values of `measures` for the current weights; called at each evaluation of `fit`."""
        return {}

    def on_fit_start(self, trainer: TrainerBase) -> None:
        """Called once before the first step of a fit, after a checkpoint to resume from was loaded."""

    def on_step_end(self, step: int, loss: Tensor) -> None:
        """Called after each update. `loss` is detached and on the device: reading it synchronizes with the GPU."""

    def on_evaluate_end(self, step: int, metrics: dict[str, float]) -> bool | None:
        """Called after each evaluation of `fit`; returning True stops training."""

    def on_fit_end(self, history: History) -> None:
        """Called once when `fit` ends, also after an interruption, but not after an error."""

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint must store, as plain JSON data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned when a run is resumed."""

    def should_stop(self) -> bool:
        """Return whether this callback had already stopped the run that is being resumed."""
        return False


class EvaluationLines(Callback):
    """Prints one line per evaluation: `fit(verbose=2)`."""

    def on_evaluate_end(self, step: int, metrics: dict[str, float]) -> None:
        """Print the step and its metrics."""
        values = "  ".join(f"{name} {value:.5f}" for name, value in metrics.items())
        sys.stdout.write(f"step {step}  {values}\n")
        sys.stdout.flush()


class StopAtTarget(Callback):
    """Stops training when every named metric reaches its target.

    Example:
        >>> stop = StopAtTarget({"auc": 0.8})
        >>> stop.on_evaluate_end(10, {"auc": 0.79}), stop.on_evaluate_end(20, {"auc": 0.81})
        (False, True)
    """

    reason = "target"

    def __init__(self, target: Mapping[str, float]) -> None:
        self.target = dict(target)
        self.reached: dict[str, float] = {}

    def on_evaluate_end(self, step: int, metrics: dict[str, float]) -> bool:
        """Compare with the targets; an undefined (NaN) metric never reaches its target."""
        for name in self.target:
            if name not in metrics:
                raise ConfigError(
                    "solver.target names a metric that is not computed", value=name, fix=suggest(name, metrics)
                )
        self.reached = {name: metrics[name] for name in self.target}
        return self.should_stop()

    def should_stop(self) -> bool:
        """Return whether the latest evaluation reached every target."""
        return bool(self.reached) and all(
            self.reached.get(name, float("nan")) >= value
            if higher_is_better(name)
            else self.reached.get(name, float("nan")) <= value
            for name, value in self.target.items()
        )

    def state(self) -> dict[str, Any]:
        """Return the latest values."""
        return {"reached": {name: None if math.isnan(value) else value for name, value in self.reached.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the latest values; the targets come from the solver and may have changed."""
        self.reached = {k: float("nan") if v is None else v for k, v in state.get("reached", {}).items()}


class StopWithoutGain(Callback):
    """Stops training after `patience` consecutive evaluations without a better value.

    Example:
        >>> stop = StopWithoutGain("auc", patience=2)
        >>> [stop.on_evaluate_end(n, {"auc": value}) for n, value in enumerate([0.5, 0.6, 0.6, 0.59])]
        [False, False, False, True]
    """

    reason = "patience"

    def __init__(self, metric: str, patience: int) -> None:
        self.metric = metric
        self.patience = patience
        self.best: float | None = None
        self.num_bad = 0

    def on_evaluate_end(self, step: int, metrics: dict[str, float]) -> bool:
        """Count evaluations since the best one."""
        if is_better(self.metric, metrics[self.metric], self.best):
            self.best, self.num_bad = metrics[self.metric], 0
        else:
            self.num_bad += 1
        return self.should_stop()

    def should_stop(self) -> bool:
        """Return whether `patience` evaluations passed without improvement."""
        return self.num_bad >= self.patience

    def state(self) -> dict[str, Any]:
        """Return the best value and the number of evaluations since then."""
        return {"best": self.best, "num_bad": self.num_bad}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue counting; `patience` itself comes from the solver and may have changed."""
        self.best, self.num_bad = state.get("best"), state.get("num_bad", 0)


def measures_of(callbacks: Sequence[Callback]) -> list[str]:
    """Return the names of all metrics that the callbacks measure."""
    return [name for callback in callbacks for name in callback.measures]


def measured_by(callbacks: Sequence[Callback], trainer: TrainerBase) -> dict[str, float]:
    """Return the metrics that the callbacks measure, checked against `Callback.measures`.

    Raises:
        ConfigError: a callback returned other metrics than it declared.
    """
    found: dict[str, float] = {}
    for callback in callbacks:
        if callback.measures:
            values = callback.measure(trainer)
            if set(values) != set(callback.measures):
                allowed = ", ".join(callback.measures)
                raise ConfigError("a callback did not return its `measures`", value=", ".join(values), allowed=allowed)
            found |= values
    return found


def solver_callbacks(solver: Solver, metrics: Sequence[str], lead: str, schema: Schema) -> list[Callback]:
    """Return the callbacks that the solver's `target` and `patience` request.

    Args:
        solver: how to train.
        metrics: names of the metrics that are computed.
        lead: the metric that `patience` follows.
        schema: its labels may have metrics of their own.

    Raises:
        ConfigError: a target names a metric that is not computed, or a metric without a better direction.
    """
    known = {"loss", *metrics}
    if len(schema.labels) > 1:
        known |= {f"{name}/{label.name}" for name in metrics for label in schema.labels}
    for name in solver.target:
        if name not in known:
            raise ConfigError("solver.target names a metric that is not computed", value=name, fix=suggest(name, known))
        higher_is_better(name)  # raises where neither direction is better
    found: list[Callback] = [StopAtTarget(solver.target)] if solver.target else []
    if solver.patience is not None:
        found.append(StopWithoutGain(lead, solver.patience))
    return found

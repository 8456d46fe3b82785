"""The loops of HugeCTR's fit, and the lines they print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.enums import MetricsType
from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from viviane.compat.hugectr.model import Model


@dataclass(frozen=True)
class FitSettings:
    """The arguments of fit; display, eval_interval and snapshot count iterations, 0 means never."""

    num_epochs: int
    max_iter: int
    display: int
    eval_interval: int
    snapshot: int
    snapshot_prefix: str


class _Course:
    """Counts the iterations of one fit, and does what falls due after each."""

    def __init__(self, model: Model, given: FitSettings) -> None:
        self.model, self.given = model, given
        self.done = 0
        self.started = self.shown = perf_counter()
        self.hit = False
        solver = model.solver
        say(f"Training batchsize: {solver.batchsize}, evaluation batchsize: {solver.batchsize_eval}")
        say(f"Evaluation interval: {given.eval_interval}, snapshot interval: {given.snapshot}")
        say("Training source file: " + ", ".join(model.reader_params.sources))
        say(f"Evaluation source file: {model.reader_params.eval_source}")

    def step(self) -> bool:
        """Train on one batch; False at the end of the data."""
        self.model.set_learning_rate(self.model.get_learning_rate_scheduler().get_next())
        if not self.model.train():
            return False
        self.done += 1
        given, done = self.given, self.done
        if given.display and done % given.display == 0:
            now = perf_counter()
            loss = self.model.get_current_loss()
            say(f"Iter: {done} Time({given.display} iters): {now - self.shown:.6f}s Loss: {loss:.6f} "
                f"lr:{self.model.lr:.6g}")  # fmt: skip
            self.shown = now
        if given.eval_interval and done % given.eval_interval == 0:
            self._evaluate()
        if given.snapshot and done % given.snapshot == 0:
            self.model.save_params_to_files(given.snapshot_prefix, done)
        return True

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return perf_counter() - self.started

    def _evaluate(self) -> None:
        model, start, count = self.model, perf_counter(), 0
        if not model.solver.repeat_dataset:
            model.get_data_reader_eval().set_source(model.reader_params.eval_source)
        while count < model.solver.max_eval_batches and model.eval():
            count += 1
        for name, value in model.get_eval_metrics():
            say(f"Evaluation, {name}: {value:.6f}")
            limit = model.solver.metrics_spec.get(MetricsType.AUC, math.inf)
            self.hit = self.hit or (name == "AUC" and value >= limit)
        say(f"Eval Time for {count} iters: {perf_counter() - start:.6f}s")
        if self.hit:
            rate = self.done * model.solver.batchsize / max(self.seconds(), 1e-9)
            limit = model.solver.metrics_spec[MetricsType.AUC]
            say(f"Hit target accuracy AUC {limit:.6f} at {self.done} / {self.given.max_iter} iterations with "
                f"batchsize {model.solver.batchsize} in {self.seconds():.2f}s. "
                f"Average speed {rate:.2f} records/s.")  # fmt: skip
        self.shown += perf_counter() - start


def fit_iterations(model: Model, given: FitSettings) -> None:
    """Train max_iter iterations over data that repeats."""
    if given.max_iter < 1:
        raise ConfigError("max_iter is at least 1 where the data repeats", where="fit", value=given.max_iter)
    say(f"Use non-epoch mode with number of iterations: {given.max_iter}")
    course = _Course(model, given)
    while course.done < given.max_iter and not course.hit:
        course.step()
    size = model.solver.batchsize
    say(f"Finish {course.done} iterations with batchsize: {size} in {course.seconds():.2f}s.")


def fit_epochs(model: Model, given: FitSettings, sources: Sequence[str]) -> None:
    """Train num_epochs times over the sources, each read to its end."""
    epochs = max(1, given.num_epochs)
    say(f"Use epoch mode with number of epochs: {epochs}")
    course = _Course(model, given)
    for epoch in range(epochs):
        say(f"-----------------------------------Epoch {epoch}-----------------------------------")
        for source in sources:
            model.get_data_reader_train().set_source(source)
            while not course.hit and course.step():
                pass
    size = model.solver.batchsize
    say(f"Finish {epochs} epochs {course.done} global iterations with batchsize: {size} in {course.seconds():.2f}s.")

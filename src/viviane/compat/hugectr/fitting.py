"""The loops of HugeCTR's fit, and their console output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Protocol

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.enums import MetricsType
from viviane.compat.hugectr.inputs import DataReaderParams
from viviane.compat.hugectr.names import script_name
from viviane.compat.hugectr.passes import EmbeddingTrainingCache
from viviane.compat.hugectr.reading import DataReader, EarlyReader
from viviane.compat.hugectr.solver import LearningRateScheduler, Solver
from viviane.core.errors import ConfigError
from viviane.embedding.module_parts import collections_of
from viviane.model import Model as VivianeModel

FIT_DEFAULTS: Final = {
    "num_epochs": 0, "max_iter": 2000, "display": 200, "eval_interval": 1000, "snapshot": 10000, "snapshot_prefix": "",
}  # fmt: skip


class FittedModel(Protocol):
    """The interface of HugeCTR's Model that the loops of fit use."""

    solver: Solver
    lr: float

    @property
    def viviane(self) -> VivianeModel:
        """See `Model.viviane`."""

    @property
    def sources(self) -> list[str]:
        """See `Model.sources`."""

    @property
    def reader_params(self) -> DataReaderParams:
        """See `Model.reader_params`."""

    @property
    def has_passes(self) -> bool:
        """See `Model.has_passes`."""

    def train(self) -> bool:
        """See `Model.train`."""

    def eval(self) -> bool:
        """See `Model.eval`."""

    def get_current_loss(self) -> float:
        """See `Model.get_current_loss`."""

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """See `Model.get_eval_metrics`."""

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """See `Model.get_learning_rate_scheduler`."""

    def set_learning_rate(self, lr: float) -> None:
        """See `Model.set_learning_rate`."""

    def get_data_reader_train(self) -> DataReader | EarlyReader:
        """See `Model.get_data_reader_train`."""

    def get_data_reader_eval(self) -> DataReader | EarlyReader:
        """See `Model.get_data_reader_eval`."""

    def get_embedding_training_cache(self) -> EmbeddingTrainingCache:
        """See `Model.get_embedding_training_cache`."""

    def save_params_to_files(self, prefix: str, num_iterations: int = 0, /) -> None:
        """See `Model.save_params_to_files`."""


class TrainingCallback:
    """Base class of callbacks: called at the start and end of fit and of its evaluations, if the data repeats."""

    def on_training_start(self) -> None:
        """Called when training starts."""

    def on_training_end(self, current_iter: int) -> None:
        """Called when training ends."""

    def on_eval_start(self, current_iter: int) -> bool:
        """Called before an evaluation."""
        return False

    def on_eval_end(self, current_iter: int, eval_results: dict[str, float]) -> bool:
        """Called after an evaluation; return True to stop."""
        return False


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
    """Counts the iterations of one fit, and runs the work that is due after each."""

    def __init__(self, model: FittedModel, given: FitSettings) -> None:
        self.model, self.given = model, given
        self.done = 0
        self.started = self.shown = perf_counter()
        self.hit = self.stopped = False
        """Whether the AUC was reached, and whether a callback requests a stop."""
        solver = model.solver
        self.callbacks: list[Any] = list(solver.training_callbacks) if solver.repeat_dataset else []
        say(f"Training batchsize: {solver.batchsize}, evaluation batchsize: {solver.batchsize_eval}")
        say(f"Evaluation interval: {given.eval_interval}, snapshot interval: {given.snapshot}")
        for name, collection in collections_of(model.viviane.module).items():
            say(f"Sparse embedding {script_name(name)} trainable: {not getattr(collection, 'frozen', None)}")
        say("Training source file: " + ", ".join(model.sources))
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
        if given.snapshot and done % given.snapshot == 0 and not self.model.has_passes:
            self.model.save_params_to_files(given.snapshot_prefix, done)
        return True

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return perf_counter() - self.started

    def _evaluate(self) -> None:
        model, start, count = self.model, perf_counter(), 0
        for callback in self.callbacks:
            callback.on_eval_start(self.done)
        if not model.solver.repeat_dataset:
            model.get_data_reader_eval().set_source(model.reader_params.eval_source)
        while count < model.solver.max_eval_batches and model.eval():
            count += 1
        found = model.get_eval_metrics()
        for name, value in found:
            say(f"Evaluation, {name}: {value:.6f}")
            limit = model.solver.metrics_spec.get(MetricsType.AUC, math.inf)
            self.hit = self.hit or (name == "AUC" and value >= limit)
        say(f"Eval Time for {count} iters: {perf_counter() - start:.6f}s")
        for callback in self.callbacks:  # all are called, regardless of the others' results
            self.stopped = bool(callback.on_eval_end(self.done, dict(found))) or self.stopped
        if self.hit:
            rate = self.done * model.solver.batchsize / max(self.seconds(), 1e-9)
            limit = model.solver.metrics_spec[MetricsType.AUC]
            say(f"Hit target accuracy AUC {limit:.6f} at {self.done} / {self.given.max_iter} iterations with "
                f"batchsize {model.solver.batchsize} in {self.seconds():.2f}s. "
                f"Average speed {rate:.2f} records/s.")  # fmt: skip
        self.shown += perf_counter() - start


def fit_iterations(model: FittedModel, given: FitSettings) -> None:
    """Train for max_iter iterations on repeated data."""
    if given.max_iter < 1:
        raise ConfigError("max_iter must be at least 1 if the data repeats", where="fit", value=given.max_iter)
    say(f"Use non-epoch mode with number of iterations: {given.max_iter}")
    course = _Course(model, given)
    for callback in course.callbacks:
        callback.on_training_start()
    while course.done < given.max_iter and not course.hit and not course.stopped:
        course.step()
    for callback in course.callbacks:
        callback.on_training_end(course.done)
    size = model.solver.batchsize
    say(f"Finish {course.done} iterations with batchsize: {size} in {course.seconds():.2f}s.")


def fit_epochs(model: FittedModel, given: FitSettings, sources: Sequence[str], keysets: Sequence[str] = ()) -> None:
    """Train for num_epochs over the sources, each read to its end; with passes, load its keyset first."""
    if model.has_passes and len(sources) != len(keysets):
        raise ConfigError("one keyset per source needed", where="fit", value=f"{len(sources)} sources, {len(keysets)} "
                          "keysets", fix="DataReaderParams(source=[...], keyset=[...])")  # fmt: skip
    epochs = max(1, given.num_epochs)
    say(f"Use epoch mode with number of epochs: {epochs}")
    course = _Course(model, given)
    for epoch in range(epochs):
        say(f"-----------------------------------Epoch {epoch}-----------------------------------")
        for place, source in enumerate(sources):
            model.get_data_reader_train().set_source(source)
            if model.has_passes:
                model.get_embedding_training_cache().update(keysets[place])
            while not course.hit and course.step():
                pass
    size = model.solver.batchsize
    say(f"Finish {epochs} epochs {course.done} global iterations with batchsize: {size} in {course.seconds():.2f}s.")

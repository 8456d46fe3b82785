"""The trainer: fit, evaluate and predict for any module that takes a Batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from viviane.config import AnyOptimizer, Solver
from viviane.core.errors import ConfigError
from viviane.core.locations import AnyPath
from viviane.data import DataPasses, Dataset
from viviane.data.streaming import KafkaStream
from viviane.parallel import Group
from viviane.schema import Schema
from viviane.training.callbacks import Callback, measures_of, solver_callbacks
from viviane.training.environment import Interrupt
from viviane.training.history import History, has_direction
from viviane.training.loop import FitLoop
from viviane.training.step.objective import LossFunction, LossTerm
from viviane.training.trackers import trackers_of
from viviane.training.trainer_base import TrainerBase


class Trainer(TrainerBase):
    """Trains a module whose forward takes a Batch and returns logits (B,), (B, 1), or (B, L) in the schema's order.

    The embedding optimizer of every EmbeddingCollection in the module updates its rows; `optimizer` updates all
    other parameters. `fit` is a loop over `train_step`: a custom loop gives the same results.

    Args:
        module: moved to the solver's device.
        schema: the columns and labels.
        solver: training settings.
        optimizer: settings of the dense optimizer.
        metrics: names; the first one decides the best checkpoint and patience. None: "auc" and "log_loss", or
            "mean_squared_error" if no label is binary.
        callbacks: hooks into `fit`.
        run_folder: folder or URL of settings, metrics and checkpoints; None writes nothing.
        loss: a function (logits (B, L), batch) -> scalar, instead of the built-in loss.
        terms: losses over columns of the output, such as a graph's, instead of one per label.
        tensorboard: write events to the run folder; None: if tensorboard is installed.
        progress: show a progress line; None: in a terminal and in a notebook.
        tracker: "mlflow", "wandb" or "tensorboard", a `viviane.training.Tracker`, or several of these.
        log_every: steps between rows of the training loss.
        config, files: more entries for the run folder's config.json; more JSON files next to it, by name.
        group: the processes that train together; None: all processes that torchrun started, or only this one. Each
            reads its share of every batch and calls the trainer's methods together with the others; rank 0 writes.

    Raises:
        ConfigError: settings that contradict each other, an unknown metric, a device that does not exist.

    Example:
        >>> from viviane.batch import Batch
        >>> from viviane.config import SGD
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x", "dim": 2}])
        >>> class Linear(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 1)
        ...     def forward(self, batch):
        ...         return self.layer(batch.dense)
        >>> trainer = Trainer(Linear(), schema, Solver(lr=0.5, device="cpu"), SGD())
        >>> batch = Batch.from_columns(schema, {"y": [0, 1], "x": [[0.0, 1.0], [1.0, 0.0]]})
        >>> first = trainer.train_step(batch)
        >>> bool(trainer.train_step(batch) < first), trainer.step
        (True, 2)
    """

    def __init__(
        self,
        module: nn.Module,
        schema: Schema,
        solver: Solver,
        optimizer: AnyOptimizer | str,
        *,
        metrics: Sequence[str] | str | None = None,
        callbacks: Sequence[Callback] = (),
        run_folder: str | AnyPath | None = None,
        loss: LossFunction | None = None,
        terms: Sequence[LossTerm] | None = None,
        tensorboard: bool | None = None,
        progress: bool | None = None,
        tracker: Any = None,
        log_every: int = 100,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, Any] | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(
            module, schema, solver, optimizer, metrics=metrics, run_folder=run_folder, loss=loss, terms=terms,
            tensorboard=tensorboard, progress=progress, log_every=log_every, config=config, files=files, group=group,
        )  # fmt: skip
        given: Sequence[Any] = callbacks
        for one in given:
            if not isinstance(one, Callback):
                allowed = "instances of subclasses of viviane.training.Callback"
                raise ConfigError("not a callback", where="callbacks", value=type(one).__name__, allowed=allowed)
        self.callbacks = list(callbacks)
        self.callbacks[:0] = solver_callbacks(solver, self.all_metrics, self.lead_metric, schema)
        self.trackers, events_wanted = trackers_of(tracker)
        if events_wanted:
            self.tensorboard = True

    @property
    def all_metrics(self) -> list[str]:
        """The metrics of callbacks, then those of the trainer."""
        return [*measures_of(self.callbacks), *self.metrics]

    @property
    def lead_metric(self) -> str:
        """The first of `all_metrics` that has a direction; without one, "loss"."""
        for name in self.all_metrics:
            if has_direction(name):
                return name
        return "loss"

    def _in_passes(self, train: Dataset | DataPasses | KafkaStream) -> Dataset | DataPasses | KafkaStream:
        """Cut the data into `solver.embedding_passes`."""
        count = self.solver.embedding_passes
        if count is None:
            return train
        if not isinstance(train, Dataset):
            raise ConfigError(
                "only a data set is cut into passes", where="solver.embedding_passes", value=type(train).__name__,
                fix="leave embedding_passes out: sub-data-sets are passes already, and a stream has none",
            )  # fmt: skip
        return DataPasses.split(train, count)

    def fit(
        self, train: Dataset | DataPasses | KafkaStream, validation: Dataset | None = None, resume: bool = False
    ) -> History:
        """Train for `solver.epochs` more epochs, or `solver.max_steps` more steps.

        Ctrl-C ends the run after the current step, with a checkpoint and `history.interrupted`; a second
        Ctrl-C kills it.

        Args:
            train: training data: a data set, sub-data-sets that are read one after another, or a stream for online
                training.
            validation: data to evaluate on during training.
            resume: continue from the newest complete checkpoint of the run folder, with results equal bit for bit to
                an uninterrupted run; without a checkpoint, start at the beginning.

        Raises:
            ConfigError: the run folder already holds a run; resume without a run folder; settings that need
                validation data if none is given; another thread trains the model.
            SchemaError: the columns of a data set differ from the model's.
            NumericsError, KeyRangeError, DataError: a batch is invalid; weights are unchanged since the previous step.
            CheckpointError: a checkpoint cannot be written (disk full) or read.
        """
        for data in (train, validation):
            if data is not None:
                self.check_schema(data)
        with self.lock, self.switches(), Interrupt(self.group.rank, self.group.size).listening() as interrupt:
            self.module.train()
            if isinstance(train, KafkaStream):
                train = train.connected(self.group.gather_numbers, lambda: interrupt.asked)
            train = self._in_passes(train)
            loop = FitLoop(self, self.callbacks, self.lead_metric, train, validation, interrupt)
            try:
                self.history = loop.run(resume)
                self.settle()
                if self.group.size > 1:  # destroying the group is safe now
                    self.stepper.captured.release()
            except BaseException as error:
                self.group.report(error)
                raise
        return self.history

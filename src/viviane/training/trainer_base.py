"""The trainer without `fit`: checks of labels and columns, single steps, evaluation, prediction, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import AnyOptimizer, Solver
from viviane.config.optimizers import optimizer_settings
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError, DataError, SchemaError, expect
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.locks import ModelLock
from viviane.core.renamed import renamed_method
from viviane.data import DataPasses, Dataset
from viviane.data.streaming import KafkaStream
from viviane.parallel import Group, join_processes
from viviane.schema import Schema
from viviane.training.checkpoint.process_buffers import gather_process_buffers, restore_process_buffers
from viviane.training.checkpoint.random_state import group_random_state, restore_group_random_state, seed_rank
from viviane.training.checkpoint.remote_run import RunMirror, staged
from viviane.training.checkpoint.saved_table import Progress
from viviane.training.checkpoint.write import write_checkpoint
from viviane.training.environment import torch_switches
from viviane.training.evaluation import Evaluation, choose_metrics, evaluate, in_order, predict
from viviane.training.feed import DeviceFeed
from viviane.training.history import History, finite_or_none
from viviane.training.step.average import WeightMean, check_running_mean
from viviane.training.step.fixed_sizes import set_static_sizes
from viviane.training.step.objective import LossFunction, LossTerm, Objective
from viviane.training.step.precision import Precision, choose_precision
from viviane.training.step.program import TrainStep
from viviane.training.step.recorded_steps import RecordedSteps
from viviane.training.step.replays import Replays
from viviane.training.trackers import Tracker


def check_binary_labels(batch: Batch, schema: Schema, group: Group | None = None) -> None:
    """Refuse binary labels outside [0, 1], except -1 for optional labels; the guard detects NaN.

    A value between 0 and 1 counts as that fraction of a positive row. The project's own formats contain only 0 and 1,
    and their reader checks it; HugeCTR's files may contain fractions.

    Args:
        batch: on the CPU.
        schema: its labels; their task defines which are binary.
        group: processes to which the error is sent, so that none waits for this one.

    Raises:
        DataError: a label is out of range; names the first row and its label.
    """
    if batch.labels.numel():
        low, high = batch.labels.aminmax()
        if low.item() >= 0 and high.item() <= 1:  # one pass over valid labels; NaN and others are looked at one by one
            return
    for i, label in enumerate(schema.labels if batch.labels.shape[1] else ()):
        if label.task != "binary":
            continue
        values = batch.labels[:, i]
        bad = (values < 0) | (values > 1)
        if label.optional:
            bad &= values != -1
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            error = DataError(
                "a binary label is not between 0 and 1",
                where=f"label {label.name!r}, row {row} of the batch" + (f", {batch.origin}" if batch.origin else ""),
                value=values[row].item(), allowed="0 to 1, or -1 for none" if label.optional else "0 to 1",
                fix='declare the label with task "regression" if it is a real number',
            )  # fmt: skip
            if group is not None:
                group.report(error)
            raise error


def check_columns(schema: Schema, dataset: Dataset | DataPasses | KafkaStream, *, with_labels: bool) -> None:
    """Refuse a data set whose columns differ from the model's schema; with_labels=False allows missing labels.

    Raises:
        SchemaError: columns differ; names them.
        ConfigError: the argument is not a data set.
    """
    if not isinstance(dataset, Dataset | DataPasses | KafkaStream):
        raise ConfigError(
            "not a data set",
            value=str(dataset) if isinstance(dataset, str | PurePath) else type(dataset).__name__,
            allowed="viviane.Dataset(folder), or to train on a viviane.KafkaStream",
            fix=f"pass viviane.Dataset({str(dataset)!r})"
            if isinstance(dataset, str | PurePath)
            else "write the rows with viviane.write_dataset, which returns a Dataset",
        )
    lines = schema.difference(dataset.schema)
    if not with_labels:
        labels = {label.name for label in schema.labels}
        lines = [line for line in lines if not any(line.startswith(f"column {name!r}") for name in labels)]
    if lines:
        raise SchemaError(
            "the data set's columns differ from the model's: " + "; ".join(lines[:5]), where=str(dataset.path)
        )


class TrainerBase:
    """A module with everything that trains it: single steps, evaluation, prediction and checkpoints, but not `fit`.

    Args:
        module, schema, solver, optimizer, metrics, run_folder, loss, terms, tensorboard, progress, log_every, config,
        files, group: see `Trainer`.
    """

    def __init__(
        self,
        module: nn.Module,
        schema: Schema,
        solver: Solver,
        optimizer: AnyOptimizer | str,
        *,
        metrics: Sequence[str] | str | None = None,
        run_folder: str | AnyPath | None = None,
        loss: LossFunction | None = None,
        terms: Sequence[LossTerm] | None = None,
        tensorboard: bool | None = None,
        progress: bool | None = None,
        log_every: int = 100,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, Any] | None = None,
        group: Group | None = None,
    ) -> None:
        expect("module", module, nn.Module)
        expect("schema", schema, Schema)
        expect("solver", solver, Solver)
        chosen = optimizer_settings(optimizer)
        self.schema = schema
        self.group = group or join_processes(solver.device, solver.peer_timeout_s)
        self.solver = solver
        self.optimizer = chosen
        self.device = resolve_device(solver.device)
        self.module = module.to(self.device)
        self.metrics = choose_metrics(schema, metrics)
        place = None if run_folder is None else location(run_folder)
        self.mirror = RunMirror(place) if isinstance(place, RemotePath) else None
        self.run_folder = self.mirror.local if self.mirror is not None else cast("Path | None", place)
        self.tensorboard, self.progress = tensorboard, progress
        self.trackers: list[Tracker] = []
        self.log_every, self.files = log_every, dict(files or {})
        self.config = {
            "viviane": version("viviane"),
            "torch": torch.__version__,
            "module": type(module).__name__,
            "solver": solver.to_dict(),
            "optimizer": chosen.to_dict(),
            "metrics": list(self.metrics),
            **(config or {}),
        }
        self.objective = Objective(schema, solver, loss, terms)
        self.objective.to(self.device)
        self.stepper = TrainStep(self.module, self.objective, solver, chosen, self.device, self.group)
        self.stepper.captured = replays_of(self.stepper)
        if self.device.type == "cpu":
            self.stepper.recorded = RecordedSteps(self.stepper)
        self.precision: Precision | None = None if solver.precision == "auto" else Precision(solver.precision)
        self.lock = ModelLock()
        self.step = 0
        self.epoch = 0
        self.history = History()

    # Training ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, lr: float | None = None) -> Tensor:
        """Train on one batch; returns its loss, detached and on the device.

        The first step seeds the global random generators with the solver's seed, so that dropout is the same in a
        custom loop and in `fit`.

        Args:
            batch: a batch on any device.
            lr: a learning rate for this step instead of the schedule's.

        Raises:
            DataError: a binary label is not between 0 and 1, in a batch on the CPU.
            NumericsError, KeyRangeError: NaN or infinite numbers; a key out of range; no weight has been changed.
            ConfigError: another thread trains the model; ema_decay is set, and a table has no running mean.
        """
        if batch.one_hot.is_cpu:
            check_binary_labels(batch, self.schema, self.group)
        with self.lock:
            if self.solver.ema_decay is not None and self.stepper.mean is None:
                check_running_mean(self.module, self.group)
            there = batch.to(self.device)
            if self.step == 0:
                seed_rank(self.solver.seed, self.group.rank)
            precision = self.precision or self.choose_precision([there])
            captured = self.stepper.captured
            captured.rolled_back = 0
            try:
                loss = self.stepper(there, self.step + 1, precision, lr)
            finally:
                self.step -= captured.rolled_back  # rolled back: the host reads a failed status some steps later
            self.step += 1
            return loss

    def fix_sizes(self, batch_size: int | None, hotness: Mapping[str, int] | None = None) -> None:
        """Set the static shape of the next batches of a custom loop, equal on all ranks; `fit` sets it itself.

        With static shapes no GPU waits for the sizes of another, and steps can be captured in a CUDA graph. One process
        does not need it. Call it with None before a shorter batch, and after the last one.

        Args:
            batch_size: rows of the global batches; divisible by the number of processes.
            hotness: ids per row, by bag column; None: as in the schema.

        Raises:
            ConfigError: the batch size is not divisible by the number of processes, or a bag column has no hotness.
        """
        set_static_sizes(self.stepper, self.schema, batch_size, hotness)

    def settle(self) -> None:
        """Wait for all steps in flight on a GPU, and raise their errors.

        Raises:
            NumericsError, KeyRangeError: a step in flight failed; weights and `step` are those before it.
        """
        captured = self.stepper.captured
        captured.rolled_back = 0
        try:
            captured.wait_all()
        finally:
            self.step -= captured.rolled_back

    @property
    def cuda_graph(self) -> str:
        """Whether steps are replays of a CUDA graph, or why they are not."""
        return self.stepper.captured.describe()

    def switches(self) -> AbstractContextManager[None]:
        """Return the context in which `fit` runs (`solver.deterministic` and `num_threads`), for a custom loop."""
        return torch_switches(self.solver, self.device)

    def choose_precision(self, batches: Sequence[Batch]) -> Precision:
        """Choose the precision for "auto" by timing forward and backward on these batches; weights are not changed."""
        if self.precision is None:
            there = [batch.to(self.device) for batch in batches]
            self.module.train()
            chosen = choose_precision(self.module, there, self.stepper.forward_backward, self.device)
            self.precision = Precision(self.group.from_first(lambda: chosen.name))  # rank 0's measurement decides
        return self.precision

    def learning_rate(self, step: int | None = None) -> float:
        """Return the schedule's learning rate of a step, by default of the next one."""
        return self.stepper.schedule.lr(self.step + 1 if step is None else step)

    # Evaluation -------------------------------------------------------------------------------------------

    def evaluate(
        self, dataset: Dataset, batch_size: int | None = None, max_batches: int | None = None
    ) -> dict[str, float]:
        """Return the loss, as "loss", and the exact metrics over a data set; the state of training does not change.

        With several processes each evaluates its share, and all return the same metrics.

        Args:
            dataset: rows with labels.
            batch_size: rows per batch; None: the solver's eval_batch_size.
            max_batches: maximum number of batches.
        """
        self.check_schema(dataset)
        return self.gather(dataset, batch_size, max_batches).compute()

    def gather(self, dataset: Dataset, batch_size: int | None = None, max_batches: int | None = None) -> Evaluation:
        """Run over a data set and return the accumulated sums of metrics and calibration bins."""
        self.settle()
        precision = self._settled_precision()
        evaluation = Evaluation(self.schema, self.metrics, warns=self.progress is not False)
        size = self.eval_batch_size(batch_size)
        with self.averaged(), self._share(dataset, size, max_batches) as reader:
            return evaluate(self.module, reader, self.objective, evaluation, precision, self.device).join(self.group)

    def _share(self, dataset: Dataset, batch_size: int, max_batches: int | None = None) -> DeviceFeed:
        return DeviceFeed.open(dataset, batch_size, self.device, self.group, max_batches=max_batches)

    def predict(self, dataset: Dataset, batch_size: int | None = None) -> NDArray[np.float32]:
        """Return predictions (rows, L), float32, in the order of the files; every process returns those of all rows.

        For binary labels probabilities; for regression labels the module's output.
        """
        self.check_schema(dataset, with_labels=False)
        self.settle()
        precision, size, rows = self._settled_precision(), self.eval_batch_size(batch_size), len(dataset)
        with self.averaged(), self._share(dataset, size) as reader:
            own = predict(self.module, reader, rows, self.objective, precision, self.device)
        if self.group.size == 1:
            return own
        return in_order(own, [min(size, rows - start) for start in range(0, rows, size)], self.group)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the running mean of weights into the module for a block, if solver.ema_decay is set.

        Other threads wait that evaluate, predict or save.

        Raises:
            ConfigError: another thread trains the model.
        """
        with self.lock.evaluation():
            self.settle()
            mean = self.stepper.mean
            with nullcontext() if mean is None else mean.in_place():
                yield

    def eval_batch_size(self, batch_size: int | None = None) -> int:
        """Return the rows of an evaluation or prediction batch."""
        return batch_size or self.solver.eval_batch_size or max(self.solver.batch_size, 8192)

    def _settled_precision(self) -> Precision:
        """Return the precision; float32 until training has chosen one for "auto"."""
        return self.precision or Precision("fp32")

    def check_schema(self, dataset: Dataset | DataPasses | KafkaStream, *, with_labels: bool = True) -> None:
        """Refuse a data set whose columns differ from the model's; with_labels=False allows missing labels."""
        check_columns(self.schema, dataset, with_labels=with_labels)

    # Checkpoints ------------------------------------------------------------------------------------------

    def place(self) -> Progress:
        """Return the state of training: counts, precision, every process's random generators, history."""
        self.settle()
        arrays, random = group_random_state(self.device, self.group)
        precision = None if self.precision is None else self.precision.name
        rows = [finite_or_none(row) for row in self.history.rows]
        values = {"precision": precision, "random": random, **self.stepper.scaling()}
        arrays |= gather_process_buffers(self.module, self.group)
        place = Progress(self.step, self.epoch, values, arrays, rows)
        if self.stepper.mean is not None:
            place.tensors |= self.stepper.mean.tensors()
            place.values["mean_steps"] = self.stepper.mean.num_steps
        return place

    def restore_progress(self, place: Progress) -> None:
        """Restore the state that `place` returned."""
        self.step, self.epoch = place.step, place.epoch
        self.history = History(place.history)
        name = place.values.get("precision")
        if self.solver.precision == "auto" and name is not None:
            self.precision = Precision(name)
        if place.tensors:
            random = place.values["random"]
            restore_group_random_state(place.tensors, random, self.device, self.group, self.solver.seed, self.step)
        restore_process_buffers(self.module, place.tensors, self.group)
        self.stepper.take_scaling(place.values)
        self.take_mean(place)

    def continue_from(self, before: TrainerBase) -> None:
        """Continue from another trainer of the same module: optimizer, counts, generators, running mean."""
        self.stepper.optimizer = before.stepper.optimizer
        place = before.place()
        place.values.pop("mean_steps", None)
        self.restore_progress(place)
        mean, decay = before.stepper.mean, self.solver.ema_decay
        self.stepper.mean = None if mean is None or decay is None else mean.attach(decay)

    take_place = renamed_method("take_place", "restore_progress")
    go_on_from = renamed_method("go_on_from", "continue_from")

    def take_mean(self, place: Progress) -> None:
        """Restore the running mean of weights from `place`; without one it starts at the current weights."""
        self.stepper.mean = None
        if self.solver.ema_decay is not None and "mean_steps" in place.values:
            check_running_mean(self.module, self.group)
            self.stepper.mean = WeightMean(self.module, self.solver.ema_decay)
            self.stepper.mean.restore(place, place.values["mean_steps"])

    def save_checkpoint(self, folder: str | AnyPath, *, optimizer_state: bool = True) -> None:
        """Write weights, optimizer state and the state of training to a folder, atomically.

        Args:
            folder: a folder or a URL; an existing checkpoint is replaced when the new one is complete.
            optimizer_state: False writes weights only, as used for prediction.

        Raises:
            CheckpointError: the disk is full or not writable; an older checkpoint is not changed.
            ConfigError: another thread trains the model.
            RemoteError: the store is unreachable or refuses.
        """
        with self.lock.evaluation(), staged(folder, self.group) as path:
            self.settle()
            if optimizer_state:
                place, optimizer = self.place(), self.stepper.optimizer
                write_checkpoint(path, self.module, optimizer=optimizer, progress=place, group=self.group)
                return
            with self.averaged():
                write_checkpoint(path, self.module, optimizer_state=False, group=self.group)

    def load_checkpoint(self, folder: str | AnyPath, *, weights_only: bool = False) -> None:
        """Verify a checkpoint and load it into the module, the optimizers and the counts.

        Args:
            folder: written by `save_checkpoint` or taken from a run folder.
            weights_only: load only the weights and reset everything else.

        Raises:
            CheckpointError: a file is missing, truncated or altered, or the checkpoint belongs to another model.
        """
        self.settle()
        place = self.stepper.load(folder, weights_only=weights_only)
        if not weights_only:
            self.restore_progress(place)


def replays_of(step: TrainStep) -> Replays:
    """Return the replays of a step: captured in CUDA graphs on a GPU, none on other devices.

    Raises:
        ConfigError: `solver.cuda_graph` is True, and the step cannot be captured.
    """
    if step.device.type != "cuda":
        return Replays.without_gpu(step.device, step.solver.cuda_graph)
    from viviane.training.graph.captured import CapturedSteps  # not imported on a CPU

    return CapturedSteps(step)

"""One training step: forward, loss, backward, guard, clip, update."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import AnyOptimizer, Solver
from viviane.core.errors import ConfigError, NumericsError, ProcessError, VivianeError
from viviane.core.locations import AnyPath
from viviane.core.ranges import time_range, timed_as
from viviane.ops.dense_update import reason as dense_reason
from viviane.optim import DenseOptimizer, LearningRateSchedule, build_dense_optimizer
from viviane.parallel import Group, ShardedCollection
from viviane.training.average import WeightMean
from viviane.training.batch_norm import join_batch_norms
from viviane.training.captured import CapturedSteps
from viviane.training.checkpoint import load_checkpoint
from viviane.training.controls import DeviceMover
from viviane.training.dense_exchange import DenseExchange
from viviane.training.dense_gradients import DenseGradients
from viviane.training.dense_state import collections_of, dense_parameters
from viviane.training.group_guard import GroupGuard
from viviane.training.guard import NanGuard
from viviane.training.loss_scale import LossScale
from viviane.training.objective import Objective
from viviane.training.place import Progress
from viviane.training.precision import Precision
from viviane.training.stages import StageTimes
from viviane.training.step_sync import StepSync, check_collections, share_first_weights


class TrainStep:
    """Updates all weights of a module by one batch.

    Dense parameters use the optimizer's settings; each embedding collection uses the settings it was built with. All
    of them share the schedule and the clipping factor

        c = min(1, clip_grad_norm / ||g||),     ||g||^2 = sum over dense gradients and distinct rows' gradients

    In a process group every rank calls it with its local batch, which may be empty. Gradients, the clipping factor,
    batch statistics and the returned loss are those of the global batch.

    Args:
        module, objective, solver, device: see `Trainer`.
        optimizer: settings of the dense optimizer.
        group: the ranks that train together; None: this process only.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        solver: Solver,
        optimizer: AnyOptimizer,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        self.group = group or Group()
        check_collections(module, self.group)
        join_batch_norms(module, self.group)
        self.module = module
        self.objective = objective
        self.solver = solver
        self.device = device
        self.collections = collections_of(module)
        self.parameters = dense_parameters(module)
        self.gradients = DenseGradients(self.parameters)
        self.schedule = LearningRateSchedule(solver)
        self.optimizer: DenseOptimizer | None = None
        if self.parameters:
            self.optimizer = build_dense_optimizer(optimizer, self.parameters.values(), solver.lr)
            self.optimizer.beside = self.gradients.beside
        elif not self.collections:
            raise ConfigError("the module has neither parameters nor embedding tables", value=type(module).__name__)
        self.guard = NanGuard(module, self.collections, self.gradients) if solver.nan_guard else None
        self.sync: StepSync | None = None
        self.num_rows = 0
        """Rows of the last global batch."""
        self.dynamic_shape_reason: str | None = "trainer.fix_sizes was not called"
        """Why batch shapes are dynamic, in a group; None if they are static."""
        if self.optimizer is not None and dense_reason(list(self.parameters.values())) is None:
            self.optimizer.mover = DeviceMover()
        if self.group.size > 1:
            self._join()
        if solver.precision != "auto":
            Precision(solver.precision).check(device)
        self.loss_scale = LossScale(solver.loss_scale) if solver.precision == "fp16" else None
        self._one = torch.ones((), device=device)
        self.stages = StageTimes()
        self.mean: WeightMean | None = None
        for collection in self.collections.values():
            for storage in collection.all_storages():
                storage.row_mean = None  # of an earlier trainer
        self.captured = CapturedSteps(self)

    def _join(self) -> None:
        """Prepare to train with other ranks."""
        share_first_weights(self.module, self.group)
        self.sync = StepSync(self.group)
        wire = self.solver.dense_wire_dtype
        self.exchange = DenseExchange(
            list(self.parameters.values()),
            self.group,
            None if wire == "float32" else getattr(torch, wire),
            self.gradients.beside,
        )
        if self.guard is not None:
            self.guard = GroupGuard(self.module, self.collections, self.gradients)
            self.guard.sync = self.sync

    def __call__(self, batch: Batch, step: int, precision: Precision, lr: float | None = None) -> Tensor:
        """Train on one batch and return its loss, detached, on the device.

        Args:
            batch: on the device.
            step: number of this step, from 1.
            precision: of the dense layers.
            lr: a learning rate instead of the schedule's.

        Raises:
            NumericsError: NaN or infinite input, loss or gradients; no weight was changed.
            KeyRangeError: a key is out of range; no weight was changed.
        """
        with precision.products():
            return self._train(batch, step, precision, lr)

    def _train(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor:
        times, start = self.stages, perf_counter()
        self.group.at_step(step)
        try:
            replayed = self.captured(batch, step, precision, lr)
        except BaseException as error:
            self.group.report(error)
            raise
        if replayed is not None:
            times.add("replay", perf_counter() - start)
            return replayed
        batch.wait()
        try:
            self._begin(batch, step)
            loss = self._forward(batch, precision)
            if self.guard is not None:
                self.guard.check_loss(loss, batch, step)
            middle = perf_counter()
            mean = self._backward(loss)
            end = perf_counter()
            if self._overflows(loss, batch, step):
                self._roll_back()
                return mean
            if self.guard is not None:
                self.guard.check_gradients(loss, batch, step)
            for collection in self.collections.values():
                collection.check()
            scale = self._clip_scale()
        except BaseException as error:
            self._roll_back()
            self.group.report(error)
            raise
        self._update(scale, step, lr)
        times.add("forward", middle - start)
        times.add("backward", end - middle)
        times.add("update", perf_counter() - end)
        return mean

    def fix_sizes(self, rows: int | None, hotness: Mapping[str, int] | None = None) -> None:
        """Set the static shape of training batches, with the same arguments on all ranks; None: dynamic shapes.

        Args:
            rows: of every local batch.
            hotness: ids per row, by bag column; see `ShardedCollection.fix_sizes`.
        """
        if self.sync is None:
            return
        if rows is None:
            self.sync.clear_static_shape()
        else:
            self.dynamic_shape_reason = None
            self.sync.set_static_shape(rows, self.exchange, hotness)
        for collection in self.collections.values():
            if isinstance(collection, ShardedCollection):
                names = collection.features.keys()
                own = {name: count for name, count in (hotness or {}).items() if name in names}
                collection.fix_sizes(rows, own)

    def load(self, folder: str | AnyPath, *, weights_only: bool = False) -> Progress:
        """Load a checkpoint into the module and the optimizers, and return the saved position in training.

        Raises:
            CheckpointError: see `viviane.training.checkpoint.load_checkpoint`.
        """
        place = load_checkpoint(
            folder, self.module, optimizer=self.optimizer, weights_only=weights_only, group=self.group
        )
        self.captured.drop_graphs()
        return place

    @timed_as("check input")
    def _begin(self, batch: Batch, step: int) -> None:
        if self.guard is not None:
            self.guard.before(batch, step)
        elif self.sync is not None:
            self.sync.begin(batch)
        self.num_rows = batch.size if self.sync is None else self.sync.num_rows

    @timed_as("backward")
    def _backward(self, loss: Tensor) -> Tensor:
        """Run backward, sum dense gradients over the ranks, and return the detached loss of the global batch."""
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.factor
        start = self._one if scaled.dtype == self._one.dtype and not scaled.dim() else None
        if self.sync is None:
            scaled.backward(start)  # type: ignore[no-untyped-call]
            return loss.detach()
        self.exchange.begin(loss)
        scaled.backward(start)  # type: ignore[no-untyped-call]
        mean, sums = self.exchange.finish()
        if isinstance(self.guard, GroupGuard):
            self.guard.local_sums = sums
        return mean

    def _overflows(self, loss: Tensor, batch: Batch, step: int) -> bool:
        """Return whether float16 gradients overflow on any rank; the guard handles a loss that is not finite."""
        if self.loss_scale is None:
            return False
        gradients = self.gradients.all()
        is_bad = bool(gradients) and not bool(torch.stack([torch.isfinite(one).all() for one in gradients]).all())
        is_bad = is_bad or any(one.nonfinite_gradients() for one in self.collections.values())
        has_loss = bool(torch.isfinite(loss.detach()))
        every = self.group.gather_numbers([int(is_bad), int(has_loss)])
        has_losses = self.guard is None or all(one[1] for one in every)
        if not has_losses or not any(one[0] for one in every):
            return False
        try:
            self.loss_scale.overflow(f"step {step}, {batch.origin}")
        except NumericsError as error:  # raised on all ranks
            raise self.group.all_know(error) from None
        return True

    def _unscaled(self, scale: float | Tensor) -> float | Tensor:
        """Return the factor of gradients, divided by the loss scale."""
        return scale if self.loss_scale is None else scale / self.loss_scale.factor

    def scaling(self) -> dict[str, list[float]]:
        """Return the loss scale's state for a checkpoint: {"loss_scale": ...} in fp16."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}

    def take_scaling(self, values: Mapping[str, Any]) -> None:
        """Restore the loss scale of a checkpoint, if it has one."""
        if self.loss_scale is not None:
            self.loss_scale.restore(values.get("loss_scale"))

    def forward_backward(self, batch: Batch, precision: Precision) -> None:
        """Run forward and backward and keep the gradients; for timing."""
        batch.wait()
        self._forward(batch, precision).backward()  # type: ignore[no-untyped-call]

    @timed_as("forward")
    def _forward(self, batch: Batch, precision: Precision) -> Tensor:
        with precision.context(self.device):
            output = self.module(batch)
        loss = self.objective.loss(output, batch) if self.sync is None else self._share(output, batch)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on any trained weight",
                where=type(self.module).__name__,
                fix="unfreeze a parameter or a table that the module's output depends on",
            )
        penalty = self.objective.penalty(self.parameters.values(), self.num_rows or batch.size)
        if penalty is None:
            return loss
        return loss + (penalty if self.sync is None else penalty * self.sync.share_of_rows(batch))

    def _share(self, output: object, batch: Batch) -> Tensor:
        """Return the contribution of the local batch to the loss of the global batch."""
        assert self.sync is not None
        divisors = self.objective.divisors(batch)
        count = 1 if self.objective.own_loss is not None else len(self.objective.terms)
        shares: list[Tensor] | list[float] = [self.sync.share_of_rows(batch)] * count
        if divisors is not None:
            shares = self.sync.shares(divisors)
        if not batch.size:
            return self.objective.logits(output, 0).sum()  # 0, but backward still reaches every weight
        return self.objective.loss(output, batch, shares=shares)

    @timed_as("clip")
    def _clip_scale(self) -> float | Tensor:
        limit = self.solver.clip_grad_norm
        if limit is None:
            return 1.0
        gradients = self.gradients.all()
        squares = [one.grad_norm_squared().double() for one in self.collections.values()]
        if gradients:
            kind = torch.float32 if self.gradients.beside else None  # 16-bit gradients are widened as they are read
            squares.append(torch.stack(torch._foreach_norm(gradients, dtype=kind)).double().square().sum())
        norm = torch.stack(squares).sum().sqrt() / (1.0 if self.loss_scale is None else self.loss_scale.factor)
        scale = (limit / norm).clamp(max=1.0).to(torch.float32)
        return float(scale) if self.device.type == "cpu" else scale  # no synchronization on a GPU

    @timed_as("update")
    def _update(self, scale: float | Tensor, step: int, lr: float | None) -> None:
        rate = self.schedule.lr(step) if lr is None else lr
        factor = rate / self.solver.lr
        scale = self._unscaled(scale)
        if self.solver.ema_decay is not None and self.mean is None:
            self.mean = WeightMean(self.module, self.solver.ema_decay)
        if self.mean is not None:
            self.mean.advance()
        if self.optimizer is not None:
            self.optimizer.set_lr(rate, factor)
            self.optimizer.step(scale=scale)
        rates = (rate, factor) if self.captured.reason is not None else self._rates_on_device(rate, factor)
        with time_range("table update"):
            for collection in self.collections.values():
                collection.step(rates[0], scale, rates[1])
        if self.mean is not None:
            self.mean.follow()
        if self.loss_scale is not None:
            self.loss_scale.hold()  # only after the gradients were divided by it
        self.gradients.drop()
        self.captured.has_updated = True

    def _rates_on_device(self, rate: float, factor: float) -> tuple[Tensor, Tensor]:
        """Return rates on the device, as a graph reads them: tables then count steps on the device before a capture."""
        both = torch.tensor([rate, factor], dtype=torch.float64).pin_memory().to(self.device, non_blocking=True)
        return both[0], both[1]

    def diagnose(self, batch: Batch, step: int, precision: Precision) -> None:
        """Run the checks of a batch without an update, and raise what they find; gradients are dropped.

        Raises:
            NumericsError, KeyRangeError, DataError: see `__call__`.
        """
        scale, self.loss_scale = self.loss_scale, copy(self.loss_scale)  # a diagnosis must not change the loss scale
        try:
            self._begin(batch, step)
            loss = self._forward(batch, precision)
            self._backward(loss)
            if not self._overflows(loss, batch, step) and self.guard is not None:
                self.guard.check_gradients(loss, batch, step)
            self._check_keys()
        finally:
            self.loss_scale = scale
            self._roll_back()

    def _check_keys(self) -> None:
        """Raise an error if any rank has an invalid key; all ranks call it after a failed step."""
        failure: VivianeError | None = None
        try:
            for collection in self.collections.values():
                collection.check()
        except VivianeError as error:
            failure = error
        every = self.group.gather_data(None if failure is None else str(failure))
        if failure is not None:
            raise self.group.all_know(failure)
        for rank, words in enumerate(every):
            if words is not None:
                raise self.group.all_know(ProcessError(f"rank {rank}: {words}"))

    def _roll_back(self) -> None:
        """Roll back a step without an update: drop its gradients, and restore batch statistics."""
        self._discard()
        if self.guard is not None:
            self.guard.restore_buffers()

    def _discard(self) -> None:
        if self.sync is not None:
            self.exchange.drop()
        self.gradients.drop()
        for collection in self.collections.values():
            collection.discard_gradients()

"""The training step from top to bottom.

    begin      the size of the global batch, the checks of the input, the values of the step
    forward    the module and the loss
    backward   the gradients of the local batch
    reduce     the gradients and the loss of the global batch
    check      are loss, gradients and keys valid?
    clip       one factor for all gradients
    update     dense weights, tables, the running mean of weights

`TrainStep.run` is the only place that orders these phases. An executor supplies the decisions and the values: the host
in an eager step (`viviane.training.step.executor`), the device in a captured one (`viviane.training.graph`).
"""

from __future__ import annotations

from copy import copy
from time import perf_counter

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.core.ranges import time_range, timed_as
from viviane.training.step.executor import Diagnosis, HostExecutor, StepExecutor
from viviane.training.step.group_guard import GroupGuard
from viviane.training.step.precision import Precision
from viviane.training.step.state import StepState


class TrainStep(StepState):
    """Updates all weights of a module by one batch.

    Dense parameters use the optimizer's settings; each embedding collection uses the settings it was built with. All
    of them share the schedule and the clipping factor

        c = min(1, clip_grad_norm / ||g||),     ||g||^2 = sum over dense gradients and distinct rows' gradients

    In a process group every rank calls it with its local batch, which may be empty. Gradients, the clipping factor,
    batch statistics and the returned loss are those of the global batch.

    Args:
        module, objective, solver, device, optimizer, group: see `StepState`.
    """

    def __call__(self, batch: Batch, step: int, precision: Precision, lr: float | None = None) -> Tensor:
        """Train on one batch and return its loss, detached, on the device.

        Args:
            batch: batch on the device.
            step: number of this step, from 1.
            precision: precision of the dense layers.
            lr: a learning rate instead of the schedule's.

        Raises:
            NumericsError: NaN or infinite input, loss or gradients; no weight was changed.
            KeyRangeError: a key is out of range; no weight was changed.
        """
        with precision.products():
            if self.group.size > 1:
                self.group.at_step(step)
            if self.captured.can_replay:
                loss = self._replay(batch, step, precision, lr)
                if loss is not None:
                    return loss
            batch.wait()
            return self.run(batch, step, precision, HostExecutor(self, step, lr))

    def _replay(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor | None:
        """Replay a captured step and return its loss; None: the step runs eagerly."""
        start = perf_counter()
        try:
            loss = self.captured(batch, step, precision, lr)
        except BaseException as error:
            self.group.report(error)
            raise
        if loss is not None:
            self.stages.add("replay", perf_counter() - start)
        return loss

    def run(self, batch: Batch, step: int, precision: Precision, executor: StepExecutor) -> Tensor:
        """Run all phases of a step and return the loss of the global batch, detached."""
        try:
            executor.begin(batch)
            for hook in self.hooks:
                hook.before_lookup(batch, step)
            with executor.watch:
                loss = self.forward(batch, precision)
                executor.check_loss(loss, batch)
                self.backward(loss)
                mean = self.reduce(loss)
            if not executor.check(loss, mean, batch):
                executor.skip()
                return mean
            scale = self.clip()
        except BaseException as error:
            executor.fail(error)
            raise
        self.update(scale, executor)
        for hook in self.hooks:
            hook.after_update(batch, step)
        return mean

    @timed_as("forward")
    def forward(self, batch: Batch, precision: Precision) -> Tensor:
        """Return the local batch's share of the loss of the global batch, with penalties."""
        with precision.context(self.device):
            output = self.module(batch)
        sync, objective = self.sync, self.objective
        loss = objective.loss(output, batch) if sync is None else sync.loss(objective, output, batch)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on any trained weight",
                where=type(self.module).__name__,
                fix="unfreeze a parameter or a table that the module's output depends on",
            )
        penalty = None
        if objective.penalties:
            penalty = objective.penalty(self.parameters.values(), self.num_rows or batch.size)
        if penalty is None:
            return loss
        return loss + (penalty if sync is None else penalty * sync.share_of_rows(batch))

    @timed_as("backward")
    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the loss times the loss scale; their all-reduces start during backward."""
        if self.exchange is not None:
            self.exchange.begin(loss)
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.factor
        seed = self.one if scaled.dtype == self.one.dtype and not scaled.dim() else None
        scaled.backward(seed)  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        """Wait for the sums of dense gradients over the ranks, and return the detached loss of the global batch."""
        if self.exchange is None:
            return loss.detach()
        mean, sums = self.exchange.finish()
        if isinstance(self.guard, GroupGuard):
            self.guard.local_sums = sums
        return mean

    @timed_as("clip")
    def clip(self) -> float | Tensor:
        """Return the factor of all gradients: the clipping factor divided by the loss scale."""
        limit = self.solver.clip_grad_norm
        factor = None if self.loss_scale is None else self.loss_scale.factor
        if limit is None:
            return 1.0 if factor is None else 1.0 / factor
        gradients = self.gradients.all()
        squares = [one.grad_norm_squared().double() for one in self.collections.values()]
        if gradients:
            kind = torch.float32 if self.gradients.wire_gradients else None  # 16-bit gradients are widened when read
            squares.append(torch.stack(torch._foreach_norm(gradients, dtype=kind)).double().square().sum())
        norm = torch.stack(squares).sum().sqrt() / (1.0 if factor is None else factor)
        clipped = (limit / norm).clamp(max=1.0).to(torch.float32)
        scale = float(clipped) if self.device.type == "cpu" else clipped  # no synchronization on a GPU
        return scale if factor is None else scale / factor

    @timed_as("update")
    def update(self, scale: float | Tensor, executor: StepExecutor) -> None:
        """Update dense weights, tables and the running mean with gradients times `scale`."""
        lr, factor = executor.begin_update()
        if self.optimizer is not None:
            with executor.overlap:
                self.optimizer.step(scale=scale)
        with time_range("table update"):
            for collection in self.collections.values():
                collection.begin_step(lr, scale, factor, executor.gate)()  # checked before clipping
        executor.end()
        if self.mean is not None:
            self.mean.follow(executor.gate)

    def diagnose(self, batch: Batch, step: int, precision: Precision) -> None:
        """Run the checks of a batch without an update, and raise what they find; gradients are dropped.

        Raises:
            NumericsError, KeyRangeError, DataError: see `__call__`.
        """
        scale, self.loss_scale = self.loss_scale, copy(self.loss_scale)  # a diagnosis must not change the loss scale
        hooks, self.hooks = self.hooks, []
        try:
            self.run(batch, step, precision, Diagnosis(self, step))
        finally:
            self.loss_scale, self.hooks = scale, hooks

    def forward_backward(self, batch: Batch, precision: Precision) -> None:
        """Run forward and backward and keep the gradients; for timing."""
        batch.wait()
        self.forward(batch, precision).backward()  # type: ignore[no-untyped-call]

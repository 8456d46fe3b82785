"""The training step from top to bottom.

    begin      the size of the global batch, the checks of the input, the values of the step
    forward    the module and the loss
    backward   the gradients of the local batch
    reduce     the gradients and the loss of the global batch
    check      are loss, gradients and keys valid?
    clip       one factor for all gradients
    update     dense weights, tables, the running mean of weights

`TrainStep.run` is the only place that orders these phases. An executor supplies the decisions and the values: the host
in an eager step (`HostExecutor`), the device in a captured one (`viviane.training.graph`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError, NumericsError, ProcessError, VivianeError
from viviane.core.ranges import time_range, timed_as
from viviane.training.step.average import WeightMean
from viviane.training.step.group_guard import GroupGuard
from viviane.training.step.precision import Precision
from viviane.training.step.state import StepState

_NOTHING = nullcontext()


class StepExecutor(ABC):
    """Supplies the decisions and the values of a step. `TrainStep.run` contains the phases.

    Attributes:
        state: state of the training step.
        gate: 0-dim on the device, 0 disables all updates; None: the host has already decided.
        watch: context of forward, backward and reduce.
        overlap: context of the update of dense parameters, which may overlap that of the tables.
    """

    gate: Tensor | None = None
    watch: AbstractContextManager[object] = _NOTHING
    overlap: AbstractContextManager[object] = _NOTHING

    def __init__(self, state: StepState) -> None:
        self.state = state

    @abstractmethod
    def begin(self, batch: Batch) -> None:
        """Agree on the size of the global batch, and check the input or load the values of the step."""

    def forward(self, step: TrainStep, batch: Batch, precision: Precision) -> Tensor:
        """Return the local batch's share of the loss; see `TrainStep.forward`."""
        return step.forward(batch, precision)

    def backward(self, step: TrainStep, loss: Tensor) -> None:
        """Compute gradients; see `TrainStep.backward`."""
        step.backward(loss)

    @abstractmethod
    def check_loss(self, loss: Tensor, batch: Batch) -> None:
        """Check the loss before backward, if this does not wait for the device."""

    @abstractmethod
    def check(self, loss: Tensor, mean: Tensor, batch: Batch) -> bool:
        """Check loss, gradients and keys; return whether the step continues with the update.

        Args:
            loss: loss of the local batch, as backward used it.
            mean: loss of the global batch.
            batch: batch of the step.
        """

    @abstractmethod
    def begin_update(self) -> tuple[float | Tensor, float | Tensor]:
        """Return the learning rate and the schedule's factor, and count the step."""

    @abstractmethod
    def end(self) -> None:
        """Wait for all updates, and drop the gradients."""

    def skip(self) -> None:
        """Finish a step that does not update weights."""
        self.state.roll_back()

    def fail(self, error: BaseException) -> None:
        """Handle an error before the update; the caller raises it."""
        self.state.roll_back()


class HostExecutor(StepExecutor):
    """Runs an eager step: the host waits for the checks before it starts the update.

    Args:
        state: state of the training step.
        step: number of the step.
        lr: a learning rate instead of the schedule's.
    """

    def __init__(self, state: StepState, step: int, lr: float | None = None) -> None:
        self.state, self.step = state, step
        self.rate = state.rate(step, lr)
        self._start = perf_counter()
        self._loss_done = self._backward_done = self._start

    @timed_as("check input")
    def begin(self, batch: Batch) -> None:
        """Agree on the size of the global batch; save the buffers and check the input."""
        state = self.state
        if state.guard is not None:
            state.guard.before(batch, self.step)
        elif state.sync is not None:
            state.sync.begin(batch)
        state.num_rows = batch.size if state.sync is None else state.sync.num_rows

    def check_loss(self, loss: Tensor, batch: Batch) -> None:
        """Check the loss on a CPU; on a GPU reading it here would stall the queue."""
        if self.state.guard is not None:
            self.state.guard.check_loss(loss, batch, self.step)
        self._loss_done = perf_counter()

    def check(self, loss: Tensor, mean: Tensor, batch: Batch) -> bool:
        """Return False if float16 gradients overflow; raise if another value is not finite or a key is invalid."""
        self._backward_done = perf_counter()
        state = self.state
        if state.loss_scale is not None and self.overflows(loss, batch):
            return False
        if state.guard is not None:
            state.guard.check_gradients(loss, batch, self.step)
        for collection in state.collections.values():
            collection.check()
        return True

    def overflows(self, loss: Tensor, batch: Batch) -> bool:
        """Return whether float16 gradients overflow on any rank; the guard handles a loss that is not finite."""
        state = self.state
        assert state.loss_scale is not None
        gradients = state.gradients.all()
        is_bad = bool(gradients) and not bool(torch.stack([torch.isfinite(one).all() for one in gradients]).all())
        is_bad = is_bad or any(one.nonfinite_gradients() for one in state.collections.values())
        has_loss = bool(torch.isfinite(loss.detach()))
        every = state.group.gather_numbers([int(is_bad), int(has_loss)])
        has_losses = state.guard is None or all(one[1] for one in every)
        if not has_losses or not any(one[0] for one in every):
            return False
        try:
            state.loss_scale.overflow(f"step {self.step}, {batch.origin}")
        except NumericsError as error:  # raised on all ranks
            raise state.group.mark_reported(error) from None
        return True

    def begin_update(self) -> tuple[float | Tensor, float | Tensor]:
        """Return the rates; tables read them from the device if steps will be captured."""
        state, rate = self.state, self.rate
        factor = rate / state.solver.lr
        if state.solver.ema_decay is not None:
            if state.mean is None:
                state.mean = WeightMean(state.module, state.solver.ema_decay)
            state.mean.advance()
        if state.optimizer is not None:
            state.optimizer.set_lr(rate, factor)
        if state.captured.reason is not None or state.device.type != "cuda":
            return rate, factor
        # Tables then count steps on the device, as they do in a graph.
        both = torch.tensor([rate, factor], dtype=torch.float64).pin_memory().to(state.device, non_blocking=True)
        return both[0], both[1]

    def end(self) -> None:
        """Count a finite step of the loss scale, drop the gradients, and add up the seconds of each stage."""
        state = self.state
        if state.loss_scale is not None:
            state.loss_scale.hold()
        state.gradients.drop()
        state.captured.has_updated = True
        seconds = state.stages.seconds
        seconds["forward"] += self._loss_done - self._start
        seconds["backward"] += self._backward_done - self._loss_done
        seconds["update"] += perf_counter() - self._backward_done

    def fail(self, error: BaseException) -> None:
        """Roll back, and make the other ranks fail, too."""
        self.state.roll_back()
        self.state.group.report(error)


class Diagnosis(HostExecutor):
    """Runs the checks of a batch without an update, to find the cause of a failed replay."""

    def check_loss(self, loss: Tensor, batch: Batch) -> None:
        """Do nothing: the loss is checked with the gradients."""

    def check(self, loss: Tensor, mean: Tensor, batch: Batch) -> bool:
        """Raise what the checks find on any rank; return False."""
        state = self.state
        overflows = state.loss_scale is not None and self.overflows(loss, batch)
        if not overflows and state.guard is not None:
            state.guard.check_gradients(loss, batch, self.step)
        self.check_keys()
        return False

    def check_keys(self) -> None:
        """Raise an error if any rank has an invalid key; all ranks call it after a failed step."""
        group = self.state.group
        failure: VivianeError | None = None
        try:
            for collection in self.state.collections.values():
                collection.check()
        except VivianeError as error:
            failure = error
        every = group.gather_data(None if failure is None else str(failure))
        if failure is not None:
            raise group.mark_reported(failure)
        for rank, words in enumerate(every):
            if words is not None:
                raise group.mark_reported(ProcessError(f"rank {rank}: {words}"))

    def fail(self, error: BaseException) -> None:
        """Roll back; the caller reports the error."""
        self.state.roll_back()


class ExecutorChoice(Protocol):
    """Chooses the executors of steps on a CPU."""

    def executor(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> HostExecutor:
        """Return the executor of the next step."""
        ...


class TrainStep(StepState):
    """Updates all weights of a module by one batch.

    Dense parameters use the optimizer's settings; each embedding collection uses the settings it was built with. All
    of them share the schedule and the clipping factor

        c = min(1, clip_grad_norm / ||g||),     ||g||^2 = sum over dense gradients and distinct rows' gradients

    In a process group every rank calls it with its local batch, which may be empty. Gradients, the clipping factor,
    batch statistics and the returned loss are those of the global batch.

    Args:
        module, objective, solver, device, optimizer, group: see `StepState`.

    Attributes:
        recorded: chooses the executors of steps; None: all are `HostExecutor`s. The trainer sets it on a CPU.
    """

    recorded: ExecutorChoice | None = None

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
            recorded = self.recorded
            executor = (
                HostExecutor(self, step, lr) if recorded is None else recorded.executor(batch, step, precision, lr)
            )
            return self.run(batch, step, precision, executor)

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
                loss = executor.forward(self, batch, precision)
                executor.check_loss(loss, batch)
                executor.backward(self, loss)
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
        if self.exchange is None and self.device.type == "cpu":
            scaled.backward(seed)  # type: ignore[no-untyped-call]
            return
        # Autograd would use a thread of its own for a GPU; most nodes run Python, which is slower in a second thread.
        with (
            _NOTHING if self.exchange is None else self.exchange.backward(),
            torch.autograd.set_multithreading_enabled(False),
        ):
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
        with torch.no_grad():
            if self.optimizer is not None:
                with executor.overlap:
                    self.optimizer.update(scale)
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

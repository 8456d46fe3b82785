"""The executor of eager steps: the host computes the values of a step, and decides whether it may update weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import NumericsError, ProcessError, VivianeError
from viviane.core.ranges import timed_as
from viviane.training.step.average import WeightMean
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
        self.rate = state.schedule.lr(step) if lr is None else lr
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

"""The executor of captured steps: the device decides about their updates, by a status that the host reads later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Batch
from viviane.ops.capture import FIRST, branch, forget_branches, join_branches
from viviane.ops.dense_update import Workspace, check_finite, mark, update_scaled_status, update_status
from viviane.ops.host_control_block import write_back
from viviane.ops.watch import watching
from viviane.training.graph.controls import Controls
from viviane.training.graph.host_control_block import HostControlBlock
from viviane.training.step import loss_scale
from viviane.training.step.loss_scale import LossScale
from viviane.training.step.precision import Precision
from viviane.training.step.program import StepExecutor, TrainStep
from viviane.training.step.state import StepState

_FRESH = (0, -1, 0)
"""The status before the first step."""


class StepStatus:
    """Whether captured steps may update weights: decided on the device, and written back to the host.

    Args:
        device: a GPU.
        controls: the values of the steps.
        num_slots: the maximum number of replays in flight, plus one.

    Attributes:
        status: see `viviane.ops.dense_update.update_status`.
        overflow, scaling: state of a dynamic loss scale; see `viviane.ops.dense_update.update_scaled_status`.
        flags: `overflow` and the first entry of `status`, which are summed over the ranks.
        gate: gate of all updates.
        count: number of decided steps, (1,), int64, on the device.
        num_skipped: skipped steps among those whose status the host has read.
    """

    def __init__(self, device: torch.device, controls: Controls, num_slots: int) -> None:
        self.controls = controls
        self._words = torch.tensor([0, *_FRESH, 0, 0, 0], device=device)
        self.flags = self._words[:2]
        self.overflow, self.status = self._words[:1], self._words[1:4]
        self.count = self.status[2:]
        self.scaling = self._words[4:].view(torch.float64)
        self.gate = torch.ones((), dtype=torch.int32, device=device)
        self.num_skipped = 0
        self._last_scale: list[float] = []
        is_gpu = device.type == "cuda"
        self._host_rows = torch.zeros(num_slots, len(self._words) + 1, dtype=torch.int64, pin_memory=is_gpu)
        self._host_view = self._host_rows.numpy()  # reading through numpy takes a tenth of the time
        self._ends = [torch.cuda.Event() for _ in range(num_slots)] if is_gpu else []  # type: ignore[no-untyped-call]
        self.number = 0
        """The number of the next step in the device's count."""

    def load_scale(self, scale: LossScale | None) -> None:
        """Copy a dynamic loss scale to the device if it has changed on the host.

        No replay may be in flight: the host does not know yet what the scale is after it.
        """
        if scale is not None and scale.is_dynamic and scale.state() != self._last_scale:
            self._last_scale = scale.state()
            self.scaling[:2].copy_(torch.tensor(self._last_scale, dtype=torch.float64))

    def write_back(self, words: Tensor, loss: Tensor, signal: Tensor | None = None) -> None:
        """Write the status of the decided step and its loss to host memory; captured after `update_status`.

        Args:
            words: words of the step's `HostControlBlock`.
            loss: the loss, 0-dim.
            signal: (1,), float32, summed over the ranks.
        """
        write_back(words, loss, self._words, self._host_rows, self.count, signal)

    def signal(self, number: int) -> NDArray[np.int64]:
        """Return the host memory of a step's signal, (1,): valid from the end of the step until its slot is reused."""
        return self._host_view[number % len(self._host_view), -1:]

    def end(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Count a step and record an event at the end of a stream; return None on a CPU.

        Events are reused after `num_slots` steps.
        """
        self.number += 1
        if stream is None:
            return None
        done = self._ends[self.number % len(self._ends)]
        done.record(stream)
        return done

    def is_bad(self, number: int) -> bool:
        """Return whether this step or an earlier one failed, by the status that the device wrote back."""
        _, bad, first, *_ = self._host_view[number % len(self._host_view)].tolist()
        return bool(bad) and 0 <= first <= number

    def sync_scale(self, number: int, scale: LossScale | None, where: str) -> bool:
        """Update the host's loss scale by one step of the device's; return whether that step was skipped.

        Args:
            number: the step after the last one read; it has not failed.
            scale: the host's loss scale.
            where: the step and its batch, for messages.
        """
        if scale is None or not scale.is_dynamic:
            return False
        total = int(self._host_view[number % len(self._host_view), 4:7].view(np.float64)[2])
        skipped, self.num_skipped = total > self.num_skipped, total
        if skipped:
            scale.overflow(where)
        else:
            scale.hold()
        self._last_scale = scale.state()
        return skipped

    def reset(self) -> None:
        """Reset the status after the host has read a failure; the loss scale stays."""
        self._words[:4].copy_(torch.tensor([0, *_FRESH]))
        self._host_rows.zero_()
        self.number = 0


class DeviceExecutor(StepExecutor):
    """Runs a step in the form that is captured: the device loads the values, decides, and gates the updates.

    Args:
        state: state of the training step.
        step_status: its gate decides about the updates.
        workspace: workspace of the check of dense gradients.
        control_block: the block of the step, already read.
        input_done: recorded after the last read of the batch: the status is known, only updates are left.
    """

    def __init__(
        self,
        state: StepState,
        step_status: StepStatus,
        workspace: Workspace | None,
        control_block: HostControlBlock,
        input_done: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__(state)
        self.step_status, self.workspace, self.control_block = step_status, workspace, control_block
        self.input_done = input_done
        self.gate = step_status.gate
        self.overlap = branch(state.device, "dense update")
        # Under a dynamic loss scale non-finite gradients are an overflow, not an error.
        self.is_scaled = state.loss_scale is not None and state.loss_scale.is_dynamic
        self.found = step_status.overflow if self.is_scaled else step_status.status
        if state.guard is not None:
            self.watch = _watching(state, self.found)

    def begin(self, batch: Batch) -> None:
        """Load the values of a step, valid once branches are joined; with a dynamic loss scale, load them at once."""
        status, block, scale = self.step_status, self.control_block, self.state.loss_scale
        if scale is not None and self.is_scaled:
            status.controls.take(block.numbers, status.scaling[2])
            scale.held = status.scaling[0].to(torch.float32)  # a copy: the next step's scale is written over it
        else:
            with branch(self.state.device, "numbers"):
                status.controls.take(block.numbers)
        if self.state.guard is not None:
            self.state.guard.save_buffers()

    def check_loss(self, loss: Tensor, batch: Batch) -> None:
        """Do nothing: the loss is part of the status."""

    def check(self, loss: Tensor, mean: Tensor, batch: Batch) -> bool:
        """Compute the status of the step, set the gate, and write both to the host; return True."""
        state, status, guard = self.state, self.step_status, self.state.guard
        join_branches(state.device)
        if guard is not None and state.sync is None:
            check_finite([one.contiguous() for one in state.gradients.all()], self.found, self.workspace)
        mark([one for collection in state.collections.values() for one in collection.key_records()], status.status)
        if state.sync is not None:  # a failure on one rank closes the gates of all
            state.group.all_reduce(status.flags)
        if self.is_scaled:
            update_scaled_status(
                mean, status.status, status.overflow, status.scaling, status.gate,
                interval=loss_scale.INTERVAL, largest=loss_scale.LARGEST,
            )  # fmt: skip
        else:
            update_status(None if guard is None else mean, status.status, status.gate)
        if guard is not None:
            guard.restore_buffers_unless(status.gate)
        self._write_back(mean)
        return True

    def _write_back(self, mean: Tensor) -> None:
        """Write status and loss to the host; from here on the step no longer reads its batch."""
        state = self.state
        if self.input_done is not None:
            for collection in state.collections.values():
                collection.settle_rows()
        signals = None if state.exchange is None else state.exchange.received[1:]
        with branch(state.device, "tell", priority=FIRST):  # before the blocks of the update fill the queue
            self.step_status.write_back(self.control_block.words, mean, signals)
            if self.input_done is not None:
                self.input_done.record()

    def begin_update(self) -> tuple[Tensor, Tensor]:
        """Return the rates on the device; the host has counted the step."""
        return self.step_status.controls.lr, self.step_status.controls.factor

    def end(self) -> None:
        """Join all branches, and drop the gradients."""
        join_branches(self.state.device)
        self.state.module.zero_grad(set_to_none=True)
        self.state.gradients.drop()

    def fail(self, error: BaseException) -> None:
        """Do nothing: the capture drops the gradients itself."""


def run_captured_step(
    step: TrainStep,
    batch: Batch,
    precision: Precision,
    step_status: StepStatus,
    workspace: Workspace | None,
    control_block: HostControlBlock,
    input_done: torch.cuda.Event | None = None,
) -> Tensor:
    """Run a step in the form that is captured, and return the loss.

    Args:
        step: the training step.
        batch: static tensors of the batch.
        precision: precision of the dense layers.
        step_status, workspace, control_block, input_done: see `DeviceExecutor`.
    """
    forget_branches(step.device)  # left by another capture
    executor = DeviceExecutor(step, step_status, workspace, control_block, input_done)
    try:
        return step.run(batch, step_status.number, precision, executor)
    finally:
        if step.loss_scale is not None:
            step.loss_scale.held = None


@contextmanager
def _watching(state: StepState, status: Tensor) -> Iterator[None]:
    """Check gradients of lookups and sums of dense gradients as soon as they exist, overlapped with backward."""

    def look(gradient: Tensor) -> None:
        if not watch.covers(gradient):
            with branch(state.device, "look", reads=(gradient,)):
                check_finite([gradient if gradient.stride(1) == 1 else gradient.contiguous()], status)

    for collection in state.collections.values():
        collection.gradient_watch = look
    if state.exchange is not None:
        # A non-finite gradient on any rank makes the sum non-finite, so checking the sums is enough.
        state.exchange.look = lambda sums: check_finite([sums], status)
    with watching(status) as watch:
        try:
            yield
        finally:
            for collection in state.collections.values():
                collection.gradient_watch = None
            if state.exchange is not None:
                state.exchange.look = None

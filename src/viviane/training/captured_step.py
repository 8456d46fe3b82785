"""The training step as it is captured in a CUDA graph, and the step status that gates its updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Batch
from viviane.ops.capture import FIRST, branch, forget_branches, join_branches
from viviane.ops.dense_update import Workspace, check_finite, mark, update_scaled_status, update_status
from viviane.ops.host_control_block import write_back
from viviane.ops.watch import watching
from viviane.training import loss_scale
from viviane.training.controls import Controls
from viviane.training.host_control_block import HostControlBlock
from viviane.training.loss_scale import LossScale
from viviane.training.precision import Precision

if TYPE_CHECKING:
    from viviane.training.step import TrainStep

_FRESH = (0, -1, 0)
"""The status before the first step."""


class StepStatus:
    """Whether captured steps may update weights: decided on the device, and written back to the host.

    Args:
        device: a GPU.
        controls: the values of the steps.
        num_slots: the most replays in flight, plus one.

    Attributes:
        status: see `viviane.ops.dense_update.update_status`.
        overflow, scaling: of a dynamic loss scale; see `viviane.ops.dense_update.update_scaled_status`.
        flags: `overflow` and the first entry of `status`, which are summed over the ranks.
        gate: of all updates.
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

        No replay may be in flight: the host does not know the scale after it yet.
        """
        if scale is not None and scale.is_dynamic and scale.state() != self._last_scale:
            self._last_scale = scale.state()
            self.scaling[:2].copy_(torch.tensor(self._last_scale, dtype=torch.float64))

    def write_back(self, words: Tensor, loss: Tensor, signal: Tensor | None = None) -> None:
        """Write the status of the decided step and its loss to host memory; captured after `update_status`.

        Args:
            words: of the step's `HostControlBlock`.
            loss: 0-dim.
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
            number: of the step after the last one read; it has not failed.
            scale: of the host.
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


def run_captured_step(
    step: TrainStep,
    batch: Batch,
    precision: Precision,
    step_status: StepStatus,
    workspace: Workspace,
    control_block: HostControlBlock,
    input_done: torch.cuda.Event | None = None,
) -> Tensor:
    """Run a step in the form that is captured: forward, backward, status, update; return the loss.

    Args:
        step: the training step.
        batch: static tensors.
        precision: of the dense layers.
        step_status: its gate decides about the updates.
        workspace: of the check of dense gradients.
        control_block: has been read.
        input_done: recorded after the last read of the batch: the status is known, only updates are left.
    """
    forget_branches(step.device)  # of another capture
    with _step_values(step, step_status, control_block):
        guard, gate = step.guard, step_status.gate
        follows = step.loss_scale is not None and step.loss_scale.held is not None
        # Under a dynamic loss scale non-finite gradients are an overflow, not an error.
        found = step_status.overflow if follows else step_status.status
        if guard is not None:
            guard.save_buffers()
        with _watching(step, found) if guard is not None else nullcontext():
            mean = step._backward(step._forward(batch, precision))
        join_branches(step.device)
        if guard is not None and step.sync is None:
            check_finite([one.contiguous() for one in step.gradients.all()], found, workspace)
        mark([one for collection in step.collections.values() for one in collection.key_records()], step_status.status)
        if step.sync is not None:  # a failure on one rank closes the gates of all
            step.group.all_reduce(step_status.flags)
        if follows:
            update_scaled_status(
                mean, step_status.status, step_status.overflow, step_status.scaling, gate,
                interval=loss_scale.INTERVAL, largest=loss_scale.LARGEST,
            )  # fmt: skip
        else:
            update_status(None if guard is None else mean, step_status.status, gate)
        if guard is not None:
            guard.restore_buffers_unless(gate)
        if input_done is not None:
            for collection in step.collections.values():
                collection.settle_rows()
        with branch(step.device, "tell", priority=FIRST):  # before the blocks of the update fill the queue
            step_status.write_back(control_block.words, mean, None if step.sync is None else step.exchange.received[1:])
            if input_done is not None:
                input_done.record()
        scale = step._unscaled(step._clip_scale())
        if step.optimizer is not None:
            with branch(step.device, "dense update"):  # overlaps the update of the tables
                step.optimizer.step(scale=scale)
        for collection in step.collections.values():
            collection.step(step_status.controls.lr, scale, step_status.controls.factor, gate)
        join_branches(step.device)
        if step.mean is not None:
            step.mean.follow(gate)
        step.module.zero_grad(set_to_none=True)
        step.gradients.drop()
        return mean


@contextmanager
def _step_values(step: TrainStep, step_status: StepStatus, control_block: HostControlBlock) -> Iterator[None]:
    """Load the values of a step, valid once branches are joined; with a dynamic loss scale, load them immediately."""
    scale = step.loss_scale
    if scale is None or not scale.is_dynamic:
        with branch(step.device, "numbers"):
            step_status.controls.take(control_block.numbers)
        yield
        return
    step_status.controls.take(control_block.numbers, step_status.scaling[2])
    scale.held = step_status.scaling[0].to(
        torch.float32
    )  # a copy: `update_scaled_status` writes the scale of the next step
    try:
        yield
    finally:
        scale.held = None


@contextmanager
def _watching(step: TrainStep, status: Tensor) -> Iterator[None]:
    """Check gradients of lookups and sums of dense gradients as soon as they exist, overlapped with backward."""

    def look(gradient: Tensor) -> None:
        if not watch.covers(gradient):
            with branch(step.device, "look", reads=(gradient,)):
                check_finite([gradient if gradient.stride(1) == 1 else gradient.contiguous()], status)

    for collection in step.collections.values():
        collection.gradient_watch = look
    if step.sync is not None:
        # A non-finite gradient on any rank makes the sum non-finite, so checking the sums is enough.
        step.exchange.look = lambda sums: check_finite([sums], status)
    with watching(status) as watch:
        try:
            yield
        finally:
            for collection in step.collections.values():
                collection.gradient_watch = None
            if step.sync is not None:
                step.exchange.look = None

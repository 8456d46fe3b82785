"""What a CUDA graph records of a training step, and the verdict that its updates wait for."""

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
    """Whether recorded steps may move weights: decided on the device, told to the host.

    Args:
        device: a GPU.
        controls: the numbers of the steps.
        num_slots: replays under way whose verdicts the host may look at, and the next one.

    Attributes:
        status: see `viviane.ops.dense_update.update_status`.
        overflow, scaling: of a dynamic loss scale; see `viviane.ops.dense_update.update_scaled_status`.
        flags: what one process finds for all: `overflow`, and the first of `status`.
        gate: of all updates.
        count: how many steps were judged, (1,), int64, on the device.
        num_skipped: steps that overflowed, of those that the host has looked at.
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
        self._host_view = self._host_rows.numpy()  # to look into a tensor takes ten times as long
        self._ends = [torch.cuda.Event() for _ in range(num_slots)] if is_gpu else []  # type: ignore[no-untyped-call]
        self.number = 0
        """Of the next step, as the device counts."""

    def load_scale(self, scale: LossScale | None) -> None:
        """Let the device go on with the host's loss scale, where it is a dynamic one that has changed on the host.

        No replay is under way: of those the host does not know yet what scale they leave.
        """
        if scale is not None and scale.is_dynamic and scale.state() != self._last_scale:
            self._last_scale = scale.state()
            self.scaling[:2].copy_(torch.tensor(self._last_scale, dtype=torch.float64))

    def write_back(self, words: Tensor, loss: Tensor, signal: Tensor | None = None) -> None:
        """Tell the host the status of the step that was judged, and its loss; to be recorded after that.

        Args:
            words: of the step's `HostControlBlock`.
            loss: 0-dim.
            signal: (1,), float32, a number that processes have summed.
        """
        write_back(words, loss, self._words, self._host_rows, self.count, signal)

    def signal(self, number: int) -> NDArray[np.int64]:
        """Return where a step tells its signal, (1,): there after its end, and until others have taken all slots."""
        return self._host_view[number % len(self._host_view), -1:]

    def end(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Count a step, and return the end of all that a stream was given; None where nothing is waited for.

        The event of the step before the last `num_slots` is used again.
        """
        self.number += 1
        if stream is None:
            return None
        done = self._ends[self.number % len(self._ends)]
        done.record(stream)
        return done

    def is_bad(self, number: int) -> bool:
        """Whether what was told says that this step, or one before it, was bad."""
        _, bad, first, *_ = self._host_view[number % len(self._host_view)].tolist()
        return bool(bad) and 0 <= first <= number

    def sync_scale(self, number: int, scale: LossScale | None, where: str) -> bool:
        """Let the host's loss scale follow the device's by one step; returns whether that step was skipped.

        Args:
            number: of the step after the last one that was looked at; it was not bad.
            scale: of the host.
            where: the step and its batch.
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
        """Begin anew, after the host has seen a bad step; the loss scale stays."""
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
    """Run a step as a graph is to repeat it: forward, backward, verdict, update; returns the loss.

    Args:
        step: whose parts are run.
        batch: static tensors.
        precision: of the dense layers.
        step_status: whose gate decides about the updates.
        workspace: of the check of dense gradients.
        control_block: has been read.
        input_done: recorded where the verdict is there, and nothing is left but updates that read nothing of the batch.
    """
    forget_branches(step.device)  # of a graph that somebody else recorded
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
        if step.sync is not None:  # what one process found closes the gates of all
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
        with branch(step.device, "tell", priority=FIRST):  # before the update has all its blocks wait for room
            step_status.write_back(control_block.words, mean, None if step.sync is None else step.exchange.received[1:])
            if input_done is not None:
                input_done.record()
        scale = step._unscaled(step._clip_scale())
        if step.optimizer is not None:
            with branch(step.device, "dense update"):  # beside the tables'
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
    """Take the numbers of a step, which are there once branches are joined, and a dynamic loss scale at once."""
    scale = step.loss_scale
    if scale is None or not scale.is_dynamic:
        with branch(step.device, "numbers"):
            step_status.controls.take(control_block.numbers)
        yield
        return
    step_status.controls.take(control_block.numbers, step_status.scaling[2])
    scale.held = step_status.scaling[0].to(torch.float32)  # a copy: the verdict settles the scale of the next step
    try:
        yield
    finally:
        scale.held = None


@contextmanager
def _watching(step: TrainStep, status: Tensor) -> Iterator[None]:
    """Look at gradients of lookups and sums of dense ones as soon as they are there, beside the rest of backward."""

    def look(gradient: Tensor) -> None:
        if not watch.covers(gradient):
            with branch(step.device, "look", reads=(gradient,)):
                check_finite([gradient if gradient.stride(1) == 1 else gradient.contiguous()], status)

    for collection in step.collections.values():
        collection.gradient_watch = look
    if step.sync is not None:
        # The sums are looked at, which one bad number of any process makes bad.
        step.exchange.look = lambda sums: check_finite([sums], status)
    with watching(status) as watch:
        try:
            yield
        finally:
            for collection in step.collections.values():
                collection.gradient_watch = None
            if step.sync is not None:
                step.exchange.look = None

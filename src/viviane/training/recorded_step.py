"""What a CUDA graph records of a training step, and the verdict that its updates wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.ops.capture import branch, join_branches
from viviane.ops.dense_update import Room, check_finite, judge, mark
from viviane.ops.watch import watching
from viviane.training.controls import Controls
from viviane.training.precision import Precision

if TYPE_CHECKING:
    from viviane.training.step import TrainStep


class Verdict:
    """Whether recorded steps may move weights: decided on the device, sent to the host.

    Args:
        device: a GPU.
        controls: the numbers of the steps.

    Attributes:
        status: see `viviane.ops.dense_update.judge`.
        gate: of all updates.
    """

    def __init__(self, device: torch.device, controls: Controls) -> None:
        self.controls = controls
        self.status = torch.tensor([0, -1, 0], device=device)
        self.gate = torch.ones((), dtype=torch.int32, device=device)
        self._sent = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._number = 0

    def send(self) -> torch.cuda.Event | None:
        """Send the status of the step to the host; returns what to wait for, None where it is there."""
        self._sent.copy_(self.status, non_blocking=True)
        if not self.status.is_cuda:
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def next_number(self) -> int:
        """Count a step as the device does."""
        self._number += 1
        return self._number - 1

    def is_bad(self, number: int) -> bool:
        """Whether what was sent says that this step, or one before it, was bad; later ones may have sent already."""
        bad, first, _ = self._sent.tolist()
        return bool(bad) and 0 <= first <= number

    def clear(self) -> None:
        """Begin anew, after the host has seen a bad step."""
        self.status.copy_(torch.tensor([0, -1, 0]))
        self._sent.zero_()
        self._number = 0


def record_step(step: TrainStep, batch: Batch, precision: Precision, verdict: Verdict, room: Room) -> Tensor:
    """Run a step as a graph is to repeat it: forward, backward, verdict, update; returns the loss.

    Args:
        step: whose parts are run.
        batch: static tensors.
        precision: of the dense layers.
        verdict: whose gate decides about the updates.
        room: of the check of dense gradients.
    """
    guard, gate = step.guard, verdict.gate
    if guard is not None:
        guard.save_buffers()
    with _watching(step, verdict.status) if guard is not None else nullcontext():
        mean = step._backward(step._forward(batch, precision))
    join_branches(step.device)
    if guard is not None:
        check_finite([one.contiguous() for one in step.gradients.all()], verdict.status, room)
    for collection in step.collections.values():
        for record in collection.key_records():
            mark(record, verdict.status)
    if step.together is not None:  # what one process found closes the gates of all
        step.group.all_reduce(verdict.status[:1])
    judge(None if guard is None else mean, verdict.status, gate)
    if guard is not None:
        guard.restore_buffers_unless(gate)
    scale = step._unscaled(step._clip_scale())
    if step.optimizer is not None:
        with branch(step.device, "dense update"):  # beside the tables'
            step.optimizer.step(scale=scale)
    for collection in step.collections.values():
        collection.step(verdict.controls.lr, scale, verdict.controls.factor, gate)
    join_branches(step.device)
    if step.mean is not None:
        step.mean.follow(gate)
    step.module.zero_grad(set_to_none=True)
    step.gradients.drop()
    return mean


@contextmanager
def _watching(step: TrainStep, status: Tensor) -> Iterator[None]:
    """Look at the gradients of lookups as soon as backward has them, beside what is left of backward."""

    def look(gradient: Tensor) -> None:
        if not watch.covers(gradient):
            with branch(step.device, "look", reads=(gradient,)):
                check_finite([gradient if gradient.stride(1) == 1 else gradient.contiguous()], status)

    for collection in step.collections.values():
        collection.gradient_watch = look
    if step.together is not None:
        step.exchange.watches = False  # the sums are looked at, which one bad number of any process makes bad
    with watching(status) as watch:
        try:
            yield
        finally:
            for collection in step.collections.values():
                collection.gradient_watch = None
            if step.together is not None:
                step.exchange.watches = True

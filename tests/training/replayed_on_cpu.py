"""Captured steps simulated on a CPU: each replay runs the captured code again."""

import pytest
import torch

from viviane.optim import dense
from viviane.training import trainer_base as trainers
from viviane.training.graph import captured
from viviane.training.graph.capture import CapturedGraph
from viviane.training.graph.captured_step import StepStatus, run_captured_step
from viviane.training.graph.controls import Controls
from viviane.training.graph.host_control_block import HostControlBlock
from viviane.training.graph.overlap import OverlappedInput
from viviane.training.graph.static_batch import StaticBatch

CPU = torch.device("cpu")


class Rerun:
    """Runs what a graph would repeat."""

    def __init__(self, step, static, precision, status, control_block, input_done):
        self.static = static
        self.captured = lambda: run_captured_step(
            step, static.batch, precision, status, None, control_block, input_done
        )
        self.step, self.step_status, self.control_block = step, status, control_block

    def replay(self):
        self.control_block.read()
        groups = self.step.optimizer.param_groups
        counts = [group["step"] for group in groups]  # the host has counted this replay, and the optimizer does so, too
        for group in groups:
            group["step"] -= 1
        with pytest.MonkeyPatch.context() as patch:  # dense weights move by the device's numbers, through the gate
            patch.setattr(dense, "is_capturing", lambda device: True)
            mover = self.step.optimizer.mover
            mover.device_numbers, mover.gate = self.step_status.controls.group, self.step_status.gate
            with self.static.looked_up():
                self.captured()
        for group, count in zip(groups, counts, strict=True):
            group["step"] = count

    def reset(self):
        """As of a graph: it is not replayed any more."""
        self.replay = None


class Through:
    """In the place of an event: the batch may be written to then, and is, but for ids, which a CPU sorts later."""

    def __init__(self, static):
        self.batch = static.batch

    def record(self):
        for tensor in (self.batch.dense, self.batch.labels, self.batch.weight):
            if tensor is not None:
                tensor.fill_(float("nan"))
        for bag in self.batch.bags.values():
            bag.offsets.fill_(-1)
            if bag.weights is not None:
                bag.weights.fill_(float("nan"))


class GraphCapture:
    """As `viviane.training.graph.capture.GraphCapture`; `failure` is what every recording fails by."""

    failure: Exception | None = None

    def __init__(self, step, num_slots):
        self.step, self.num_slots = step, num_slots
        means = 0 if step.mean is None else len(step.mean.numbers)
        rows = num_slots if step.loss_scale is not None and step.loss_scale.is_dynamic else 1
        self.overlap = OverlappedInput(CPU)
        self.step_status = StepStatus(CPU, Controls(CPU, len(step.optimizer.param_groups), means, rows), num_slots)

    def record(self, batch, precision):
        if self.failure is not None:
            return None, self.failure
        if self.step.mean is not None:
            self.step.mean.hold(self.step_status.controls.means)
        outside = [p for one in self.step.collections.values() for p in one.parts() if p.resolves_before_replay]
        static, status = StaticBatch(batch, outside), self.step_status
        control_block = HostControlBlock(CPU, status.controls.width, static.width, self.num_slots, status.count)
        input_done = Through(static) if self.step.mean is None else None
        rerun = Rerun(self.step, static, precision, status, control_block, input_done)
        return CapturedGraph(rerun, static, torch.zeros(()), control_block, [], None, input_done), None


@pytest.fixture
def replays(monkeypatch):
    """Let steps be replayed on a CPU; gives the class of recorders."""
    recorder = type("OwnRecorder", (GraphCapture,), {})
    monkeypatch.setattr(captured, "GraphCapture", recorder)
    reason = lambda step: None if step.solver.cuda_graph else "no graph is wanted"  # noqa: E731
    monkeypatch.setattr(captured, "ineligible_reason", reason)
    monkeypatch.setattr(trainers, "replays_of", captured.CapturedSteps)
    return recorder


def let_replay(trainer):
    """Let a trainer's steps be replayed, where its solver wants that; steps from Python move by the same formulas."""
    trainer.stepper.captured._is_disabled = not trainer.solver.cuda_graph
    trainer.stepper.optimizer.mover = dense.DenseMover()
    for collection in trainer.stepper.collections.values() if trainer.solver.cuda_graph else ():
        for storage in collection.all_storages():
            storage.steps.hold(CPU)  # tables count as on a GPU: on the device, through the gate
    return trainer

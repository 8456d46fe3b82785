"""Replay the dense part of training steps on a CPU, where the host's time would exceed that of small batches.

The first steps of a batch shape run eagerly. Then one step is recorded (`viviane.training.step.recording`), and two
more run both ways: eagerly, and by the recorded program from the same state. Only a program that gives the same bits is
used from then on. Every step checks first that nothing has changed that the program depends on
(`viviane.training.step.recorded_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.logging import get_logger
from viviane.training.step.precision import Precision
from viviane.training.step.program import HostExecutor, TrainStep
from viviane.training.step.recorded_state import (
    RecordedState,
    buffers_of,
    collections_of,
    constants_of,
    ineligible_reasons,
    inputs_of,
    is_observed,
    layout_of,
)
from viviane.training.step.recording import DenseProgram, Recorder

_log = get_logger("training.recorded")
_GRAD, _NONE = attrgetter("grad"), frozenset({None})
_EAGER_STEPS = 3
_VERIFIED_STEPS = 2
_MAX_SHAPES = 16
_STEPS_BETWEEN = 63
MAX_ROWS = 4096
"""With more rows a step takes so long that the host's time does not count, and recording would hold much memory."""


class RecordedSteps:
    """Decides for each step of a `TrainStep` whether it runs eagerly, is recorded, or replays a program.

    Args:
        step: the training step.

    Attributes:
        reason: why steps are not recorded; None if they are or will be.
        num_replays: number of replayed steps.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.reason: str | None = None
        self.num_replays = 0
        self._shapes: dict[Hashable, _Shape] = {}
        self._state: RecordedState | None = None
        self._num_unchecked = 0
        """Number of next steps that run eagerly without a check of changes: the last one could not be replayed."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the programs out of a copy: they would run on the weights of the original."""
        return {"step": self.step, "reason": None, "num_replays": 0, "_shapes": {}, "_state": None, "_num_unchecked": 0}

    def describe(self) -> str:
        """Return in one line whether steps are replayed, or why not."""
        if self.reason is not None:
            return f"eager: {self.reason}"
        ready = sum(one.is_ready for one in self._shapes.values())
        if ready:
            return f"replayed: {ready} shape(s) recorded, {self.num_replays} steps replayed"
        refused = next((one.reason for one in self._shapes.values() if one.reason), None)
        return f"eager: {refused}" if refused else f"eager so far: a batch shape is recorded after {_EAGER_STEPS} steps"

    def executor(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> HostExecutor:
        """Return the executor of the next step."""
        own = self.step
        if self._num_unchecked or not 0 < batch.size <= MAX_ROWS:
            self._num_unchecked = max(self._num_unchecked - 1, 0)
            return HostExecutor(own, step, lr)
        if self._state is None or not self._state.holds():
            self._reset()
        if self.reason is not None:
            self._num_unchecked = _STEPS_BETWEEN
        if self.reason is not None or is_observed():
            return HostExecutor(own, step, lr)
        if {*map(_GRAD, own.parameters.values())} - _NONE:  # backward adds to it
            return HostExecutor(own, step, lr)
        key = (*map(layout_of, (batch.labels, batch.dense, batch.one_hot, batch.weight)), *batch.bags, precision.name)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = _Shape(batch.layout)
        if shape.reason is not None:
            self._num_unchecked = _STEPS_BETWEEN
        return shape.executor(self, batch, step, lr)

    def _reset(self) -> None:
        """Drop all programs, and note the state of the module again."""
        if any(one.is_ready for one in self._shapes.values()):
            _log.info("recording the training step again: weights, freezing, modes or the module changed")
        self._shapes.clear()
        self._state = RecordedState(self.step)
        self.reason = next(ineligible_reasons(self.step), None)


class _Shape:
    """The program of a batch shape, and how far it is."""

    def __init__(self, layout: object) -> None:
        self.layout = layout
        self.reason: str | None = None
        self.program: DenseProgram | None = None
        self.num_steps = 0
        self.num_verified = 0

    @property
    def is_ready(self) -> bool:
        """Whether the program replays steps."""
        return self.reason is None and self.num_verified >= _VERIFIED_STEPS

    def executor(self, owner: RecordedSteps, batch: Batch, step: int, lr: float | None) -> HostExecutor:
        """Return the executor of the next step of this shape."""
        own = owner.step
        if self.reason is not None or (batch.layout is not self.layout and batch.layout != self.layout):
            return HostExecutor(own, step, lr)
        if self.program is not None and self.num_verified >= _VERIFIED_STEPS:
            owner.num_replays += 1
            return ReplayExecutor(own, step, lr, self.program)
        self.num_steps += 1
        if self.num_steps <= _EAGER_STEPS:
            return HostExecutor(own, step, lr)
        if self.program is None:
            return RecordingExecutor(own, step, lr, self)
        return VerifyingExecutor(own, step, lr, self)


class RecordingExecutor(HostExecutor):
    """Runs an eager step and records it."""

    def __init__(self, state: TrainStep, step: int, lr: float | None, shape: _Shape) -> None:
        super().__init__(state, step, lr)
        self._shape = shape
        self._recorder: Recorder | None = None

    def forward(self, step: TrainStep, batch: Batch, precision: Precision) -> Tensor:
        """Run forward and the loss, and note their operators."""
        recorder = self._recorder = Recorder(inputs_of(step, batch), constants_of(step), collections_of(step))
        recorder.watch(batch)
        with recorder:
            loss = step.forward(batch, precision)
        recorder.end_forward(loss)
        return loss

    def backward(self, step: TrainStep, loss: Tensor) -> None:
        """Run backward, and note its operators and the gradients."""
        recorder = self._recorder
        assert recorder is not None
        with recorder:
            step.backward(loss)
        recorder.close()
        self._shape.program = recorder.program([one.grad for one in step.parameters.values()])
        self._shape.reason = recorder.reason
        self._recorder = None

    def fail(self, error: BaseException) -> None:
        """Remove the recorder's hooks, and roll back."""
        if self._recorder is not None:
            self._recorder.close()
        super().fail(error)


class ReplayExecutor(HostExecutor):
    """Runs the recorded program in the place of forward and backward."""

    def __init__(self, state: TrainStep, step: int, lr: float | None, program: DenseProgram) -> None:
        super().__init__(state, step, lr)
        self.watch = torch.no_grad()
        self._program = program
        self._running: Generator[Any, None, None] | None = None

    def forward(self, step: TrainStep, batch: Batch, precision: Precision) -> Tensor:
        """Look the batch up, and run the program up to the loss."""
        self._running = self._program.start(batch, list(inputs_of(step, batch).values()))
        loss: Tensor = next(self._running)
        return loss

    def backward(self, step: TrainStep, loss: Tensor) -> None:
        """Run the rest of the program; tables and parameters get their gradients."""
        assert self._running is not None
        gradients = next(self._running)
        self._running = None
        for parameter, gradient in zip(step.parameters.values(), gradients, strict=True):
            parameter.grad = gradient


class VerifyingExecutor(HostExecutor):
    """Runs an eager step, and the recorded program from the same state; the eager results stay."""

    def __init__(self, state: TrainStep, step: int, lr: float | None, shape: _Shape) -> None:
        super().__init__(state, step, lr)
        self._shape = shape
        self._lookups: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._taken: dict[int, Tensor] = {}
        self._before: list[Tensor] = []

    def forward(self, step: TrainStep, batch: Batch, precision: Precision) -> Tensor:
        """Run forward, and keep what the program starts from."""
        self._batch = batch
        self._before = [torch.get_rng_state(), *(one.clone() for one in buffers_of(step))]
        handles = [one.register_forward_hook(self._keep) for one in collections_of(step)]
        try:
            return step.forward(batch, precision)
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, collection: nn.Module, args: object, output: Any) -> None:
        number, flat = len(self._lookups), output.flat
        masks = {name: mask.clone() for name, mask in output.masks.items()}
        self._lookups.append((_copy(flat.detach()), masks))
        if flat.grad_fn is not None:
            flat.grad_fn.register_prehook(lambda given: self._taken.update({number: given[0].clone()}))

    def backward(self, step: TrainStep, loss: Tensor) -> None:
        """Run backward, then the program, and compare all that they changed."""
        step.backward(loss)
        parameters = list(step.parameters.values())
        eager = [loss.detach(), *(one.grad for one in parameters), *map(self._taken.get, sorted(self._taken))]
        eager += [torch.get_rng_state(), *(one.clone() for one in buffers_of(step))]
        reason: str | None = None
        try:
            self._restore(step, self._before)
            if not _same(self._replayed(step, loss), eager):
                reason = "a replay gave other bits than the eager step"
        except Exception as error:
            reason = f"a replay failed: {type(error).__name__}: {error}"
        finally:
            self._restore(step, eager[-len(self._before) :])
        if reason is not None:
            _log.warning("training steps run eagerly: %s", reason)
        self._shape.reason = reason
        self._shape.num_verified += 1

    def _replayed(self, step: TrainStep, loss: Tensor) -> list[Tensor | None]:
        program = self._shape.program
        taken: dict[int, Tensor] = {}
        assert program is not None
        if len(self._lookups) != len(program.lookups):
            return []
        inputs: list[Any] = list(inputs_of(step, self._batch).values())
        inputs += [flat for flat, _ in self._lookups]
        inputs += [_taker(taken, i) for i in program.trained]
        inputs += [
            masks[name] for (_, masks), own in zip(self._lookups, program.mask_names, strict=True) for name in own
        ]
        with torch.no_grad():
            running = program.run(inputs)
            own_loss, gradients = next(running), next(running)
        results = [own_loss, *gradients, *map(taken.get, sorted(taken))]
        return [*results, torch.get_rng_state(), *(one.clone() for one in buffers_of(step))]

    def _restore(self, step: TrainStep, given: Sequence[Any]) -> None:
        torch.set_rng_state(given[0])
        with torch.no_grad():
            for buffer, value in zip(buffers_of(step), given[1:], strict=True):
                buffer.copy_(value)


def _taker(taken: dict[int, Tensor], number: int) -> Callable[[Tensor], None]:
    return lambda gradient: taken.update({number: gradient.clone()})


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with its own memory, of the same strides and with the same memory around it."""
    memory = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _same(ours: Sequence[Tensor | None], truth: Sequence[Tensor | None]) -> bool:
    """Whether two lists of tensors have the same bits."""
    return len(ours) == len(truth) and all(map(_same_bits, ours, truth))


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat, own = (part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (one, other))
    return torch.equal(flat, own)

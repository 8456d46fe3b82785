"""Capture and replay of the complete training step in one CUDA graph, and the handling of failed steps.

The host cannot check a replay before its update, so the device decides. A NaN or infinite loss or gradient, or an
invalid key, sets a flag. The flag closes the gate of all updates, for this step and all later ones, until the host
reads it a few steps later. The weights are then those before the failed step. The host runs the failed batch through
the checks of the eager step once more to raise an error that names the cause.

An overflow under a dynamic loss scale is not an error: the gate is closed for that step only, and the device halves the
scale. The host updates its copy of the scale and its step counts when it reads the step status.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError, NumericsError
from viviane.core.logging import get_logger
from viviane.core.ranges import timed_as
from viviane.embedding import TableStorage
from viviane.training.graph.capture import CapturedGraph, GraphCapture
from viviane.training.graph.capture_rules import ineligible_reason, is_short, shape_mismatch_reason
from viviane.training.graph.captured_step import StepStatus
from viviane.training.graph.overlap import OverlappedInput
from viviane.training.graph.replay_counts import ReplayCounts
from viviane.training.graph.static_batch import BatchSources, batch_shape
from viviane.training.step.guard import FIX
from viviane.training.step.precision import Precision
from viviane.training.step.program import TrainStep
from viviane.training.step.replays import Replays, refusal

_log = get_logger("training.captured")
_EAGER_STEPS = {"auto": 3, True: 1}
"""Warm-up steps of a shape before its capture: they plan lookups, compile kernels, and show that the shape repeats."""
_MAX_GRAPHS = 4
_MAX_SHAPES = 1024
_MAX_DOUBLINGS = 16
_MAX_IN_FLIGHT = 8  # bridges delays of the host by the reader's threads, 1 to 2 ms
_NOTHING = nullcontext()


@dataclass(frozen=True)
class _InFlight:
    """A replay in flight: the host has not read its step status yet."""

    number: int
    step: int
    batch: Batch
    precision: Precision
    sources: BatchSources
    done: torch.cuda.Event | None


class CapturedSteps(Replays):
    """Captures the step of a `TrainStep` for each batch shape, and replays it.

    Args:
        step: the training step.

    The attributes are those of `Replays`.
    """

    can_replay = True

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.setting = step.solver.cuda_graph
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._shape_counts: Counter[Hashable] = Counter()
        self._live_graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._state: Hashable = None
        self._modules: list[dict[str, Any]] = []
        self._in_flight: deque[_InFlight] = deque()
        self._counts = ReplayCounts(step)
        self._capture_failure: str | None = None
        self._graph_capture: GraphCapture | None = None
        self._num_evicted = 0
        self.reason = ineligible_reason(step)
        self._last_warning: str | None = None
        self.shape_mismatch_reason: str | None = None
        self._is_disabled = step.device.type != "cuda" or self.setting is False
        if self.reason is not None and self.setting is True:
            raise refusal(self.reason)

    def describe(self) -> str:
        """Return in one line whether steps are replayed, or why not."""
        if self.reason is not None:
            return f"eager: {self.reason}"
        if not self.num_captured and self.shape_mismatch_reason is not None:
            return f"eager: {self.shape_mismatch_reason}"
        if not self.num_captured:
            return f"eager so far: a batch shape is captured after {_EAGER_STEPS[self.setting]} step(s)"
        return f"replayed: {self.num_captured} shape(s) captured, {self.num_replays} steps replayed"

    # Steps --------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor | None:
        """Train on a batch by a replay and return its loss; None: the caller runs the eager step.

        Raises:
            NumericsError, KeyRangeError, DataError: an earlier replay failed; see `rolled_back`.
        """
        if self._is_disabled:
            return None
        with _current(self.step.device):
            loss = self._replay_or_not(batch, step, precision, lr)
        if loss is None and self._graph_capture is not None:
            self._graph_capture.overlap.reset()
        return loss

    def _replay_or_not(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor | None:
        self._reset_if_changed()
        self.shape_mismatch_reason = shape_mismatch_reason(self.step, batch)
        if self.reason is None and self.shape_mismatch_reason is not None and not is_short(self.step):
            self._warn_eager(self.shape_mismatch_reason)
        if self.reason is not None or self.shape_mismatch_reason is not None or not batch.size:
            self.wait_all()
            mismatch = self.shape_mismatch_reason
            if mismatch is not None and self.step.dynamic_shape_reason is not None and self.setting is True:
                raise self.step.group.mark_reported(refusal(mismatch))
            return None
        key = (batch_shape(batch), precision)
        found = self._graphs.get(key)
        if found is None:
            self.wait_all()
            if len(self._shape_counts) > _MAX_SHAPES:
                self._shape_counts.clear()
            self._shape_counts[key] += 1
            # With many shapes, each evicted graph doubles the warm-up of later captures.
            if self._shape_counts[key] <= _EAGER_STEPS[self.setting] << min(self._num_evicted, _MAX_DOUBLINGS):
                return None
            # An eager step that updates weights creates means and optimizer state; one that overflows does not.
            begins = self.step.solver.ema_decay is not None and self.step.mean is None
            found = None if begins or not self.has_updated else self._record(key, batch, precision)
            if found is None:
                return None
        self._graphs.move_to_end(key)
        return self._replay(found, batch, step, precision, lr)

    @timed_as("replay")
    def _replay(self, found: CapturedGraph, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor:
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._wait_oldest()
        own, step_status = self.step, self._step_status
        rate = own.rate(step, lr)
        factor = rate / own.solver.lr
        if own.optimizer is not None:
            own.optimizer.set_lr(rate, factor)
        if not self._in_flight:
            step_status.load_scale(own.loss_scale)
        current = None if own.device.type != "cuda" else torch.cuda.current_stream(torch.cuda.current_device())
        loss = torch.empty_like(found.loss)  # a copy: the next replay overwrites the graph's loss
        if own.sync is not None:
            own.sync.begin(batch)
        sources = found.batch.sources(batch)
        with self._overlap.before(batch, found.input_done, current):
            rows = self._counts.start(rate, factor, step_status.controls.num_rows)
            numbers = step_status.controls.pack(rows, step_status.num_skipped)
            found.control_block.write(step_status.number, loss.data_ptr(), numbers, found.batch.words(sources))
            if found.first is not None:
                found.first.replay()
        found.graph.replay()
        sources.release()
        number, done = step_status.number, step_status.end(current)
        self._in_flight.append(_InFlight(number, step, batch, precision, sources, done))
        if own.sync is not None:
            own.sync.expect_signals(step_status.signal(number), done)
        self.num_replays += 1
        own.num_rows = batch.size if own.sync is None else own.sync.num_rows
        return loss

    @property
    def _step_status(self) -> StepStatus:
        assert self._graph_capture is not None  # there are replays only after a capture
        return self._graph_capture.step_status

    @property
    def _overlap(self) -> OverlappedInput:
        assert self._graph_capture is not None
        return self._graph_capture.overlap

    # Step status --------------------------------------------------------------------------------------------

    def wait_all(self) -> None:
        """Wait for all replays in flight, and raise if one failed.

        Raises:
            NumericsError, KeyRangeError, DataError: neither that step nor a later one changed a weight.
        """
        while self._in_flight:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        """Wait for the oldest replay in flight and read its step status."""
        oldest = self._in_flight.popleft()
        if oldest.done is not None:
            oldest.done.synchronize()
        if self._step_status.is_bad(oldest.number):
            self._raise_failure(oldest)
        where = f"step {oldest.step}, {oldest.batch.origin}"
        self._counts.end(skipped=self._step_status.sync_scale(oldest.number, self.step.loss_scale, where))

    def _raise_failure(self, oldest: _InFlight) -> NoReturn:
        """Roll back the counts of the failed step and of later ones, and raise the cause."""
        if oldest.done is not None:
            torch.cuda.synchronize(self.step.device)
        self.rolled_back = self._counts.roll_back()
        self.num_replays -= self.rolled_back
        self._in_flight.clear()
        self._step_status.reset()
        self._overlap.reset()  # the next step is eager
        for collection in self.step.collections.values():
            for record in collection.key_records():
                record.zero_()
        self.step.diagnose(oldest.batch, oldest.step, oldest.precision)
        error = NumericsError(
            "a replayed step found NaN or infinite numbers, but the eager step of the same batch does not",
            where=f"step {oldest.step}, {oldest.batch.origin}",
            fix=FIX,
        )
        raise self.step.group.mark_reported(error)  # all ranks have the same step status

    # Graphs -------------------------------------------------------------------------------------------------

    def drop_graphs(self) -> None:
        """Drop all graphs, on all ranks, after a checkpoint was loaded.

        Comparing addresses is not enough. One rank may get its old addresses again by chance, replay, and wait for the
        others forever. And a graph uses one step count for all tables, which may have different ones now.
        """
        self.wait_all()
        self._reset()

    def release(self) -> None:
        """Drop all graphs without reading their status: NCCL does not shut down while graphs hold its collectives.

        Graphs are reset as well: a traceback may still refer to one and keep it alive.
        """
        if self._live_graphs and self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)
        self._in_flight.clear()
        self._counts.clear()
        self._graph_capture = None  # and with it the unread step status
        self._graphs.clear()
        self._shape_counts.clear()
        for graph in list(self._live_graphs):
            graph.reset()
        self._live_graphs.clear()

    def _reset(self) -> None:
        self._graphs.clear()
        self._shape_counts.clear()
        self.num_captured = 0
        self.has_updated = False

    def _reset_if_changed(self) -> None:
        """Drop all graphs if the state that they captured has changed."""
        state = self._captured_state()
        if state == self._state:
            return
        if self._graphs:
            self.wait_all()
            _log.info("capturing the training step again: weights, freezing, modes or the optimizer's state changed")
            self._reset()
        self._modules = [vars(one) for one in self.step.module.modules()]
        self._state = self._captured_state()
        self.reason = self._capture_failure or ineligible_reason(self.step)
        if self.reason is not None:
            self._warn_eager(self.reason)

    def _warn_eager(self, reason: str) -> None:
        """Warn once why steps are not captured; all ranks have the same reason."""
        if reason != self._last_warning and self.step.group.rank == 0:
            _log.warning("training step: eager: %s", reason)
        self._last_warning = reason

    def _captured_state(self) -> Hashable:
        """Return the state that a graph depends on besides the batch."""
        own = self.step
        parameters = own.parameters.values()
        places, trained = [p.data_ptr() for p in parameters], [p.requires_grad for p in parameters]
        state: list[Hashable] = []
        if own.optimizer is not None:
            state = [one.data_ptr() for held in own.optimizer.state.values() for one in held.values()]
            state += [bool(group["weight_decay"]) for group in own.optimizer.param_groups]
        tables = [
            (part.frozen, part.output_dtype, *(_table_state(storage) for storage in part.all_storages()))
            for collection in own.collections.values()
            for part in collection.parts()
        ]
        modules = [  # iterating over modules() each time would take a tenth of the host's time per step
            (one["training"], len(one["_modules"]), len(one["_forward_hooks"]), len(one["_forward_pre_hooks"]))
            for one in self._modules
        ]
        means = None if own.mean is None else own.mean.addresses
        return tuple(places), tuple(trained), tuple(state), tuple(tables), tuple(modules), means, len(own.hooks)

    def _record(self, key: Hashable, batch: Batch, precision: Precision) -> CapturedGraph | None:
        if self._graph_capture is None:
            self._graph_capture = GraphCapture(self.step, _MAX_IN_FLIGHT + 1)
        while len(self._graphs) >= _MAX_GRAPHS:
            given_up, _ = self._graphs.popitem(last=False)
            del self._shape_counts[given_up]
            self._num_evicted += 1
        made, failure = self._graph_capture.record(batch, precision)
        if not self._all_captured(failure):
            return None
        assert made is not None
        self._state = self._captured_state()
        self._graphs[key] = made
        self._live_graphs.update(made.graphs())
        self.step.group.before_end(self.release)
        self.num_captured += 1
        _log.info("captured the training step in a CUDA graph: %d rows, %s", batch.size, precision.name)
        return made

    def _all_captured(self, failure: Exception | None) -> bool:
        """Return whether the capture succeeded on all ranks: if it failed on one, no rank replays."""
        every = self.step.group.gather_data(None if failure is None else _first_words(failure))
        bad = [rank for rank, words in enumerate(every) if words is not None]
        if bad:
            place = f" on rank {bad[0]}" if self.step.sync is not None else ""
            self._fail(f"capture failed{place}: {every[bad[0]]}", failure)
        return not bad

    def _fail(self, reason: str, error: Exception | None) -> None:
        self._capture_failure = self.reason = reason
        self._graphs.clear()
        if self.setting is True:
            raise self.step.group.mark_reported(ConfigError(
                "the training step could not be captured in a CUDA graph", where="solver.cuda_graph",
                value=self.reason,
                fix="set cuda_graph='auto' or False, or remove GPU synchronization from forward and loss",
            )) from error  # fmt: skip
        self._warn_eager(reason)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device: streams and events belong to it."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING  # setting the current device takes longer than comparing it
    return torch.cuda.device(device)


def _table_state(storage: TableStorage) -> Hashable:
    """Return the address of rows, whether a table and its step count were replaced, and whether changes are noted."""
    return storage.weight.data_ptr(), storage.num_steps_was_set, storage.changed is not None


def _first_words(error: BaseException) -> str:
    """Return the first line of the root cause of an error."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]

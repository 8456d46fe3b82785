"""The whole training step in one CUDA graph: when it is recorded, replayed, and what a bad batch does to it.

A replay cannot ask the host whether its numbers are good. The decision is made on the device: loss, gradients and keys
set a flag, and where it is set the gate of all updates is closed, for this step and all later ones, until the host has
seen it. It looks a few steps later; by then the weights are as the step before the bad one left them, and the bad batch
goes through the eager step's checks once more for a message that names what was wrong.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError, NumericsError
from viviane.core.logging import get_logger
from viviane.ops.capture import forget_branches
from viviane.ops.dense_update import Room
from viviane.training.capture_rules import obstacle, unlike
from viviane.training.controls import Controls, DeviceMover
from viviane.training.guard import FIX
from viviane.training.precision import Precision
from viviane.training.recorded_step import Verdict, record_step
from viviane.training.static_batch import StaticBatch, batch_shape

if TYPE_CHECKING:
    from viviane.training.step import TrainStep

_log = get_logger("training.captured")
_EAGER_STEPS = {"auto": 3, True: 1}
"""Steps of a shape before it is recorded: they plan lookups and compile kernels, and show that the shape comes back."""
_MOST_GRAPHS = 4
_MOST_SHAPES = 1024
_MOST_IN_FLIGHT = 4


@dataclass
class _Graph:
    """A recorded step: what it reads, what it returns, and what it needs to stay."""

    graph: torch.cuda.CUDAGraph
    batch: StaticBatch
    loss: Tensor
    kept: list[Tensor]


@dataclass(frozen=True)
class _Flight:
    """A replay whose verdict the host has not seen yet."""

    number: int
    step: int
    batch: Batch
    precision: Precision
    done: torch.cuda.Event


class CapturedSteps:
    """Records the step of a `TrainStep` for each shape of batch, and replays it.

    Args:
        step: whose forward, backward and update are recorded.

    Attributes:
        reason: why steps are not recorded; None where they are or will be.
        unlike: why the last batch may look otherwise in another process; None where it does not, or there is no other.
        num_replays: steps that were replays.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.setting = step.solver.cuda_graph
        self.num_replays = 0
        self.rolled_back = 0
        """Steps that the last error took back: they were counted, and moved nothing."""
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._state: Hashable = None
        self._flights: deque[_Flight] = deque()
        self._failure: str | None = None
        self._verdict: Verdict | None = None
        self.reason = obstacle(step)
        self.unlike: str | None = None
        self._never = step.device.type != "cuda" or self.setting is False
        if self.reason is not None and self.setting is True:
            raise self._refusal(self.reason)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            "the training step cannot be recorded in a CUDA graph", where="solver.cuda_graph", value=reason,
            fix="set cuda_graph='auto', which trains the same without a graph, or change what prevents it",
        )  # fmt: skip

    @property
    def num_graphs(self) -> int:
        """How many shapes of batch have a graph."""
        return len(self._graphs)

    def describe(self) -> str:
        """Say in a line whether steps are replayed, or why not."""
        if self.reason is not None:
            return f"eager: {self.reason}"
        if not self._graphs and self.unlike is not None:
            return f"eager: {self.unlike}"
        if not self._graphs:
            return f"eager so far: a shape of batch is recorded after {_EAGER_STEPS[self.setting]} step(s)"
        return f"replayed: {len(self._graphs)} shape(s) recorded, {self.num_replays} steps replayed"

    # Steps --------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor | None:
        """Train on a batch by a replay and return its loss; None: the batch is left to the eager step.

        Raises:
            NumericsError, KeyRangeError, DataError: what an earlier replay found; see `rolled_back`.
        """
        if self._never:
            return None
        self._renew()
        self.unlike = unlike(self.step, batch)
        if self.reason is not None or self.unlike is not None or not batch.size:
            self.settle()
            if self.unlike is not None and self.step.unsaid is not None and self.setting is True:
                raise self._refusal(self.unlike)
            return None
        key = (batch_shape(batch), precision)
        found = self._graphs.get(key)
        if found is None:
            self.settle()
            if len(self._seen) > _MOST_SHAPES:
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= _EAGER_STEPS[self.setting]:
                return None
            found = self._record(key, batch, precision)
            if found is None:
                return None
        self._graphs.move_to_end(key)
        return self._replay(found, batch, step, precision, lr)

    def _replay(self, found: _Graph, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor:
        while len(self._flights) >= _MOST_IN_FLIGHT:
            self._land()
        own, verdict = self.step, self._verdict
        assert verdict is not None
        own.group.at_step(step)
        if own.together is not None:
            own.together.begin(batch)
        found.batch.fill(batch)
        rate = own.schedule.lr(step) if lr is None else lr
        factor = rate / own.solver.lr
        if own.optimizer is not None:
            own.optimizer.set_lr(rate, factor)
            for group in own.optimizer.param_groups:
                group["step"] += 1
        verdict.controls.write(rate, factor, own.optimizer)
        found.graph.replay()
        loss = found.loss.clone()  # the next replay writes there again
        done = verdict.send()
        self._flights.append(_Flight(verdict.next_number(), step, batch, precision, done))
        self.num_replays += 1
        own.num_rows = batch.size if own.together is None else own.together.num_rows
        return loss

    # Verdicts -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all replays, and raise what they found.

        Raises:
            NumericsError, KeyRangeError, DataError: no weight has been changed by that step or a later one.
        """
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest replay under way and look at its verdict."""
        flight = self._flights.popleft()
        flight.done.synchronize()
        assert self._verdict is not None
        if self._verdict.is_bad(flight.number):
            self._refuse(flight)

    def _refuse(self, flight: _Flight) -> None:
        """Undo the counts of the bad step and of those after it, and raise what was wrong."""
        assert self._verdict is not None
        torch.cuda.synchronize(self.step.device)
        self.rolled_back = 1 + len(self._flights)
        self.num_replays -= self.rolled_back
        self._flights.clear()
        self._verdict.clear()
        if self.step.optimizer is not None:
            for group in self.step.optimizer.param_groups:
                group["step"] -= self.rolled_back
        for collection in self.step.collections.values():
            for record in collection.key_records():
                record.zero_()
        self.step.diagnose(flight.batch, flight.step, flight.precision)
        error = NumericsError(
            "a recorded step found NaN or infinite numbers, and the same batch without the graph does not",
            where=f"step {flight.step}, {flight.batch.origin}",
            fix=FIX,
        )
        raise self.step.group.all_know(error)  # a verdict is of all processes

    # Recording ----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop all graphs of a group after a checkpoint was loaded, in all processes alike.

        Alone a process sees by addresses what was replaced. Of several one might get the old addresses back by chance
        and replay, and then wait for the others.
        """
        if self.step.together is not None:
            self.settle()
            self._graphs.clear()
            self._seen.clear()

    def _renew(self) -> None:
        """Drop all graphs where something that they repeat has changed."""
        state = self._captured_state()
        if state == self._state:
            return
        if self._graphs:
            self.settle()
            _log.info("recording the training step anew: weights, freezing, modes or the optimizer's state changed")
            self._graphs.clear()
            self._seen.clear()
        self._state = state
        self.reason = self._failure or obstacle(self.step)
        if self.reason is not None:
            _log.info("training step: %s", self.describe())

    def _captured_state(self) -> Hashable:
        """Return all that a graph takes for given besides the batch."""
        own = self.step
        places = [(p.data_ptr(), p.requires_grad) for p in own.parameters.values()]
        state: list[Hashable] = []
        if own.optimizer is not None:
            state = [one.data_ptr() for held in own.optimizer.state.values() for one in held.values()]
            state += [bool(group["weight_decay"]) for group in own.optimizer.param_groups]
        tables = [
            (part._frozen, part.output_dtype, *(storage.weight.data_ptr() for storage in part.all_storages()))
            for collection in own.collections.values()
            for part in collection.parts()
        ]
        return (
            tuple(places),
            tuple(state),
            tuple(tables),
            tuple(
                (one.training, bool(one._forward_hooks), bool(one._forward_pre_hooks)) for one in own.module.modules()
            ),
        )

    def _record(self, key: Hashable, batch: Batch, precision: Precision) -> _Graph | None:
        own = self.step
        if self._verdict is None:
            groups = 0 if own.optimizer is None else len(own.optimizer.param_groups)
            self._verdict = Verdict(own.device, Controls(own.device, groups, _MOST_IN_FLIGHT + 1))
        kept, room = [], Room()
        mover = None if own.optimizer is None else own.optimizer.mover
        if own.optimizer is not None and isinstance(mover, DeviceMover):
            mover.controls, mover.gate = self._verdict.controls, self._verdict.gate
            kept = [*mover.reserve(own.optimizer), room.reserve(list(own.parameters.values()))]
        while len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        if own.together is not None:  # NCCL makes its connections for sums now, not in the recording
            own.group.all_reduce(torch.zeros_like(self._verdict.status[:1]))
        made, failure = self._capture(batch, precision, self._verdict, room, kept)
        if not self._all_recorded(failure):
            return None
        assert made is not None
        room.write()
        if isinstance(mover, DeviceMover):
            mover.write()
        self._state = self._captured_state()
        self._graphs[key] = made
        _log.info("recorded the training step in a CUDA graph: %d rows, %s", batch.size, precision.name)
        return made

    def _capture(
        self, batch: Batch, precision: Precision, verdict: Verdict, room: Room, kept: list[Tensor]
    ) -> tuple[_Graph | None, Exception | None]:
        """Return the recorded step, or what kept it from being recorded."""
        own = self.step
        static, graph = StaticBatch(batch), torch.cuda.CUDAGraph()
        counts = [] if own.optimizer is None else [group["step"] for group in own.optimizer.param_groups]
        own._discard()
        gc.collect()  # a reference cycle that still holds gradients would keep its memory from the graph
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = record_step(own, static.batch, precision, verdict, room)
        except Exception as error:
            return None, error
        finally:
            own._discard()
            if own.optimizer is not None:
                for group, count in zip(own.optimizer.param_groups, counts, strict=True):
                    group["step"] = count
        return _Graph(graph, static, loss, kept), None

    def _all_recorded(self, failure: Exception | None) -> bool:
        """Settle whether all processes have a recording: where one has none, no process replays, since it waits."""
        every = self.step.group.gather_data(None if failure is None else _first_words(failure))
        bad = [rank for rank, words in enumerate(every) if words is not None]
        if bad:
            place = f" on rank {bad[0]}" if self.step.together is not None else ""
            self._fail(f"recording failed{place}: {every[bad[0]]}", failure)
        return not bad

    def _fail(self, reason: str, error: Exception | None) -> None:
        self._failure = self.reason = reason
        self._graphs.clear()
        forget_branches(self.step.device)
        torch.cuda.synchronize(self.step.device)
        index = self.step.device.index
        generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        # A capture that broke off leaves the generator waiting for its end; a copy of its state does not.
        generator.graphsafe_set_state(generator.clone_state())
        if self.setting is True:
            raise ConfigError(
                "the training step could not be recorded in a CUDA graph", where="solver.cuda_graph",
                value=self.reason, fix="set cuda_graph='auto' or False, or let forward and loss never wait for the GPU",
            ) from error  # fmt: skip
        _log.warning("training step: %s", self.describe())


def _first_words(error: BaseException) -> str:
    """Return the first line of the error that others followed from."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""The whole training step in one CUDA graph: when it is recorded, replayed, and what a bad batch does to it.

A replay cannot ask the host whether its numbers are good. The decision is made on the device: loss, gradients and keys
set a flag, and where it is set the gate of all updates is closed, for this step and all later ones, until the host has
seen it. It looks a few steps later; by then the weights are as the step before the bad one left them, and the bad batch
goes through the eager step's checks once more for a message that names what was wrong.

Gradients that overflow under a dynamic loss scale are no such error: the gate is closed for that step alone, the device
halves the scale and goes on, and the host's scale and counts follow as verdicts come in.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError, NumericsError
from viviane.core.logging import get_logger
from viviane.core.ranges import timed_as
from viviane.embedding import DynamicStorage, Storage
from viviane.training.beside_update import BesideUpdate
from viviane.training.capture_rules import is_short, obstacle, unlike
from viviane.training.guard import FIX
from viviane.training.precision import Precision
from viviane.training.recorded_step import Verdict
from viviane.training.recording import Recorder, Recording
from viviane.training.replay_counts import ReplayCounts
from viviane.training.static_batch import batch_shape

if TYPE_CHECKING:
    from viviane.training.step import TrainStep

_log = get_logger("training.captured")
_EAGER_STEPS = {"auto": 3, True: 1}
"""Steps of a shape before it is recorded: they plan lookups and compile kernels, and show that the shape comes back."""
_MOST_GRAPHS = 4
_MOST_SHAPES = 1024
_MOST_DOUBLINGS = 16
_MOST_IN_FLIGHT = 8  # the host is held up by a reader's threads now and then, for a millisecond or two
_NOTHING = nullcontext()


@dataclass(frozen=True)
class _Flight:
    """A replay whose verdict the host has not seen yet."""

    number: int
    step: int
    batch: Batch
    precision: Precision
    done: torch.cuda.Event | None


class CapturedSteps:
    """Records the step of a `TrainStep` for each shape of batch, and replays it.

    Args:
        step: whose forward, backward and update are recorded.

    Attributes:
        reason: why steps are not recorded; None where they are or will be.
        unlike: why the last batch may look otherwise in another process; None where it does not, or there is no other.
        num_recorded: shapes of batch that were recorded since weights, modes or the optimizer's state last changed.
        num_replays: steps that were replays.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.setting = step.solver.cuda_graph
        self.num_recorded = self.num_replays = 0
        self.rolled_back = 0
        """Steps that the last error took back: they were counted, and moved nothing."""
        self.has_moved = False
        """Whether a step from Python has moved weights since graphs were last dropped."""
        self._graphs: OrderedDict[Hashable, Recording] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._made: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._state: Hashable = None
        self._modules: list[dict[str, Any]] = []
        self._flights: deque[_Flight] = deque()
        self._counts = ReplayCounts(step)
        self._failure: str | None = None
        self._recorder: Recorder | None = None
        self._num_given_up = 0
        self.reason = obstacle(step)
        self._told: str | None = None
        self.unlike: str | None = None
        self._never = step.device.type != "cuda" or self.setting is False
        if self.reason is not None and self.setting is True:
            raise self._refusal(self.reason)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            "the training step cannot be recorded in a CUDA graph", where="solver.cuda_graph", value=reason,
            fix="set cuda_graph='auto', which trains the same without a graph, or change what prevents it",
        )  # fmt: skip

    def describe(self) -> str:
        """Say in a line whether steps are replayed, or why not."""
        if self.reason is not None:
            return f"eager: {self.reason}"
        if not self.num_recorded and self.unlike is not None:
            return f"eager: {self.unlike}"
        if not self.num_recorded:
            return f"eager so far: a shape of batch is recorded after {_EAGER_STEPS[self.setting]} step(s)"
        return f"replayed: {self.num_recorded} shape(s) recorded, {self.num_replays} steps replayed"

    # Steps --------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor | None:
        """Train on a batch by a replay and return its loss; None: the batch is left to the eager step.

        Raises:
            NumericsError, KeyRangeError, DataError: what an earlier replay found; see `rolled_back`.
        """
        if self._never:
            return None
        with _current(self.step.device):
            loss = self._replay_or_not(batch, step, precision, lr)
        if loss is None and self._recorder is not None:
            self._recorder.beside_update.forget()
        return loss

    def _replay_or_not(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor | None:
        self._renew()
        self.unlike = unlike(self.step, batch)
        if self.reason is None and self.unlike is not None and not is_short(self.step):
            self._tell(self.unlike)
        if self.reason is not None or self.unlike is not None or not batch.size:
            self.settle()
            if self.unlike is not None and self.step.unsaid is not None and self.setting is True:
                raise self.step.group.all_know(self._refusal(self.unlike))
            return None
        key = (batch_shape(batch), precision)
        found = self._graphs.get(key)
        if found is None:
            self.settle()
            if len(self._seen) > _MOST_SHAPES:
                self._seen.clear()
            self._seen[key] += 1
            # Where shapes come and go, each that was recorded in vain makes the next one wait twice as long.
            if self._seen[key] <= _EAGER_STEPS[self.setting] << min(self._num_given_up, _MOST_DOUBLINGS):
                return None
            # Means and optimizer state begin with a step from Python that moves weights: one that overflows does not.
            begins = self.step.solver.ema_decay is not None and self.step.mean is None
            found = None if begins or not self.has_moved else self._record(key, batch, precision)
            if found is None:
                return None
        self._graphs.move_to_end(key)
        return self._replay(found, batch, step, precision, lr)

    @timed_as("replay")
    def _replay(self, found: Recording, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor:
        while len(self._flights) >= _MOST_IN_FLIGHT:
            self._land()
        own, verdict = self.step, self._verdict
        rate = own.schedule.lr(step) if lr is None else lr
        factor = rate / own.solver.lr
        if own.optimizer is not None:
            own.optimizer.set_lr(rate, factor)
        if not self._flights:
            verdict.take(own.loss_scale)
        current = None if own.device.type != "cuda" else torch.cuda.current_stream(torch.cuda.current_device())
        loss = torch.empty_like(found.loss)  # its own memory: the next replay writes to that of the graph again
        if own.together is not None:
            own.together.begin(batch)
        with self._beside_update.before(batch, found.through, current):
            rows = self._counts.start(rate, factor, verdict.controls.num_rows)
            numbers = verdict.controls.told(rows, verdict.num_skipped)
            found.mailbox.write(verdict.number, loss.data_ptr(), numbers, found.batch.words(batch))
            if found.first is not None:
                found.first.replay()
        found.graph.replay()
        number, done = verdict.number, verdict.end(current)
        self._flights.append(_Flight(number, step, batch, precision, done))
        if own.together is not None:
            own.together.will_hear(verdict.signal(number), done)
        self.num_replays += 1
        own.num_rows = batch.size if own.together is None else own.together.num_rows
        return loss

    @property
    def _verdict(self) -> Verdict:
        assert self._recorder is not None  # there are replays only after a recording
        return self._recorder.verdict

    @property
    def _beside_update(self) -> BesideUpdate:
        assert self._recorder is not None
        return self._recorder.beside_update

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
        if flight.done is not None:
            flight.done.synchronize()
        if self._verdict.is_bad(flight.number):
            self._refuse(flight)
        where = f"step {flight.step}, {flight.batch.origin}"
        self._counts.end(skipped=self._verdict.follow(flight.number, self.step.loss_scale, where))

    def _refuse(self, flight: _Flight) -> NoReturn:
        """Undo the counts of the bad step and of those after it, and raise what was wrong."""
        if flight.done is not None:
            torch.cuda.synchronize(self.step.device)
        self.rolled_back = self._counts.take_back()
        self.num_replays -= self.rolled_back
        self._flights.clear()
        self._verdict.clear()
        self._beside_update.forget()  # what follows is a step from Python
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
        """Drop all graphs, in all processes alike, after a checkpoint was loaded.

        Addresses do not tell: of several processes one might get the old ones back by chance and replay, and then wait
        for the others; and a graph moves tables by one count of steps that may be of several ages now.
        """
        self.settle()
        self._begin_anew()

    def let_go(self) -> None:
        """Drop all graphs without a look at what they found: NCCL does not end while graphs hold its exchanges.

        They are taken apart, too: one that a frame of an error's traceback still refers to would live on.
        """
        if self._made and self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)
        self._flights.clear()
        self._counts.clear()
        self._recorder = None  # with a verdict that has not been looked at
        self._graphs.clear()
        self._seen.clear()
        for graph in list(self._made):
            graph.reset()
        self._made.clear()

    def _begin_anew(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self.num_recorded = 0
        self.has_moved = False

    def _renew(self) -> None:
        """Drop all graphs where something that they repeat has changed."""
        state = self._captured_state()
        if state == self._state:
            return
        if self._graphs:
            self.settle()
            _log.info("recording the training step anew: weights, freezing, modes or the optimizer's state changed")
            self._begin_anew()
        self._modules = [vars(one) for one in self.step.module.modules()]
        self._state = self._captured_state()
        self.reason = self._failure or obstacle(self.step)
        if self.reason is not None:
            self._tell(self.reason)

    def _tell(self, reason: str) -> None:
        """Say once why steps are not recorded; all processes have the same reason."""
        if reason != self._told and self.step.group.rank == 0:
            _log.warning("training step: eager: %s", reason)
        self._told = reason

    def _captured_state(self) -> Hashable:
        """Return all that a graph takes for given besides the batch."""
        own = self.step
        parameters = own.parameters.values()
        places, trained = [p.data_ptr() for p in parameters], [p.requires_grad for p in parameters]
        state: list[Hashable] = []
        if own.optimizer is not None:
            state = [one.data_ptr() for held in own.optimizer.state.values() for one in held.values()]
            state += [bool(group["weight_decay"]) for group in own.optimizer.param_groups]
        tables = [
            (part._frozen, part.output_dtype, *(_table_state(storage) for storage in part.all_storages()))
            for collection in own.collections.values()
            for part in collection.parts()
        ]
        modules = [  # a walk over all of them takes a tenth of the host's part of a step
            (one["training"], len(one["_modules"]), len(one["_forward_hooks"]), len(one["_forward_pre_hooks"]))
            for one in self._modules
        ]
        means = None if own.mean is None else own.mean.addresses
        return tuple(places), tuple(trained), tuple(state), tuple(tables), tuple(modules), means

    def _record(self, key: Hashable, batch: Batch, precision: Precision) -> Recording | None:
        if self._recorder is None:
            self._recorder = Recorder(self.step, _MOST_IN_FLIGHT + 1)
        while len(self._graphs) >= _MOST_GRAPHS:
            given_up, _ = self._graphs.popitem(last=False)
            del self._seen[given_up]
            self._num_given_up += 1
        made, failure = self._recorder.record(batch, precision)
        if not self._all_recorded(failure):
            return None
        assert made is not None
        self._state = self._captured_state()
        self._graphs[key] = made
        self._made.update(made.graphs())
        self.step.group.before_end(self.let_go)
        self.num_recorded += 1
        _log.info("recorded the training step in a CUDA graph: %d rows, %s", batch.size, precision.name)
        return made

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
        if self.setting is True:
            raise self.step.group.all_know(ConfigError(
                "the training step could not be recorded in a CUDA graph", where="solver.cuda_graph",
                value=self.reason, fix="set cuda_graph='auto' or False, or let forward and loss never wait for the GPU",
            )) from error  # fmt: skip
        self._tell(reason)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: streams and events are of that."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING  # to make it what it is takes longer than to ask
    return torch.cuda.device(device)


def _table_state(storage: Storage | DynamicStorage) -> Hashable:
    """Return where a storage's rows are, and whether somebody has replaced a table and its count of steps."""
    return storage.weight.data_ptr(), isinstance(storage, Storage) and storage.steps.were_set


def _first_words(error: BaseException) -> str:
    """Return the first line of the error that others followed from."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Traces of training steps by torch's profiler: of replays, and of eager steps by named ranges.

Module hooks create the ranges of a module's parts. Steps with hooks are not replayed, and kernels of a CUDA graph have
no ranges. So where training replays steps, two traces are recorded: of replays, and of eager steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError
from viviane.core.logging import get_logger
from viviane.core.machine import describe
from viviane.core.ranges import recording, time_range
from viviane.data import Dataset
from viviane.training.feed import DeviceFeed
from viviane.training.profiling.device_time import DeviceTime, by_kind, device_time
from viviane.training.profiling.timeline import STEP, Timeline
from viviane.training.step.fixed_sizes import FixedSizes
from viviane.training.trainer import Trainer

TRACE_FILE: Final = "trace.json.gz"
REPLAYED_FILE: Final = "trace_recorded.json.gz"
_log = get_logger("training.trace")
_WARMUP: Final = 5
_MOST_WARMUP: Final = 40
"""Maximum number of steps to wait for the first replay, if training captures steps."""


@dataclass(frozen=True)
class Replayed:
    """A trace of replayed steps.

    Args:
        timeline: the steps; each kernel's path is its kind.
        file: the trace file.
        time: device time of the steps.
        num_replays: number of traced steps that were replays.
    """

    timeline: Timeline
    file: Path
    time: DeviceTime
    num_replays: int


@dataclass(frozen=True)
class Recorded:
    """A trace of eager steps, and the step time without the profiler.

    Args:
        timeline: the eager steps.
        file: the trace file, for Perfetto or chrome://tracing.
        plain_ms: milliseconds per step without the profiler, replayed if training replays.
        batch_size, batch_bytes: rows and bytes of this process's last batch.
        replayed: the trace of replays; None if training does not replay steps.
    """

    timeline: Timeline
    file: Path
    plain_ms: float
    batch_size: int
    batch_bytes: int
    replayed: Replayed | None = None


def record_trace(trainer: Trainer, data: Dataset, folder: str | Path, steps: int = 5) -> Recorded | None:
    """Train some steps, record the last of them, and write the traces to a folder.

    After a few warm-up steps, `steps` steps are timed without the profiler, and as many are recorded, repeating the
    data as needed. If training replays steps, replays are timed and recorded, and then `steps` eager steps, whose
    kernels are attributed to named ranges. The weights of the trainer are updated. All processes call it, and rank 0
    records; the others return None.

    Args:
        trainer: its module is trained.
        data: the rows, read as `fit` reads them.
        folder: receives trace.json.gz, and trace_recorded.json.gz of replays.
        steps: number of steps to record.

    Raises:
        ConfigError: `steps` is below 1; the solver requires a CUDA graph but the step cannot be captured.
        DataError: the data has no complete batch.
        NumericsError, KeyRangeError: see `TrainStep`.

    Example:
        >>> import tempfile
        >>> from viviane.config import SGD, Solver
        >>> from viviane.data import write_dataset
        >>> from viviane.schema import Schema
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x", "dim": 2}])
        >>> class Linear(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 1)
        ...     def forward(self, batch):
        ...         return self.layer(batch.dense)
        >>> folder = tempfile.mkdtemp()
        >>> data = write_dataset(folder + "/train", schema, [{"y": [0, 1], "x": [[0.0, 1.0], [1.0, 0.0]]}])
        >>> trainer = Trainer(Linear(), schema, Solver(batch_size=2, device="cpu"), SGD())
        >>> recorded = record_trace(trainer, data, folder, steps=2)
        >>> len(recorded.timeline.steps), [row.path for row in recorded.timeline.rows()][:2]
        (2, [('read',), ('check input',)])
    """
    if steps < 1:
        raise ConfigError("a trace needs at least one step", value=steps, where="steps")
    trainer.check_schema(data)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    solver, device = trainer.solver, trainer.device
    feed = DeviceFeed.open(
        data, solver.batch_size, device, trainer.group, shuffle=solver.shuffle, seed=solver.seed,
        drop_last=solver.drop_last, shuffle_on=solver.shuffle_on,
    )  # fmt: skip
    if not len(data):
        raise DataError("the data set has no rows", where=str(data.path))
    if not len(feed):
        raise DataError("the data set has no complete batch", where=str(data.path), fix="use a smaller batch_size")
    trainer.module.train()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else describe()
    with trainer.switches(), feed:
        run = _Steps(trainer, feed)
        if trainer.precision is None:
            trainer.choose_precision([run.next_batch()])
        run.warm_up()
        plain_ms = run.timed(steps)
        replayed = run.replayed(steps, target / REPLAYED_FILE, name)
        with _named_modules(trainer):  # on all ranks: with hooks no rank replays
            run.record(steps, target / TRACE_FILE)
        run.end()
    if trainer.group.rank:
        return None
    timeline = Timeline.load(target / TRACE_FILE, name)
    return Recorded(timeline, target / TRACE_FILE, plain_ms, run.batch.size, run.batch.num_bytes, replayed)


def profile_steps(step: Callable[[], object], count: int, file: Path, device: torch.device) -> None:
    """Run some steps under the profiler and write its trace, which `Timeline.load` reads.

    Args:
        step: runs one step.
        count: number of steps.
        file: the trace file, JSON; compressed if the name ends in .gz.
        device: the device to record, if it is a GPU.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Record the ranges of the reader's threads, too.
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with recording(), profile(activities=activities, experimental_config=settings, acc_events=True) as profiler:
        for _ in range(count):
            with time_range(STEP):
                step()
        _wait(device)
    profiler.export_chrome_trace(str(file))


class _Steps:
    """Trains one step after another as `fit` does.

    Args:
        trainer: the trainer.
        feed: feed of the batches.
    """

    batch: Batch

    def __init__(self, trainer: Trainer, feed: DeviceFeed) -> None:
        self.trainer, self.feed = trainer, feed
        self.captured = trainer.stepper.captured
        self.sizes = FixedSizes(trainer.stepper, trainer.schema, feed)
        self.replays = False
        feed.read_on(sys.maxsize)
        self._batches = self._endless()

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from self.feed

    def next_batch(self) -> Batch:
        """Return a batch; once steps are replayed, a full one: a shorter batch has another graph, or none."""
        batch = next(self._batches)
        while self.replays and len(self.feed) > 1 and not self.feed.is_whole:
            batch = next(self._batches)
        return batch

    def step(self) -> None:
        """Train on the next batch."""
        self.batch = self.next_batch()
        self.sizes.follow()
        self.trainer.train_step(self.batch)

    def warm_up(self) -> None:
        """Train a few steps; if steps are captured, until one is replayed or the maximum is reached."""
        for done in range(_MOST_WARMUP):
            before = self.captured.num_replays
            self.step()
            self.replays = self.captured.num_replays > before
            if done + 1 >= _WARMUP and (self.replays or self.captured.reason is not None):
                return

    def timed(self, steps: int) -> float:
        """Return the milliseconds per step without the profiler."""
        _wait(self.trainer.device)
        start = perf_counter()
        for _ in range(steps):
            self.step()
        _wait(self.trainer.device)
        return (perf_counter() - start) * 1e3 / steps

    def replayed(self, steps: int, file: Path, device: str) -> Replayed | None:
        """Record replays, with one more before and after; None if none is replayed, or on ranks other than 0."""
        if not self.replays:
            return None
        before = self.captured.num_replays
        self.record(steps + 2, file)
        count = self.captured.num_replays - before
        if self.trainer.group.rank:
            return None
        timeline = Timeline.load(file, device)
        time = device_time(timeline)
        if time is None:
            _log.warning("the profiler recorded no kernels for some of the replays: %s", file)
            return None
        return Replayed(by_kind(timeline), file, time, count)

    def record(self, steps: int, file: Path) -> None:
        """Train some eager steps; rank 0 writes their trace."""
        if self.trainer.group.rank:
            for _ in range(steps):
                self.step()
        else:
            profile_steps(self.step, steps, file, self.trainer.device)
        self.trainer.settle()

    def end(self) -> None:
        """Finish as `fit` does."""
        self.sizes.end()
        if self.trainer.group.size > 1:
            self.captured.release()


@contextmanager
def _named_modules(trainer: Trainer) -> Iterator[None]:
    """Name ranges for the module's parts: lookups and direct submodules."""
    tables = {id(one): f"lookup {name}" for name, one in trainer.stepper.collections.items()}
    layers = {id(one): f"layer {name}" for name, one in trainer.module.named_children() if id(one) not in tables}
    named = layers | tables
    hooks, opened = [], []

    def begin(module: nn.Module, _: Any) -> None:
        opened.append(time_range(named[id(module)]))
        opened[-1].__enter__()

    def end(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    for one in trainer.module.modules():
        if id(one) in named:
            hooks += [one.register_forward_pre_hook(begin), one.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Record some steps of training with torch's profiler, in ranges that have names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from viviane.core.machine import describe
from viviane.core.ranges import recording, time_range
from viviane.data import Dataset
from viviane.training.feed import DeviceFeed
from viviane.training.timeline import STEP, Timeline
from viviane.training.trainer import Trainer

TRACE_FILE: Final = "trace.json.gz"
_WARMUP: Final = 5


@dataclass(frozen=True)
class Recorded:
    """A trace, and what the steps took without it.

    Args:
        timeline: the steps.
        file: the trace itself, for Perfetto or chrome://tracing.
        plain_ms: milliseconds of a step without the profiler.
        batch_size, batch_bytes: rows and bytes of this process's last batch.
    """

    timeline: Timeline
    file: Path
    plain_ms: float
    batch_size: int
    batch_bytes: int


def record_trace(trainer: Trainer, data: Dataset, folder: str | Path, steps: int = 5) -> Recorded | None:
    """Train some steps, record the last of them, and write the trace into a folder.

    A few steps warm up, `steps` are timed without the profiler and `steps` with it, over the data as often as it takes.
    The trainer's weights move. Of several processes all call it, and rank 0 records; the others return None.

    Args:
        trainer: whose module is trained.
        data: rows, read as `fit` reads them.
        folder: where trace.json.gz goes.
        steps: to record.

    Raises:
        ConfigError: no steps; the data gives no batch.

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
        drop_last=solver.drop_last,
    )  # fmt: skip
    if not len(feed):
        raise DataError("the data set gives no batch", where=str(data.path), fix="use a smaller batch_size")
    trainer.module.train()
    with trainer.switches(), feed:
        batches = _endless(feed)
        if trainer.precision is None:
            trainer.choose_precision([next(batches)])
        for _ in range(_WARMUP):
            _step(trainer, batches)
        plain_ms = _timed(trainer, batches, steps)
        if trainer.group.rank:
            for _ in range(steps):
                _step(trainer, batches)
            return None
        batch = _record(trainer, batches, steps, target / TRACE_FILE)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else describe()
    timeline = Timeline.load(target / TRACE_FILE, name)
    return Recorded(timeline, target / TRACE_FILE, plain_ms, batch.size, batch.num_bytes)


def _endless(feed: DeviceFeed) -> Iterator[Batch]:
    feed.read_on(sys.maxsize)
    while True:
        yield from feed


def _step(trainer: Trainer, batches: Iterator[Batch]) -> Batch:
    with time_range(STEP):
        batch = next(batches)
        trainer.train_step(batch)
    return batch


def _timed(trainer: Trainer, batches: Iterator[Batch], steps: int) -> float:
    """Return the milliseconds of a step."""
    _wait(trainer.device)
    start = perf_counter()
    for _ in range(steps):
        _step(trainer, batches)
    _wait(trainer.device)
    return (perf_counter() - start) * 1e3 / steps


def _record(trainer: Trainer, batches: Iterator[Batch], steps: int, file: Path) -> Batch:
    activities = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # The reader's threads have ranges, too.
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        _named_modules(trainer),
        recording(),
        profile(activities=activities, experimental_config=settings, acc_events=True) as profiler,
    ):
        for _ in range(steps):
            batch = _step(trainer, batches)
        _wait(trainer.device)
    profiler.export_chrome_trace(str(file))
    return batch


@contextmanager
def _named_modules(trainer: Trainer) -> Iterator[None]:
    """Let the module's parts be ranges: lookups, and the layers that the module itself holds."""
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

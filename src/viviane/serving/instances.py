"""Modules that compute: as many requests at a time as there are instances, each in the thread that asks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.serving.loading import LoadedModel
from viviane.serving.settings import SessionSettings
from viviane.training.dense_state import collections_of
from viviane.training.objective import Objective
from viviane.training.precision import Precision


class Instance(Protocol):
    """Computes the predictions of one batch at a time."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Return predictions, (B, L), float32; B is at least 1."""
        ...


class EagerInstance:
    """Runs the module as training's evaluation does, operation by operation.

    Args:
        module: in eval mode.
        lock: held while the module runs, where modules of several instances may not run side by side.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        precision: Precision,
        device: torch.device,
        num_threads: int,
        lock: threading.Lock | None,
    ) -> None:
        self._module, self._objective, self._precision, self._device = module, objective, precision, device
        self._num_threads, self._lock = num_threads, lock
        self._collections = list(collections_of(module).values())

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Return predictions, (B, L)."""
        if self._lock is None:
            return self._run(batch)
        with self._lock:
            return self._run(batch)

    def _run(self, batch: Batch) -> NDArray[np.float32]:
        with torch_threads(self._num_threads), torch.no_grad():
            with self._precision.context(self._device):
                output = self._module(batch.to(self._device))
            scores = self._objective.predictions(output, batch.size).float().cpu()
        for collection in self._collections:
            collection.check()
        found: NDArray[np.float32] = scores.numpy()
        return found


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute on so many threads in this thread."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Instances:
    """The instances of a session; a request takes a free one, or waits for it."""

    def __init__(self, model: LoadedModel, settings: SessionSettings) -> None:
        precision = model.trained_in if settings.precision == "model" else Precision(settings.precision)
        if precision.name == "fp16" and model.device.type == "cpu" and not _has_cpu_fp16():
            raise ConfigError("this torch computes no fp16 on the CPU", value="fp16", allowed="fp32, bf16")
        precision.check(model.device)
        self.precision = precision
        lock = threading.Lock() if settings.instances > 1 and model.has_dynamic_tables() else None
        self._free: queue.LifoQueue[Instance] = queue.LifoQueue()
        for number in range(settings.instances):
            module = model.module if number == 0 else model.replica()
            self._free.put(EagerInstance(module, model.objective, precision, model.device, settings.num_threads, lock))

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Return predictions, (B, L)."""
        instance = self._free.get()
        try:
            return instance.run(batch)
        finally:
            self._free.put(instance)


def _has_cpu_fp16() -> bool:
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
    except RuntimeError:
        return False
    return True

"""Modules that compute: as many requests at a time as there are instances, each in the thread that asks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Batch, Layout
from viviane.core.errors import ConfigError
from viviane.model.module import GraphModule
from viviane.ops.packing_ahead import PackedWeights
from viviane.serving.batches import cut, random_batch
from viviane.serving.forward import Forward
from viviane.serving.graphs import graph_instance, graphs_prevented
from viviane.serving.loading import LoadedModel
from viviane.serving.program import Program, prevented
from viviane.serving.program_steps import Packed
from viviane.serving.settings import SessionSettings
from viviane.training.step.precision import Precision

_COMPARED: Final = (1, 33)
"""Batch sizes for which a program has to give the bits of the module before it is used."""
_ROWS_PER_THREAD: Final = 64
"""Fewest rows that are worth a thread."""


class Instance(Protocol):
    """Computes the predictions of one batch at a time."""

    def run(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        """Return predictions, (B, L), float32; B is at least 1.

        Args:
            batch: rows without labels.
            checked: the ids are known to be in range.
        """
        ...


class EagerInstance:
    """Runs the module as training's evaluation does, operation by operation.

    Args:
        lock: held while the module runs, where modules of several instances may not run side by side.
    """

    def __init__(self, forward: Forward, num_threads: int, lock: threading.Lock | None) -> None:
        self._forward, self._num_threads = forward, num_threads
        self._lock = lock or nullcontext()

    def run(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        """Return predictions, (B, L)."""
        with self._lock, torch_threads(self._num_threads), torch.no_grad():
            scores = self._forward(batch.to(self._forward.device)).cpu()
            self._forward.check()
        found: NDArray[np.float32] = scores.numpy()
        return found


class ProgramInstance:
    """Runs the module as a program, on the CPU; where a key is out of range, eagerly, so that it is refused by name.

    Args:
        forward: the module operation by operation.
        programs: one for each thread; rows are shared out, unless a layer is called between two native calls.
    """

    def __init__(self, forward: Forward, programs: Sequence[Program], num_threads: int) -> None:
        self._forward, self._program, self._num_threads = forward, programs[0], num_threads
        self._programs = programs
        self._pool = ThreadPoolExecutor(num_threads) if len(programs) > 1 else None

    def run(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        """Return predictions, (B, L)."""
        if not batch.one_hot.is_cpu:
            batch = batch.to("cpu")
        program = self._program
        if not program.calls_torch:
            scores = program(batch) if self._pool is None else self._on_threads(batch, self._pool)
            if scores is not None:
                return scores
        with torch_threads(self._num_threads), torch.no_grad():
            scores = program(batch) if program.calls_torch else None
            found: NDArray[np.float32] = self._forward(batch).numpy() if scores is None else scores
        return found

    def _on_threads(self, batch: Batch, pool: ThreadPoolExecutor) -> NDArray[np.float32] | None:
        share = max(_ROWS_PER_THREAD, -(-batch.size // len(self._programs)))
        if batch.size <= share:
            return self._program(batch)
        parts = [cut(batch, first, first + share) for first in range(0, batch.size, share)]
        found = list(pool.map(lambda program, part: program(part), self._programs, parts))
        whole = [one for one in found if one is not None]
        return np.concatenate(whole) if len(whole) == len(found) else None

    def agrees(self, batch: Batch) -> bool:
        """Whether it gives the bits of the module."""
        with torch_threads(self._num_threads), torch.no_grad():
            scores = self._program(batch)
            return scores is not None and np.array_equal(scores, self._forward(batch).numpy())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute on this many threads in this thread."""
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
        self.count = count = settings.instances or (2 if model.device.type == "cuda" else 1)
        why = "cuda_graphs is off" if settings.cuda_graphs is False else graphs_prevented(model)
        if settings.cuda_graphs is True and why is not None:
            fix = 'set cuda_graphs="auto", which runs such a model without them'
            raise ConfigError("the forward pass cannot be captured in CUDA graphs", value=why, fix=fix)
        self.execution = "cuda graphs" if why is None else f"eager: {why}"
        self._free: queue.SimpleQueue[Instance] = queue.SimpleQueue()
        for instance in self._programs(model, settings, count) or self._make(model, settings, count, why is None):
            self._free.put(instance)

    def _programs(self, model: LoadedModel, settings: SessionSettings, count: int) -> list[Instance]:
        """Make instances that run programs, or none: then `execution` has the reason.

        Raises:
            ConfigError: layers in 8 bits, which only programs have.
        """
        rounds = settings.layer_dtype == "int8"
        if rounds:
            self._check_int8(model)
        if model.device.type != "cpu":
            return []
        layout = Layout.of(model.schema)
        why = "dense layers are not in fp32" if self.precision.name != "fp32" else prevented(model.module, layout)
        if why is None:
            found = self._program_instances(model, layout, settings, count, rounds)
            if rounds:
                self.execution = "program, layers of 8 bits"
                return [*found]
            if all(found[0].agrees(random_batch(model.schema, size)) for size in _COMPARED):
                self.execution = "program"
                return [*found]
            why = "this build of torch rounds otherwise"
        self.execution = f"eager: {why}"
        return []

    def _check_int8(self, model: LoadedModel) -> None:
        what, fix = "layers cannot be computed in 8 bits", 'set layer_dtype="model"'
        if model.device.type != "cpu":
            raise ConfigError(
                what,
                value=model.device,
                allowed="a CPU",
                fix=f'set precision="bf16", which is faster on a GPU, or {fix}',
            )
        from viviane.ops.linear.cpu_int8 import reason_against_int8

        if self.precision.name != "fp32":
            raise ConfigError(what, value=f"precision {self.precision.name!r}", allowed="fp32", fix=f"set it, or {fix}")
        why = prevented(model.module, Layout.of(model.schema)) or reason_against_int8()
        if why is not None:
            raise ConfigError(what, value=why, fix=fix)

    def _program_instances(
        self, model: LoadedModel, layout: Layout, settings: SessionSettings, count: int, rounds: bool
    ) -> list[ProgramInstance]:
        wide = any(column.dtype == "int64" for column in model.schema.one_hot)
        id_dtype = torch.int64 if wide else torch.int32
        found, packed = [], Packed()
        for number in range(count):
            module = cast(GraphModule, model.module if number == 0 else model.replica())
            forward = Forward(module, model.objective, self.precision, model.device)
            programs = [Program(module, layout, id_dtype, forward, packed, rounds_layers=rounds)]
            more = 0 if programs[0].calls_torch else settings.num_threads - 1
            programs += [Program(module, layout, id_dtype, forward, packed, rounds_layers=rounds) for _ in range(more)]
            found.append(ProgramInstance(forward, programs, settings.num_threads))
        return found

    def _make(self, model: LoadedModel, settings: SessionSettings, count: int, graphs: bool) -> Iterator[Instance]:
        if graphs:
            packed: PackedWeights = {}
            for number in range(count):
                most = settings.batch_limit("cuda")
                yield graph_instance(model, self.precision, most, packed, first=number == 0)
            return
        lock = threading.Lock() if count > 1 and model.has_dynamic_tables() else None
        for number in range(count):
            module = model.module if number == 0 else model.replica()
            forward = Forward(module, model.objective, self.precision, model.device)
            yield EagerInstance(forward, settings.num_threads, lock)

    def run(self, batch: Batch, *, checked: bool) -> NDArray[np.float32]:
        """Return predictions, (B, L); `checked`: ids are known to be in range."""
        instance = self._free.get()
        try:
            return instance.run(batch, checked)
        finally:
            self._free.put(instance)


def _has_cpu_fp16() -> bool:
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
    except RuntimeError:
        return False
    return True

"""Forward passes captured in CUDA graphs, from ids in page-locked memory to probabilities in page-locked memory.

A slot has a graph for each of a ladder of batch sizes, buffers that they share, and a stream of its own, so that as
many requests are in flight as there are slots. A batch is padded to the next size of the ladder; a graph copies its
inputs in with one copy, and its results out with one. Large batches with bags, and batches on the GPU, run eagerly:
launches cost them little, and packing bags would cost more.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Batch
from viviane.model.module import GraphModule
from viviane.ops.packing_ahead import PackedWeights, constant_weights
from viviane.serving.forward import Forward
from viviane.serving.id_ranges import IdRanges
from viviane.serving.loading import LoadedModel
from viviane.serving.static_inputs import HostInputs, InputLayout
from viviane.training.precision import Precision

_WARM_UPS: Final = 2
_OWN_COPY: Final = 4096
"""Rows from which inputs are copied by a call of its own, straight from page-locked memory where they are there."""
PART: Final = 16_384
"""Rows above which a request is computed in parts."""
_one_capture = threading.Lock()  # torch's allocator takes one capture at a time


def ladder(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 8, 32, and powers of two from 64 on.

    Example:
        >>> ladder(300)
        (1, 8, 32, 64, 128, 256, 300)
    """
    sizes = [1, 8, 32]
    while sizes[-1] < most:
        sizes.append(64 if sizes[-1] == 32 else 2 * sizes[-1])
    return (*(size for size in sizes if size < most), most)


class GraphSlot:
    """Graphs of all sizes, and the buffers and the stream of one request in flight.

    Args:
        sizes: rising.
        packed: weights that all slots share, packed once.
    """

    def __init__(self, forward: Forward, layout: InputLayout, sizes: Sequence[int], packed: PackedWeights) -> None:
        self._forward, self._packed = forward, packed
        self._layout, self.sizes = layout, tuple(sizes)
        self._stream = torch.cuda.Stream(forward.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._host = torch.zeros(layout.num_bytes(self.sizes[-1]), dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros_like(self._host, device=forward.device)
        self._views = {size: layout.views(self._device, size) for size in self.sizes}
        self._inputs = {size: HostInputs(layout, self._host, size) for size in self.sizes}
        self._results: dict[int, Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        with _one_capture:
            for size in reversed(self.sizes):  # the largest first: the others fit into its memory
                self._capture(size)
        self._read = {size: result.numpy() for size, result in self._results.items()}

    def _capture(self, size: int) -> None:
        batch = self._layout.batch(self._views[size], size)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._forward.device))
        with torch.cuda.stream(self._stream), torch.no_grad(), constant_weights(self._packed):
            for _ in range(_WARM_UPS):
                scores = self._forward(batch)
            self._results[size] = torch.zeros(scores.shape, dtype=torch.float32, pin_memory=True)
            self._forward.check()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                if size < _OWN_COPY:
                    self._copy_in(size)
                self._results[size].copy_(self._forward(batch), non_blocking=True)
        self._stream.synchronize()
        self._graphs[size] = graph

    def _copy_in(self, size: int) -> None:
        num_bytes = self._layout.num_bytes(size)
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)

    def begin(self, batch: Batch, start: int, stop: int) -> int:
        """Launch the forward pass of rows [start, stop) of a batch; returns the captured size.

        A batch in page-locked memory has to stay as it is until `finish`.
        """
        size = self.sizes[bisect_left(self.sizes, stop - start)]
        direct = size >= _OWN_COPY and batch.dense.is_pinned() and batch.one_hot.is_pinned()
        if not direct:
            self._inputs[size].fill(batch, start, stop)
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            if direct:
                self._copy_directly(batch, start, stop, size)
            elif size >= _OWN_COPY:
                self._copy_in(size)
            self._graphs[size].replay()
        finally:
            torch.cuda.set_stream(before)
        return size

    def _copy_directly(self, batch: Batch, start: int, stop: int, size: int) -> None:
        views = self._views[size]
        for name, given in (("dense", batch.dense), ("one_hot", batch.one_hot)):
            if given.shape[1]:
                views[name][: stop - start].copy_(given[start:stop], non_blocking=True)

    def begin_eagerly(self, batch: Batch) -> Tensor:
        """Launch the forward pass of a batch on the current stream; returns its scores on the device."""
        with torch.no_grad(), constant_weights(self._packed):
            return self._forward(batch.to(self.device, non_blocking=True))

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._forward.device

    def finish(self, size: int, count: int) -> NDArray[np.float32]:
        """Wait for what `begin` launched, and return the scores, (count, L)."""
        self._stream.synchronize()
        found: NDArray[np.float32] = self._read[size][:count].copy()
        return found


class GraphInstance:
    """Computes one request at a time on a GPU; a large one in parts, where one slot copies while the other computes.

    Args:
        slots: with the same sizes.
        ranges: of ids, checked while the GPU computes, which reads zeros for ids out of range.
        part: most rows of a part.
    """

    def __init__(self, slots: Sequence[GraphSlot], ranges: IdRanges, part: int) -> None:
        self._slots, self._ranges, self._part = slots, ranges, part

    def run(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        """Return predictions, (B, L)."""
        on_device = batch.dense.is_cuda
        if on_device and batch.device != self._slots[0].device:
            batch, on_device = batch.to("cpu"), False
        if on_device or (batch.bags and batch.size >= _OWN_COPY):
            return self._run_eagerly(batch, checked)
        found: list[NDArray[np.float32]] = []
        waiting: list[tuple[GraphSlot, int, int]] = []
        try:
            for number, start in enumerate(range(0, batch.size, self._part)):
                stop = min(batch.size, start + self._part)
                if len(waiting) == len(self._slots):
                    slot, captured, count = waiting.pop(0)
                    found.append(slot.finish(captured, count))
                slot = self._slots[number % len(self._slots)]
                waiting.append((slot, slot.begin(batch, start, stop), stop - start))
            if not checked:
                self._ranges.check(batch)
        finally:
            found += [slot.finish(captured, count) for slot, captured, count in waiting]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _run_eagerly(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        scores = self._slots[0].begin_eagerly(batch)
        if not checked:
            self._ranges.check(batch)
        result: NDArray[np.float32] = scores.cpu().numpy()
        return result


def graph_instance(
    model: LoadedModel, precision: Precision, most: int, packed: PackedWeights, *, first: bool
) -> GraphInstance:
    """Capture the graphs of one instance.

    Args:
        most: the largest batch.
        packed: weights that all instances share.
        first: it may use the model's own module; others use replicas.
    """
    layout, part = InputLayout(model.schema), min(most, PART)
    slots = []
    for turn in range(2 if most > part else 1):
        module = model.module if first and not turn else model.replica()
        forward = Forward(module, model.objective, precision, model.device)
        slots.append(GraphSlot(forward, layout, ladder(part), packed))
    return GraphInstance(slots, IdRanges(model.schema, model.strict_ids), part)


def graphs_prevented(model: LoadedModel) -> str | None:
    """Say why a model's forward pass cannot be captured, or None."""
    if model.device.type != "cuda":
        return "the model is on the CPU"
    if model.has_dynamic_tables():
        return "a dynamic table finds the rows of its keys eagerly"
    if not isinstance(model.module, GraphModule):
        return "the model is a torch module of its own"
    bags = {column.name for column in model.schema.bags if column.hotness is None}
    if read := sorted(bags & model.module.id_columns):
        return f"a layer reads the ids of bags of varying length: {', '.join(read)}"
    return InputLayout.prevented(model.schema)

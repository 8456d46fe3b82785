"""Forward passes captured in CUDA graphs, from ids in page-locked memory to probabilities in page-locked memory.

A slot has a graph for each of a ladder of batch sizes, buffers that they share, and a stream of its own, so that as
many requests are in flight as there are slots. A batch is padded to the next size of the ladder; one kernel of a graph
reads its inputs from page-locked memory, and one writes its results there. Large batches with bags, and batches on the
GPU, run eagerly: launches cost them little, and packing bags would cost more.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import KeyRangeError
from viviane.model.module import GraphModule
from viviane.ops.capture import without_branches
from viviane.ops.copies import Refill
from viviane.ops.key_rows import trusted_keys
from viviane.ops.packing_ahead import PackedWeights, constant_weights
from viviane.serving.forward import Forward
from viviane.serving.id_ranges import IdRanges
from viviane.serving.launching import attach, copy_in, graph_launcher
from viviane.serving.loading import LoadedModel
from viviane.serving.page_locked import device_view
from viviane.serving.static_inputs import HostInputs, InputLayout, is_readable
from viviane.training.step.precision import Precision

_WARM_UPS: Final = 2
_CHECKED_BY_HOST: Final = 64
"""Rows up to which the host checks ids while the GPU computes: kernels that report them would take longer."""
_OWN_COPY: Final = 4096
"""Rows from which the copy engine brings inputs in, beside what another slot computes; fewer are read by a kernel."""
_LARGE_BAGS: Final = 4096
"""Rows from which batches with bags run eagerly."""
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

    A graph reads the inputs from the addresses in `_words`, page-locked memory that the host writes before a replay,
    and writes scores, and whether a key was out of range, to page-locked memory.

    Args:
        sizes: rising.
        packed: weights that all slots share, packed once.
    """

    def __init__(self, forward: Forward, layout: InputLayout, sizes: Sequence[int], packed: PackedWeights) -> None:
        self._forward, self._packed = forward, packed
        self._layout, self.sizes = layout, tuple(sizes)
        device, most = forward.device, self.sizes[-1]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._queue: int = self._stream.cuda_stream
        self._pool = torch.cuda.graph_pool_handle()
        self._host = torch.zeros(layout.num_bytes(most), dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros_like(self._host, device=device)
        self._inputs = {size: HostInputs(layout, self._host, size) for size in self.sizes}
        names = [field.name for field in layout.fields if field.width]
        self._places = [names.index(name) if name in names else -1 for name in ("dense", "one_hot")]
        words = torch.zeros(len(names), dtype=torch.int64, pin_memory=True)
        flags = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._words, self._flags = words.numpy(), flags.numpy()
        self._words_there, self._flags_there = device_view(words, device), device_view(flags, device)
        self._locked: Callable[[], Batch | None] = lambda: None
        """Gives the batch in page-locked memory that was read last."""
        self._readable: set[tuple[int, int]] = set()
        """First rows and sizes of its parts that can be read where they are."""
        self._graphs: dict[int, _Captured] = {}
        with _one_capture:
            for size in reversed(self.sizes):  # the largest first: the others fit into its memory
                self._graphs[size] = self._capture(size, names)

    def _capture(self, size: int, names: Sequence[str]) -> _Captured:
        views = self._layout.views(self._device, size)
        batch = self._layout.batch(views, size)
        staged = self._layout.views(self._host, size)
        refill = Refill([views[name] for name in names])
        own_words = refill.words([staged[name] for name in names])
        self._words[:] = own_words
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._forward.device))
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            for context in (torch.no_grad(), constant_weights(self._packed), without_branches()):
                stack.enter_context(context)
            if size <= _CHECKED_BY_HOST:
                stack.enter_context(trusted_keys())
            for _ in range(_WARM_UPS):
                refill.fill(self._words_there)
                scores = self._forward(batch)
            results = torch.zeros(scores.shape, dtype=torch.float32, pin_memory=True)
            results_there = device_view(results, self._forward.device)
            self._forward.check()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                if size < _OWN_COPY:
                    refill.fill(self._words_there)
                # Written by kernels: a node that copies would begin 5 us after the kernel before it.
                self._forward.write(batch, results_there, None if size <= _CHECKED_BY_HOST else self._flags_there)
        self._stream.synchronize()
        kept = (batch, refill, results, results_there)
        launch = graph_launcher(graph, self._stream)
        return _Captured(launch, np.array(own_words), results.numpy(), views, staged, (graph, *kept))

    def begin(self, batch: Batch, start: int, stop: int) -> int:
        """Launch the forward pass of rows [start, stop) of a batch on the host; returns the captured size.

        A batch in page-locked memory has to stay as it is until `finish`.
        """
        attach(self._forward.device)
        count = stop - start
        size = self.sizes[bisect_left(self.sizes, count)]
        captured, large = self._graphs[size], size >= _OWN_COPY
        direct = size > _CHECKED_BY_HOST and self._can_be_read(batch, start, count if large else size)
        if not direct:
            self._inputs[size].fill(batch, start, stop)
        if large:
            self._copy_in(captured, batch if direct else None, start, stop)
        elif direct:
            self._point_to(batch, start)
        else:
            self._words[:] = captured.own_words
        captured.launch()
        return size

    def _can_be_read(self, batch: Batch, start: int, size: int) -> bool:
        """Whether a GPU can read rows of a batch from where they are; one that is used again is asked about once."""
        if self._locked() is batch and (start, size) in self._readable:
            return True
        if batch.bags or not all(is_readable(one, start, size) for one in (batch.dense, batch.one_hot)):
            return False
        if self._locked() is not batch:
            if not all(one.is_pinned() for one in (batch.dense, batch.one_hot) if one.shape[1]):
                return False
            self._locked, self._readable = weakref.ref(batch), set()
        self._readable.add((start, size))
        return True

    def _point_to(self, batch: Batch, start: int) -> None:
        for place, one in zip(self._places, (batch.dense, batch.one_hot), strict=True):
            if place >= 0:
                self._words[place] = one.data_ptr() + start * one.shape[1] * one.element_size()

    def _copy_in(self, captured: _Captured, batch: Batch | None, start: int, stop: int) -> None:
        """Copy rows of a page-locked batch, or what was packed, by the GPU's copy engine."""
        for name, target in captured.inputs.items():
            if not target.shape[1]:
                continue
            own = captured.staged[name] if batch is None else batch.dense if name == "dense" else batch.one_hot
            row = own.shape[1] * own.element_size()
            first = 0 if batch is None else start
            copy_in(target.data_ptr(), own.data_ptr() + first * row, (stop - start) * row, self._queue)

    def finish(self, size: int, count: int) -> NDArray[np.float32]:
        """Wait for what `begin` launched, and return the scores, (count, L)."""
        self._stream.synchronize()
        found: NDArray[np.float32] = self._graphs[size].scores[:count].copy()
        return found

    def found_bad_key(self) -> bool:
        """Whether a replay that has ended read a key that its table refuses; asked once for each."""
        if not self._flags[0]:
            return False
        self._flags[0] = 0
        return True

    def forget_bad_key(self) -> None:
        """Let lookups look for the next one."""
        with suppress(KeyRangeError):
            self._forward.check()

    def run_eagerly(self, batch: Batch) -> NDArray[np.float32]:
        """Run the forward pass operation by operation on the current stream."""
        with torch.no_grad(), constant_weights(self._packed):
            scores: NDArray[np.float32] = self._forward(batch.to(self._forward.device, non_blocking=True)).cpu().numpy()
        self._forward.check()
        return scores


@dataclass(frozen=True)
class _Captured:
    """A graph of one size.

    Args:
        launch: begins a replay on the slot's stream.
        own_words: addresses of the slot's own page-locked inputs.
        scores: page-locked, (B, L).
        inputs, staged: what it reads on the device, and the page-locked memory that large sizes copy from.
        kept: what the graph reads and writes.
    """

    launch: Callable[[], None]
    own_words: NDArray[np.int64]
    scores: NDArray[np.float32]
    inputs: dict[str, Tensor]
    staged: dict[str, Tensor]
    kept: tuple[object, ...]


class GraphInstance:
    """Computes one request at a time on a GPU; a large one in parts, where one slot reads while the other computes.

    Args:
        slots: with the same sizes.
        ranges: of ids, checked by the host in small batches while the GPU computes, which reads zeros for others.
        part: most rows of a part.
    """

    def __init__(self, slots: Sequence[GraphSlot], ranges: IdRanges, part: int) -> None:
        self._slots, self._ranges, self._part = slots, ranges, part

    def run(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        """Return predictions, (B, L)."""
        if batch.dense.is_cuda or (batch.bags and batch.size >= _LARGE_BAGS):
            return self._slots[0].run_eagerly(batch)
        if batch.size <= self._part:
            return self._run_at_once(batch, checked)
        found: list[NDArray[np.float32]] = []
        waiting: list[tuple[GraphSlot, int, int]] = []
        bad = False
        for number, start in enumerate(range(0, batch.size, self._part)):
            stop = min(batch.size, start + self._part)
            slot = self._slots[number % len(self._slots)]
            if len(waiting) == len(self._slots):
                bad |= self._take(waiting, found)
            waiting.append((slot, slot.begin(batch, start, stop), stop - start))
        while waiting:
            bad |= self._take(waiting, found)
        if bad:
            self._name_bad_key(batch)
        return np.concatenate(found)

    def _run_at_once(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        slot, size = self._slots[0], batch.size
        captured = slot.begin(batch, 0, size)
        try:
            if size <= _CHECKED_BY_HOST and not checked:
                self._ranges.check(batch)
        finally:
            found = slot.finish(captured, size)
        if slot.found_bad_key():
            self._name_bad_key(batch)
        return found

    def _name_bad_key(self, batch: Batch) -> None:
        """Raise what is wrong with a row; passes where the key was one of padding."""
        for slot in self._slots:
            slot.forget_bad_key()
        self._ranges.check(batch)

    @staticmethod
    def _take(waiting: list[tuple[GraphSlot, int, int]], found: list[NDArray[np.float32]]) -> bool:
        slot, captured, count = waiting.pop(0)
        found.append(slot.finish(captured, count))
        return slot.found_bad_key()


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
    """Return the reason why a model's forward pass cannot be captured, or None."""
    if model.device.type != "cuda":
        return "the model is on the CPU"
    if model.tables is not None:
        return "its tables are in tiers, which the host looks up"
    if model.has_dynamic_tables():
        return "a dynamic table finds the rows of its keys eagerly"
    if not isinstance(model.module, GraphModule):
        return "the model is a torch module of its own"
    bags = {column.name for column in model.schema.bags if column.hotness is None}
    if read := sorted(bags & model.module.id_columns):
        return f"a layer reads the ids of bags of varying length: {', '.join(read)}"
    return InputLayout.prevented(model.schema)

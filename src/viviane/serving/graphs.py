"""Forward passes captured in CUDA graphs, from ids in page-locked memory to probabilities in page-locked memory.

A slot has a graph for each of a ladder of batch sizes, and buffers that they share. A batch is padded to the next size
of the ladder; one kernel of a graph reads its inputs from page-locked memory, and one writes its results there. A
request of more rows than the largest graph is computed in parts, one in each slot; the copy engine brings their inputs
in while other parts compute. So is a large batch on the GPU whose bags are full. Large batches with bags on the host,
and other batches on the GPU, run eagerly: packing would cost more than launches.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import KeyRangeError
from viviane.model.module import GraphModule
from viviane.ops.capture import forget_branches, join_branches, no_garbage_collection, without_branches
from viviane.ops.cuda_driver import attach, copy_in, graph_launcher
from viviane.ops.key_rows import trusted_keys
from viviane.ops.packing_ahead import PackedWeights, constant_weights
from viviane.serving.forward import Forward
from viviane.serving.id_ranges import IdRanges
from viviane.serving.loading import LoadedModel
from viviane.serving.page_locked import device_view
from viviane.serving.static_inputs import HostInputs, InputFill, InputLayout, is_readable
from viviane.training.step.precision import Precision

_WARM_UPS: Final = 2
_CHECKED_BY_HOST: Final = 64
"""Rows up to which the host checks ids while the GPU computes: kernels that report them would take longer."""
_OVERLAPPED: Final = 2048
"""Rows from which ids are copied beside the first layers; for fewer, a branch costs a graph more than it saves."""
_LANES: Final = 2
"""Parts that compute at a time: products of one and lookups of another take turns on the same multiprocessors."""
_SLOTS: Final = 4
"""Parts in flight: those that do not compute yet have their inputs copied."""
_LEAST_PART: Final = 4096
"""The smallest captured size of a part; smaller parts are padded to it."""
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


class Lane:
    """A stream, and the memory of graphs that are replayed on it, one after another.

    Args:
        copies: the stream of copies from host memory, which lanes share.
    """

    def __init__(self, device: torch.device, copies: torch.cuda.Stream) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.copies = copies


class GraphSlot:
    """Graphs of all sizes, and the buffers of one request, or part of a request, in flight.

    A graph reads the inputs from the addresses in `_words`, page-locked memory that the host writes before a replay;
    from the slot's own page-locked memory, if it is small; or finds them on the device, where the copy engine has put
    them. It writes scores, and whether a key was out of range, to page-locked memory.

    Args:
        lane: where it computes; other slots may share it.
        sizes: rising; of graphs that read their inputs from host memory.
        part_sizes: rising; of graphs that find them on the device.
        packed: weights that all slots share, packed once.
        overlaps: lookups alone read other inputs than dense numbers.
    """

    def __init__(
        self, forward: Forward, layout: InputLayout, lane: Lane, sizes: Sequence[int], part_sizes: Sequence[int],
        packed: PackedWeights, *, overlaps: bool,
    ) -> None:  # fmt: skip
        self._forward, self._packed, self._lane, self._overlaps = forward, packed, lane, overlaps
        self._layout, self.sizes = layout, tuple(sizes)
        self.part_sizes = tuple(part_sizes)
        every = sorted({*sizes, *part_sizes})
        device, most = forward.device, every[-1]
        self._host = torch.zeros(layout.num_bytes(most), dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros_like(self._host, device=device)
        self._inputs = {size: HostInputs(layout, self._host, size) for size in every}
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
        self._arrived, self._ended = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graphs: dict[int, _Captured] = {}
        self._parts: dict[int, _Captured] = {}
        with _one_capture:
            for size in reversed(every):  # the largest first: the others fit into its memory
                if size in self.part_sizes:
                    self._parts[size] = self._capture(size, names, reads_host=False)
                if size in self.sizes:
                    self._graphs[size] = self._capture(size, names, reads_host=True)

    def _capture(self, size: int, names: Sequence[str], *, reads_host: bool) -> _Captured:
        views = self._layout.views(self._device, size)
        batch = self._layout.batch(views, size)
        staged = self._layout.views(self._host, size)
        overlaps = reads_host and self._overlaps and size >= _OVERLAPPED
        own_words = [staged[name].data_ptr() for name in names]
        self._words[:] = own_words
        words = self._words_there
        if size <= _CHECKED_BY_HOST:  # always from the slot's own memory: that it is need not come from the host
            words = torch.tensor(own_words).to(self._forward.device)
        fill = InputFill(views, names, words, overlaps)
        graph, stream = torch.cuda.CUDAGraph(), self._lane.stream
        stream.wait_stream(torch.cuda.current_stream(self._forward.device))
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(stream))
            for context in (torch.no_grad(), constant_weights(self._packed)):
                stack.enter_context(context)
            if not overlaps:
                stack.enter_context(without_branches())
            if size <= _CHECKED_BY_HOST:
                stack.enter_context(trusted_keys())
            for _ in range(_WARM_UPS):
                fill()
                scores = self._forward(batch)
            results = torch.zeros(scores.shape, dtype=torch.float32, pin_memory=True)
            results_there = device_view(results, self._forward.device)
            self._forward.check()
            forget_branches(self._forward.device)  # left by another capture
            stack.enter_context(no_garbage_collection())
            with torch.cuda.graph(graph, pool=self._lane.pool, stream=stream, capture_error_mode="thread_local"):
                if reads_host:
                    fill()
                # Written by kernels: a node that copies would begin 5 us after the kernel before it.
                self._forward.write(batch, results_there, None if size <= _CHECKED_BY_HOST else self._flags_there)
                join_branches(self._forward.device)
        stream.synchronize()
        kept = (batch, fill, results, results_there)
        launch = graph_launcher(graph, stream)
        return _Captured(launch, np.array(own_words), results.numpy(), views, staged, (graph, *kept))

    def run(self, batch: Batch, beside: Callable[[], None] | None) -> NDArray[np.float32]:
        """Return the scores of a batch on the host, (B, L).

        Args:
            beside: is called while the GPU computes.
        """
        attach(self._forward.device)
        count = batch.size
        size = self.sizes[bisect_left(self.sizes, count)]
        captured = self._graphs[size]
        if size <= _CHECKED_BY_HOST:
            self._inputs[size].fill(batch, 0, count)
        elif self._can_be_read(batch, 0, size):
            self._point_to(batch)
        else:
            self._inputs[size].fill(batch, 0, count)
            self._words[:] = captured.own_words
        captured.launch()
        try:
            if beside is not None:
                beside()
        finally:
            self._lane.stream.synchronize()
        found: NDArray[np.float32] = captured.scores[:count].copy()
        return found

    def begin_part(self, batch: Batch, start: int, stop: int) -> Callable[[], NDArray[np.float32]]:
        """Begin the forward pass of rows [start, stop) of a batch on the host, and return what waits for their scores.

        The copy engine brings inputs in, beside what other parts compute. The slot is free again after the wait; a
        batch in page-locked memory has to stay as it is until then.
        """
        attach(self._forward.device)
        count = stop - start
        size = self.part_sizes[bisect_left(self.part_sizes, count)]
        captured, stream, copies = self._parts[size], self._lane.stream, self._lane.copies
        direct = self._can_be_read(batch, start, count)
        if not direct:
            self._inputs[size].fill(batch, start, stop)
        self._copy_in(captured, batch if direct else None, start, stop)
        self._arrived.record(copies)
        stream.wait_event(self._arrived)
        captured.launch()
        return self._scores_of(captured, count)

    def begin_part_on_device(
        self, inputs: Mapping[str, Tensor], start: int, stop: int
    ) -> Callable[[], NDArray[np.float32]]:
        """Do what `begin_part` does for rows of matrices on the device, see `InputLayout.matrices`."""
        attach(self._forward.device)
        count = stop - start
        captured, stream = self._parts[self.part_sizes[bisect_left(self.part_sizes, count)]], self._lane.stream
        stream.wait_stream(torch.cuda.current_stream(self._forward.device))
        with torch.cuda.stream(stream):
            for name, own in inputs.items():
                if own.shape[1]:
                    captured.inputs[name][:count].copy_(own[start:stop])
        captured.launch()
        return self._scores_of(captured, count)

    def _scores_of(self, captured: _Captured, count: int) -> Callable[[], NDArray[np.float32]]:
        self._ended.record(self._lane.stream)

        def scores() -> NDArray[np.float32]:
            self._ended.synchronize()
            found: NDArray[np.float32] = captured.scores[:count].copy()
            return found

        return scores

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

    def _point_to(self, batch: Batch) -> None:
        for place, one in zip(self._places, (batch.dense, batch.one_hot), strict=True):
            if place >= 0:
                self._words[place] = one.data_ptr()

    def _copy_in(self, captured: _Captured, batch: Batch | None, start: int, stop: int) -> None:
        """Copy rows of a page-locked batch, or what was packed, by the GPU's copy engine."""
        for name, target in captured.inputs.items():
            if not target.shape[1]:
                continue
            own = captured.staged[name] if batch is None else batch.dense if name == "dense" else batch.one_hot
            row = own.shape[1] * own.element_size()
            first = 0 if batch is None else start
            queue = self._lane.copies.cuda_stream
            copy_in(target.data_ptr(), own.data_ptr() + first * row, (stop - start) * row, queue)

    def found_bad_key(self) -> bool:
        """Whether a replay that has ended read a key that its table refuses; asked once for each."""
        if not self._flags[0]:
            return False
        self._flags[0] = 0
        return True

    def forget_bad_key(self) -> None:
        """Let lookups look for the next one."""
        with suppress(KeyRangeError):
            self._check()

    def _check(self) -> None:
        """Raise what lookups have found, and empty the records on the stream of replays, which waits for no other."""
        with torch.cuda.stream(self._lane.stream):
            self._forward.check()

    def run_eagerly(self, batch: Batch) -> NDArray[np.float32]:
        """Run the forward pass operation by operation on the current stream."""
        with torch.no_grad(), constant_weights(self._packed):
            scores: NDArray[np.float32] = self._forward(batch.to(self._forward.device, non_blocking=True)).cpu().numpy()
        self._check()
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
    """Computes one request at a time on a GPU; a large one in parts, of which some are copied while others compute.

    Args:
        slots: the first has graphs of all sizes.
        layout: of their inputs.
        ranges: of ids, checked by the host in small batches while the GPU computes, which reads zeros for others.
        part: most rows of a part.
    """

    def __init__(self, slots: Sequence[GraphSlot], layout: InputLayout, ranges: IdRanges, part: int) -> None:
        self._slots, self._layout, self._ranges, self._part = slots, layout, ranges, part

    def run(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        """Return predictions, (B, L)."""
        if batch.dense.is_cuda:
            large = self._slots[0].part_sizes and batch.size >= _LEAST_PART
            inputs = self._layout.matrices(batch) if large else None
            return self._slots[0].run_eagerly(batch) if inputs is None else self._run_parts(batch, inputs)
        if batch.bags and not self._packs_bags(batch, checked):
            return self._slots[0].run_eagerly(batch)
        if batch.size <= self._part:
            checks = batch.size <= _CHECKED_BY_HOST and not checked
            found = self._slots[0].run(batch, (lambda: self._ranges.check(batch)) if checks else None)
            if self._slots[0].found_bad_key():
                self._name_bad_key(batch)
            return found
        return self._run_parts(batch)

    def _packs_bags(self, batch: Batch, checked: bool) -> bool:
        return batch.size < _LARGE_BAGS and (checked or self._layout.has_places_for(batch.bags))

    def _run_parts(self, batch: Batch, inputs: Mapping[str, Tensor] | None = None) -> NDArray[np.float32]:
        """Compute a batch in parts.

        Args:
            inputs: its matrices, if they are on the device.
        """
        waiting: deque[tuple[GraphSlot, Callable[[], NDArray[np.float32]]]] = deque()
        parts: list[NDArray[np.float32]] = []
        bad = False

        def take() -> bool:
            slot, scores = waiting.popleft()
            parts.append(scores())
            return slot.found_bad_key()

        # Slot 0 alone has graphs for a part that is not full: that one comes first.
        bounds = [0, *range(batch.size % self._part or self._part, batch.size + 1, self._part)]
        try:
            for number, (start, stop) in enumerate(pairwise(bounds)):
                if len(waiting) == len(self._slots):
                    bad |= take()
                slot = self._slots[number % len(self._slots)]
                if inputs is None:
                    waiting.append((slot, slot.begin_part(batch, start, stop)))
                else:
                    waiting.append((slot, slot.begin_part_on_device(inputs, start, stop)))
        finally:
            while waiting:
                bad |= take()
        if bad:
            self._name_bad_key(batch)
        return np.concatenate(parts)

    def _name_bad_key(self, batch: Batch) -> None:
        """Raise what is wrong with a row; passes where the key was one of padding."""
        for slot in self._slots:
            slot.forget_bad_key()
        self._ranges.check(batch.to("cpu"))


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
    copies = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
    overlaps = isinstance(model.module, GraphModule) and not model.module.id_columns
    forwards, slots = [], []
    for number in range(min(_SLOTS, -(-most // part))):
        if number < _LANES:
            module = model.module if first and not number else model.replica()
            forward = Forward(module, model.objective, precision, model.device)
            forwards.append((forward, Lane(model.device, copies)))
        forward, lane = forwards[number % _LANES]
        sizes = ladder(part) if number == 0 else ()
        parts = () if most <= part else [size for size in ladder(part) if size >= _LEAST_PART or size == part]
        own_parts = parts if number == 0 else parts[-1:]
        slots.append(GraphSlot(forward, layout, lane, sizes, own_parts, packed, overlaps=overlaps))
    return GraphInstance(slots, layout, IdRanges(model.schema, model.strict_ids), part)


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

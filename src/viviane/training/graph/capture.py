"""Capture of a training step in CUDA graphs, and recovery from a failed capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.embedding.base import LocalCollection
from viviane.ops.capture import URGENT, forget_branches, no_garbage_collection
from viviane.ops.dense_update import Workspace
from viviane.parallel import ShardedCollection
from viviane.training.graph.captured_step import StepStatus, run_captured_step
from viviane.training.graph.controls import Controls
from viviane.training.graph.host_control_block import HostControlBlock
from viviane.training.graph.overlap import OverlappedInput
from viviane.training.graph.static_batch import StaticBatch
from viviane.training.step.precision import Precision
from viviane.training.step.program import TrainStep

_log = get_logger("training.recording")


@dataclass
class CapturedGraph:
    """A captured step.

    Args:
        graph: the step.
        batch: its static batch.
        loss: the tensor of its loss.
        kept: tensors that must live as long as the graph.
        control_block: the values that the host passes to it.
        first: the graph of the input work, which overlaps the previous step's update; None: `graph` includes it.
        input_done: the event that `graph` records after its last read of the batch; None if `first` is None.
    """

    graph: torch.cuda.CUDAGraph
    batch: StaticBatch
    loss: Tensor
    control_block: HostControlBlock
    kept: list[Tensor]
    first: torch.cuda.CUDAGraph | None = None
    input_done: torch.cuda.Event | None = None

    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        """Return all graphs of the step."""
        return [one for one in (self.first, self.graph) if one is not None]


class GraphCapture:
    """Captures steps, all on one stream.

    Args:
        step: the training step.
        num_slots: the maximum number of replays in flight, plus one.
    """

    def __init__(self, step: TrainStep, num_slots: int) -> None:
        self.step = step
        groups = 0 if step.optimizer is None else len(step.optimizer.param_groups)
        means = 0 if step.mean is None else len(step.mean.numbers)
        self._num_slots = num_slots
        follows = step.loss_scale is not None and step.loss_scale.is_dynamic
        rows = num_slots if follows else 1  # with a dynamic loss scale any replay in flight may be skipped
        self.step_status = StepStatus(step.device, Controls(step.device, groups, means, rows), num_slots)
        self.overlap = OverlappedInput(step.device)
        self._separates_input, self._input_graph_is_unused = True, False
        # Compute has priority over concurrent sorts and lookups, which would otherwise fill all multiprocessors first.
        self._stream = torch.cuda.Stream(step.device, priority=URGENT)  # type: ignore[no-untyped-call]

    def record(self, batch: Batch, precision: Precision) -> tuple[CapturedGraph | None, Exception | None]:
        """Capture a step and return it, or the error that prevented it.

        Args:
            batch: an example of the batch shape.
            precision: precision of the dense layers.
        """
        batch.wait()
        made, failure = self._record(batch, precision)
        if not self._separates_input:
            return made, failure
        # All ranks or none have a first graph: its collectives would wait for a rank that has none.
        self._separates_input = not any(self.step.group.gather_data(self._input_graph_is_unused))
        if self._separates_input:
            return made, failure
        for graph in [] if made is None else made.graphs():
            graph.reset()
        return self._record(batch, precision)

    def _record(self, batch: Batch, precision: Precision) -> tuple[CapturedGraph | None, Exception | None]:
        own, optimizer = self.step, self.step.optimizer
        mover = None if optimizer is None else optimizer.mover
        workspace, kept = Workspace(), []
        if own.mean is not None:
            own.mean.hold(self.step_status.controls.means)
        if optimizer is not None and mover is not None:
            mover.device_numbers, mover.gate = self.step_status.controls.group, self.step_status.gate
            kept = [*mover.reserve(optimizer), workspace.reserve(list(own.parameters.values()))]
        if own.sync is not None:  # NCCL opens its connections for sums now, not during the capture
            own.group.all_reduce(torch.zeros_like(self.step_status.flags))
            self._open_peers()
        made, failure = self._capture(batch, precision, workspace, kept)
        if made is None:
            self._restore_device_state()
            return None, failure
        workspace.write()
        if mover is not None:
            made.kept += mover.write()
        return made, None

    def _capture(
        self, batch: Batch, precision: Precision, workspace: Workspace, kept: list[Tensor]
    ) -> tuple[CapturedGraph | None, Exception | None]:
        own = self.step
        static, status = StaticBatch(batch, self._resolved_outside()), self.step_status
        control_block = HostControlBlock(own.device, status.controls.width, static.width, self._num_slots, status.count)
        graph, pools = torch.cuda.CUDAGraph(), [torch.cuda.graph_pool_handle() for _ in range(2)]
        sharded, first, input_done = self._sharded(), None, None

        def fill() -> None:
            control_block.read()
            static.fill(control_block.batch)

        counts = [] if own.optimizer is None else [group["step"] for group in own.optimizer.param_groups]
        own.discard()
        try:
            # The outer context restores the current stream: torch's own does not if a capture fails.
            here = torch.cuda.stream(torch.cuda.current_stream(own.device))
            with no_garbage_collection(), self._through_peers(), static.looked_up(), here:
                if own.mean is None and self._separates_input:  # a mean of rows reads the batch after the update
                    # A module may look up other keys than the batch's, which may not be resolvable.
                    self._input_graph_is_unused = True
                    first = self.overlap.record(sharded, static.batch, fill, pools[0])
                    self._input_graph_is_unused = first is not None
                with torch.cuda.graph(graph, pool=pools[1], stream=self._stream, capture_error_mode="thread_local"):
                    if first is None:
                        fill()
                    else:
                        input_done = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
                    loss = run_captured_step(own, static.batch, precision, status, workspace, control_block, input_done)
        except Exception as error:
            # In some versions of torch the allocator still waits for the end of a failed capture. Until then it frees
            # no memory that two streams have used, such as that of every batch of a feed.
            for pool in pools:
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(static.batch.device.index or 0, pool)
            return None, error
        finally:
            taken = [one.end_ahead() for one in sharded]
            self._input_graph_is_unused = self._input_graph_is_unused and not any(taken)
            own.discard()
            if own.optimizer is not None:
                for group, count in zip(own.optimizer.param_groups, counts, strict=True):
                    group["step"] = count
        return CapturedGraph(graph, static, loss, control_block, kept, first, input_done), None

    def _resolved_outside(self) -> list[LocalCollection]:
        """Return the collections whose lookups begin before a replay."""
        every = self.step.collections.values()
        return [part for one in every for part in one.parts() if part.resolves_before_replay]

    def _sharded(self) -> list[ShardedCollection]:
        return [one for one in self.step.collections.values() if isinstance(one, ShardedCollection)]

    def _open_peers(self) -> None:
        """Let lookups write to peer memory if the solver allows it and the GPUs can access it."""
        setting = self.step.solver.peer_memory
        if setting is False:
            return
        for collection in self._sharded():
            reason = collection.exchanges.open_peers()
            if reason is None:
                _log.info("captured lookups write to peer memory")
                continue
            if setting is True:
                raise self.step.group.mark_reported(ConfigError(
                    "lookups cannot write to peer memory", where="solver.peer_memory",
                    value=reason, fix="set peer_memory='auto', which falls back to NCCL, or remove the cause",
                ))  # fmt: skip
            _log.info("captured lookups are exchanged over NCCL: %s", reason)

    @contextmanager
    def _through_peers(self) -> Iterator[None]:
        with ExitStack() as stack:
            for collection in self._sharded():
                stack.enter_context(collection.exchanges.through_peers())
            yield

    def _restore_device_state(self) -> None:
        """Restore the state of the device after a failed capture."""
        device = self.step.device
        forget_branches(device)
        torch.cuda.synchronize(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        # After a failed capture the generator waits for its end; a generator with a cloned state does not.
        generator.graphsafe_set_state(generator.clone_state())

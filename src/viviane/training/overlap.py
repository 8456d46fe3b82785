"""What a replayed step over several GPUs does before it needs weights, beside the update of the step before.

The batch is copied, its keys become rows, and ids go to their owners: one small kernel after another. None of it needs
weights. So it is a graph of its own, on a stream of its own, which waits for an event in the middle of the step before:
from there on that step reads nothing of its batch (see `TableCollection.settle_rows`).

On one GPU all of it is part of the step: its first layers and the cast of its weights run beside the keys, and would
else hold up the lookups (DLRM-DCNv2 took 1 to 2% longer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from viviane.batch import Batch
from viviane.ops.capture import FIRST, forget_branches, join_branches
from viviane.parallel import ShardedCollection


class OverlappedInput:
    """Runs blocks beside the update of the last replay, on a stream of their own.

    Args:
        device: of the steps. On a CPU blocks run where they stand.
    """

    def __init__(self, device: torch.device) -> None:
        # An update has all its blocks wait for room: what does not go before them comes after all of them.
        self._stream = torch.cuda.Stream(device, priority=FIRST) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._input_done: torch.cuda.Event | None = None

    def reset(self) -> None:
        """Let the next block wait for all of the current stream: the last step was no replay."""
        self._input_done = None

    @contextmanager
    def before(
        self, batch: Batch, input_done: torch.cuda.Event | None, current: torch.cuda.Stream | None
    ) -> Iterator[None]:
        """Run a block before a replay of this batch, which waits for it.

        It runs beside the update of the last replay where the batch says when it is there (`Batch.ready_after`). Who
        calls keeps the batch until the replay is over.

        Args:
            batch: of the replay.
            input_done: which the replay will record where it has read its batch; None: the block is not to run beside
                anything, and so runs on the current stream.
            current: the current stream.
        """
        last, self._input_done = self._input_done, None
        ready = batch.ready
        if self._stream is None or current is None:
            yield
        elif input_done is None:
            if ready is not None:
                current.wait_event(ready)
            yield
        else:
            if last is None or ready is None:
                self._stream.wait_stream(current)
            else:
                self._stream.wait_event(last)
                self._stream.wait_event(ready)
            with self._stream:
                yield
            current.wait_stream(self._stream)
        self._input_done = input_done

    def record(
        self, collections: Sequence[ShardedCollection], batch: Batch, fill: Callable[[], None], pool: Any
    ) -> torch.cuda.CUDAGraph | None:
        """Record how a batch is filled and its keys are resolved; None where no collection does that ahead.

        Args:
            collections: of the module.
            batch: static tensors.
            fill: fills them.
            pool: of the graph's memory, which nobody else uses.
        """
        able = [one for one in collections if one.resolves_ahead]
        if not able:
            return None
        graph = torch.cuda.CUDAGraph()
        forget_branches(batch.device)  # of a graph that somebody else recorded
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            fill()
            for one in able:
                one.resolve_ahead(batch)
            join_branches(batch.device)
        return graph

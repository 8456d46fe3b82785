"""What a replayed step does before it needs weights, beside the update of the step before; and what it tells the host.

Between two replays the batch is copied; over several GPUs its keys become rows, and ids go to their owners: one small
kernel after another. None of it needs weights. So it runs on a stream of its own, which waits for an event in the
middle of the step before: from there on that step reads nothing of its batch (see `TableCollection.settle_rows`).

On one GPU keys stay in the step: its first layers and the cast of its weights run beside them, and would else hold up
the lookups (DLRM-DCNv2 took 1 to 2% longer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from viviane.batch import Batch
from viviane.ops.capture import FIRST, forget_branches, join_branches
from viviane.parallel import ShardedCollection


class BesideUpdate:
    """Runs blocks beside the update of the last replay, on a stream of their own.

    Args:
        device: of the steps. On a CPU blocks run where they stand.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # An update has all its blocks wait for room: what does not go before them comes after all of them.
        self._stream = torch.cuda.Stream(device, priority=FIRST) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._through: torch.cuda.Event | None = None

    def forget(self) -> None:
        """Let the next block wait for all of the current stream: the last step was no replay."""
        self._through = None

    @contextmanager
    def before(self, batch: Batch) -> Iterator[None]:
        """Run a block before a replay of this batch, which waits for it.

        It runs beside the update of the last replay where the batch says when it is there (`Batch.ready_after`).
        """
        if self._stream is None:
            yield
            return
        current, ready = torch.cuda.current_stream(self._device), batch.ready
        if self._through is None or ready is None:
            self._stream.wait_stream(current)
        else:
            self._stream.wait_event(self._through)
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def after(self, through: torch.cuda.Event | None) -> Iterator[None]:
        """Run a block after a replay, which reads what the step has found; the current stream waits for it.

        Args:
            through: recorded by the replay where what it found is there and its batch has been read, of which the next
                block `before` makes use, too; None: at its end.
        """
        self._through = through
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        if through is None:
            self._stream.wait_stream(current)
        else:  # it counts as recorded anew from the replay's launch on
            self._stream.wait_event(through)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, collections: Sequence[ShardedCollection], batch: Batch, pool: Any) -> torch.cuda.CUDAGraph | None:
        """Record how the keys of a batch are resolved for its lookups; None where no collection does so ahead.

        Args:
            collections: of the module.
            batch: static tensors.
            pool: of the graph's memory, which nobody else uses.
        """
        able = [one for one in collections if one.resolves_ahead]
        if not able:
            return None
        graph = torch.cuda.CUDAGraph()
        forget_branches(self._device)  # of a graph that somebody else recorded
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            for one in able:
                one.resolve_ahead(batch)
            join_branches(self._device)
        return graph

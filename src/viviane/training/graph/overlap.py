"""Overlap of a step's input work with the update of the previous step, on several GPUs.

Copying the batch, finding the rows of keys, and input_dist are many small kernels that need no weights. They form a
separate graph on a separate stream. It waits for an event in the middle of the previous step: after that event the
previous step no longer reads its batch (see `TableCollection.settle_rows`).

On one GPU this work stays in the step, where it overlaps the first layers and the cast of weights. Separated, it would
delay the lookups (DLRM-DCNv2 took 1 to 2% longer).
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
    """Runs a step's input work on a side stream, overlapped with the update of the last replay.

    Args:
        device: device of the steps. On a CPU the work runs immediately.
    """

    def __init__(self, device: torch.device) -> None:
        # The blocks of an update queue for all multiprocessors: kernels of lower priority run after all of them.
        self._stream = torch.cuda.Stream(device, priority=FIRST) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._input_done: torch.cuda.Event | None = None

    def reset(self) -> None:
        """Make the next input wait for the complete current stream: the last step was not a replay."""
        self._input_done = None

    @contextmanager
    def before(
        self, batch: Batch, input_done: torch.cuda.Event | None, current: torch.cuda.Stream | None
    ) -> Iterator[None]:
        """Run the enclosed input work before the replay of this batch; the replay waits for it.

        The work overlaps the update of the last replay if the batch has a ready event (`Batch.ready_after`). The caller
        keeps the batch alive until the replay is finished.

        Args:
            batch: batch of the replay.
            input_done: the event that the replay records after its last read of the batch; None: no overlap, the work
                runs on the current stream.
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
        """Capture filling the batch and resolving its keys; return None if no collection can resolve keys in advance.

        Args:
            collections: the sharded collections of the module.
            batch: static tensors of the batch.
            fill: copies the current batch into them.
            pool: memory pool of the graph; not shared.
        """
        able = [one for one in collections if one.resolves_ahead]
        if not able:
            return None
        graph = torch.cuda.CUDAGraph()
        forget_branches(batch.device)  # left by another capture
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            fill()
            for one in able:
                one.resolve_ahead(batch)
            join_branches(batch.device)
        return graph

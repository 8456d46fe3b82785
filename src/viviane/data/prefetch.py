"""Threads that decode row groups and assemble batches ahead of the consumer.

A pool runs two kinds of tasks in the order in which they are handed in: decode one row group into its
window's block, and take one batch's rows out of blocks. Tasks are handed in by the consuming thread, as a
function of how many rows it has taken, so that no thread ever waits for room in a queue: nothing can hang
when the iterator is dropped. A batch task may wait for decode tasks, which always stand before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from viviane.data.block import Block, Rows, Slab
from viviane.data.plan import EpochPlan, Group, Window

Decode = Callable[[Group, Block, int, int], None]  # (group, block, first row in the block, part number)
_THREAD_NAME = "viviane-reader"
Ready = tuple[Block, NDArray[np.int64] | None]


class _Loading:
    """A window being decoded."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._lock = threading.Lock()
        self._finished = False
        self.order: Future[NDArray[np.int64] | None] | None = None
        self.decodes: list[Future[None]] = []

    def wait(self) -> Ready:
        """Return the decoded block and the order of its rows; raises what a decode task raised."""
        for task in self.decodes:
            task.result()
        assert self.order is not None
        order = self.order.result()
        with self._lock:
            if not self._finished:
                self._block.finish()
                self._finished = True
        return self._block, order


class Prefetcher:
    """Yields the rows [first_row, last_row) of a plan's stream in slabs of batch_size rows.

    Args:
        plan: the epoch's order.
        new_block: makes the buffer of a window, from its number of rows and of row groups.
        decode: reads one row group into a block.
        num_threads: size of the pool.
    """

    def __init__(
        self,
        plan: EpochPlan,
        new_block: Callable[[int, int], Block],
        decode: Decode,
        *,
        batch_size: int,
        first_row: int,
        last_row: int,
        num_threads: int,
    ) -> None:
        self._plan = plan
        self._new_block = new_block
        self._decode = decode
        self._ranges = deque(
            (start, min(start + batch_size, last_row)) for start in range(first_row, last_row, batch_size)
        )
        self._depth = 2 * num_threads
        self._loading: dict[int, _Loading] = {}
        self._pending = deque(self._due_tasks(first_row, last_row, num_threads))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=_THREAD_NAME)

    def _due_tasks(self, first_row: int, last_row: int, num_threads: int) -> Iterator[tuple[int, Window, int]]:
        """Yield (row at which to hand in, window, part): a window's parts are spread over the one before it."""
        if first_row >= last_row:
            return
        first = self._plan.pieces(first_row, first_row + 1)[0][0].number
        for window in self._plan.windows[first:]:
            if window.start >= last_row:
                return
            before = self._plan.windows[max(0, window.number - 1)].num_rows
            largest = max(group.num_rows for group in window.groups)
            ahead = max(before, (num_threads + 1) * largest)
            count = len(window.groups)
            for part in range(count):
                yield window.start - ahead * (count - part) // count, window, part

    def _hand_in_next(self) -> None:
        _, window, part = self._pending.popleft()
        loading = self._loading.get(window.number)
        if loading is None:
            block = self._new_block(window.num_rows, len(window.groups))
            loading = self._loading[window.number] = _Loading(block)
            loading.order = self._pool.submit(self._plan.permutation, window)
        start = sum(group.num_rows for group in window.groups[:part])
        task = self._pool.submit(self._decode, window.groups[part], loading._block, start, part)
        loading.decodes.append(task)

    def _hand_in_batch(self) -> Future[tuple[Slab, list[Window]]]:
        start, stop = self._ranges.popleft()
        pieces = self._plan.pieces(start, stop)
        last = pieces[-1][0]
        while self._pending and self._pending[0][1].number <= last.number:
            self._hand_in_next()
        loadings = [self._loading[window.number] for window, _, _ in pieces]
        for number in [n for n in self._loading if n < last.number]:
            del self._loading[number]  # freed as soon as the tasks that use it are done
        return self._pool.submit(_assemble, pieces, loadings)

    def __iter__(self) -> Iterator[tuple[Slab, list[Window]]]:
        """Yield slabs with the windows that their rows come from."""
        tasks: deque[Future[tuple[Slab, list[Window]]]] = deque()
        try:
            while tasks or self._ranges:
                while self._ranges and len(tasks) < self._depth:
                    row = self._ranges[0][0]
                    while self._pending and self._pending[0][0] <= row:
                        self._hand_in_next()
                    tasks.append(self._hand_in_batch())
                yield tasks.popleft().result()
        finally:
            # the garbage collector may close a forgotten iterator in one of our own threads: it cannot join itself
            own = threading.current_thread().name.startswith(_THREAD_NAME)
            self._pool.shutdown(wait=not own, cancel_futures=True)


def _assemble(pieces: list[tuple[Window, int, int]], loadings: list[_Loading]) -> tuple[Slab, list[Window]]:
    slabs = []
    for (_, first, last), loading in zip(pieces, loadings, strict=True):
        block, order = loading.wait()
        rows: Rows = slice(first, last) if order is None else order[first:last]
        slabs.append(Slab.take(block, rows))
    return Slab.join(slabs), [window for window, _, _ in pieces]

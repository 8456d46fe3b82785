"""Threads that decode row groups and assemble batches in advance of the consumer.

A pool runs two kinds of tasks in submission order: decode one row group into its window's buffer, and gather the rows
of a run of batches from buffers. The consuming thread submits tasks as a function of the number of rows that it has
taken, so no thread ever waits for space in a queue, and dropping the iterator cannot cause a deadlock. A batch task may
wait for decode tasks, which are always submitted before it.

If another epoch will follow, its windows and batches are submitted as if they were more rows of the current one, so
that only the first epoch begins with a wait. The order of the first window of the epoch after that is then computed
too: if an epoch is a single window, all threads would otherwise wait for the one that computes the order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.core.ranges import timed_as
from viviane.data.assembly import Loading, Made, Order, ShuffledTask, assemble
from viviane.data.buffers import Buffers
from viviane.data.device_shuffle import DeviceShuffle
from viviane.data.packed_layout import PackedLayout
from viviane.data.plan import EpochPlan, RowGroup, Window
from viviane.data.rank_rows import BatchRanges, RankOrder, Span, rank_order
from viviane.data.row_buffer import RowBuffer
from viviane.data.run import Run
from viviane.data.staged_window import StagedWindow
from viviane.data.storage import DatasetFiles

_THREAD_NAME = "viviane-reader"
_RUN_ROWS = 16_384  # minimum rows of a task: submitting one costs as much as copying 10,000 rows
_RUN_ROWS_FOR_GPU = 65_536  # each task takes the GIL from the thread that launches kernels
_Task = Future[list[Made]] | ShuffledTask | Callable[[], list[Made]]


@dataclass(frozen=True)
class Reading:
    """Settings shared by all epochs of a reader.

    Args:
        storage: the files of the row groups.
        layout: layout of the batches.
        batch_size: rows of a batch, over all ranks.
        last_row: read only rows before this row of an epoch.
        share: (r, n): of every batch of B rows, take only rows B r // n to B (r + 1) // n.
        buffers: memory of the batches.
        windows: memory of the windows.
        num_threads: size of the pool.
        device_shuffle: shuffles rows on a device; None: the threads shuffle.
    """

    storage: DatasetFiles
    layout: PackedLayout
    batch_size: int
    last_row: int
    share: tuple[int, int]
    buffers: Buffers
    windows: Buffers
    num_threads: int
    device_shuffle: DeviceShuffle | None = None

    def ranges(self, first_row: int) -> BatchRanges:
        """Return this share's rows of an epoch, from a row on."""
        return BatchRanges(first_row, self.last_row, self.batch_size, self.share)


class Prefetcher:
    """Yields the rows [first_row, last_row) of a plan's stream in batches of batch_size rows.

    Args:
        plan: order of the epoch.
        reading: settings of the reader.
        first_row: first row to read.
        before: prefetcher of the preceding epoch, if it is still being read; its threads serve both.
        order: row order of window 0, if it is already computed or being computed.

    Attributes:
        until_epoch: while this epoch ends, the next one is read too if it is before `until_epoch`.
        following: prefetcher of the next epoch, once begun; the caller that iterated to the end uses or closes it.
    """

    def __init__(
        self,
        plan: EpochPlan,
        reading: Reading,
        first_row: int = 0,
        before: Prefetcher | None = None,
        order: Order | None = None,
    ) -> None:
        self._plan = plan
        self._reading = reading
        storage, buffers, batch_size = reading.storage, reading.buffers, reading.batch_size
        self._ranges = reading.ranges(first_row)
        self._next = 0
        # Copying rows that are in memory in batch order is faster than submitting a task to a thread.
        # For a GPU threads copy them anyway: the consumer has kernels to launch.
        self._inline = storage.mapped and not plan.shuffled and not buffers.pin_memory
        self._run = 1 if self._inline else max(1, self._rows_together() // batch_size)
        self._next_run = 1 if before is None else self._run  # the consumer waits for the first batch: begin with one
        self._depth = self._tasks_ahead()
        self._loading: dict[int, Loading | StagedWindow] = {}
        self._tasks: deque[_Task] = deque()
        self._made: deque[Made] = deque()
        self._pending = deque(self._due_tasks(first_row, before))
        self._pool: ThreadPoolExecutor = (
            ThreadPoolExecutor(reading.num_threads, _THREAD_NAME) if before is None else before._pool
        )
        self._orders: dict[int, Order] = {} if order is None else {0: order}  # of windows that have not begun
        self._after: tuple[EpochPlan, Order] | None = None  # the next epoch, and the order of its window 0
        self.until_epoch: int = 0 if before is None else before.until_epoch
        self.following: Prefetcher | None = None

    def _rows_together(self) -> int:
        """Return the number of rows, over all ranks, of a run of batches."""
        reading = self._reading
        if reading.device_shuffle is not None:
            ranks = reading.share[1]
            return ranks * reading.device_shuffle.run_rows(-(-reading.batch_size // ranks))
        return _RUN_ROWS_FOR_GPU if reading.buffers.pin_memory else _RUN_ROWS

    def _tasks_ahead(self) -> int:
        """Return the number of runs submitted in advance of the consumer."""
        reading = self._reading
        if reading.device_shuffle is not None:  # runs take no memory; a window is decoded one window in advance
            window = max((window.num_rows for window in self._plan.windows), default=0)
            return 1 + -(-window // (self._run * reading.batch_size))
        # page-locked memory is scarce
        return reading.num_threads + 2 if reading.buffers.pin_memory else 2 * reading.num_threads

    def _rows_of_last_window(self) -> int:
        last_row = self._reading.last_row
        [(window, _, _)] = self._plan.pieces(last_row - 1, last_row)
        return window.num_rows

    def _due_tasks(self, first_row: int, epoch_before: Prefetcher | None) -> Iterator[tuple[int, Window, int]]:
        """Yield (row at which to submit, window, part): the parts of a window are spread over the preceding window."""
        last_row = self._reading.last_row
        if first_row >= last_row:
            return
        rows_before, soonest = 0, first_row + self._depth * self._run * self._reading.batch_size
        if epoch_before is not None:
            rows_before, soonest = epoch_before._rows_of_last_window(), -last_row
        first = self._plan.pieces(first_row, first_row + 1)[0][0].number
        for window in self._plan.windows[first:]:
            if window.start >= last_row:
                return
            if not self._wanted(window):
                continue
            before = self._plan.windows[window.number - 1].num_rows if window.number else rows_before
            largest = max(group.num_rows for group in window.groups)
            ahead = max(before, (self._reading.num_threads + 1) * largest)
            count = len(window.groups)
            for part in range(count):
                due = window.start - ahead * (count - part) // count
                # While the consumer waits for the first batch, later windows queue behind it in the pool.
                yield due if window.number == first else max(due, soonest), window, part

    def _wanted(self, window: Window) -> bool:
        """Return whether a window has rows to read: with shares, all its rows may belong to other ranks."""
        return next(self._ranges.within(window), None) is not None

    def _buffer(self, window: Window) -> RowBuffer:
        return RowBuffer(self._reading.layout, window.num_rows, len(window.groups), self._reading.windows)

    def _submit_next(self) -> None:
        _, window, part = self._pending.popleft()
        loading = self._loading.get(window.number)
        if loading is None:
            loading = self._loading[window.number] = self._new_loading(window)
        storage, group = self._reading.storage, window.groups[part]
        if isinstance(loading, StagedWindow):
            loading.decodes.append(self._pool.submit(_stage, storage, loading, part, self._reading.windows))
        elif loading.buffer is None:
            loading.mapped = self._pool.submit(storage.view, group)
        else:
            start = sum(group.num_rows for group in window.groups[:part])
            loading.decodes.append(self._pool.submit(_decode, storage, group, loading.buffer, start, part))
        self._begin_next_order()

    def _new_loading(self, window: Window) -> Loading | StagedWindow:
        """Begin a window: submit the computation of its order and of the next window's, which take long."""
        device_shuffle = self._reading.device_shuffle
        for one in self._plan.windows[window.number : window.number + (2 if self._plan.shuffled else 1)]:
            if one.number not in self._orders and self._wanted(one):
                self._orders[one.number] = self._order_of(self._plan, one, self._ranges)
        order = self._orders.pop(window.number)
        if device_shuffle is not None:
            staged = device_shuffle.stage(window, self._ranges.spans(window))
            staged.order = order
            return staged
        as_it_stands = self._reading.storage.mapped and len(window.groups) == 1
        loading = Loading(None if as_it_stands else self._buffer(window))
        loading.order = order
        return loading

    def _begin_next_order(self) -> None:
        """Start computing the order of the next epoch's first window, which takes one thread long."""
        if self._pending or not self._plan.shuffled or self._plan.epoch + 1 >= self.until_epoch:
            return
        plan = self._plan.following()
        if plan.windows:
            self._after = plan, self._order_of(plan, plan.windows[0], self._reading.ranges(0))

    def _order_of(self, plan: EpochPlan, window: Window, ranges: BatchRanges) -> Order:
        device_shuffle, memory = self._reading.device_shuffle, self._reading.windows
        if device_shuffle is None:
            return self._pool.submit(_permutation, plan, window, memory)
        return self._pool.submit(
            _order_for_device, plan, window, ranges.spans(window), memory, device_shuffle.pin_memory
        )

    @property
    def shuffle_device(self) -> torch.device | None:
        """The device on which rows are shuffled; None: the threads shuffle."""
        return None if self._reading.device_shuffle is None else self._reading.device_shuffle.device

    @property
    def ready(self) -> bool:
        """Whether the next batch, or the end, is available without waiting or computing."""
        if self._made or not self._tasks:
            return bool(self._made) or self._next == len(self._ranges)
        first = self._tasks[0]
        return isinstance(first, Future | ShuffledTask) and first.done()

    def _submit_run(self) -> _Task:
        """Submit one task for a run of batches and return it; inline work is returned as a function."""
        requests: list[Any] = []
        count, self._next_run = self._next_run, min(2 * self._next_run, self._run)
        for start, stop in self._ranges.some(self._next, self._next + count):
            pieces = self._plan.pieces(start, stop)
            if pieces:  # a share may have no rows
                last = pieces[-1][0].number
                while self._pending and self._pending[0][1].number <= last:
                    self._submit_next()
                for number in [n for n in self._loading if n < pieces[0][0].number]:
                    del self._loading[number]  # freed as soon as the tasks that use it are done
            requests.append([(piece, self._loading[piece[0].number]) for piece in pieces])
        self._next += len(requests)
        if self._next == len(self._ranges):
            self._loading.clear()
        if self._reading.device_shuffle is not None:
            return ShuffledTask(requests, self._reading.device_shuffle)
        if self._inline:
            return partial(assemble, self._reading.layout, requests, self._reading.buffers)
        return self._pool.submit(assemble, self._reading.layout, requests, self._reading.buffers)

    def _submit_until(self, row: int) -> None:
        while self._pending and self._pending[0][0] <= row:
            self._submit_next()

    def _fill(self, limit: int) -> None:
        """Submit due tasks until there are `limit` tasks for batches, or the epoch has no more."""
        while self._next < len(self._ranges) and len(self._tasks) < limit:
            self._submit_until(self._ranges[self._next][0])
            self._tasks.append(self._submit_run())

    def _read_on(self) -> None:
        """Submit due tasks of the next epoch, whose rows continue the count of this one."""
        if self._pending or self._plan.epoch + 1 >= self.until_epoch:
            return
        if self.following is None:
            plan, order = self._after or (self._plan.following(), None)
            self.following = Prefetcher(plan, self._reading, before=self, order=order)
        if self._next < len(self._ranges):
            self.following._submit_until(self._ranges[self._next][0] - self._reading.last_row)
        else:
            self.following._fill(self._depth - len(self._tasks))

    def __iter__(self) -> Iterator[tuple[Run, int, list[Window]]]:
        """Yield for each batch its run, its index in the run, and the windows that its rows come from."""
        tasks, made = self._tasks, self._made
        ended = False
        try:
            while tasks or self._next < len(self._ranges):
                self._fill(self._depth)
                self._read_on()
                task = tasks.popleft()
                made.extend(task.result() if isinstance(task, Future | ShuffledTask) else task())
                while made:
                    one = made.popleft()
                    if isinstance(one, Exception):
                        raise one
                    yield one
            ended = True
        finally:
            if not ended or self.following is None:
                self.close()

    def close(self) -> None:
        """Stop the threads; submitted tasks are dropped."""
        # the garbage collector may close an abandoned iterator in one of these threads, which cannot join itself
        own = threading.current_thread().name.startswith(_THREAD_NAME)
        self._pool.shutdown(wait=not own, cancel_futures=True)


@timed_as("decode")
def _decode(storage: DatasetFiles, group: RowGroup, buffer: RowBuffer, start: int, part: int) -> None:
    storage.decode(group, buffer, start, part)


@timed_as("decode")
def _stage(storage: DatasetFiles, window: StagedWindow, part: int, memory: Buffers) -> None:
    window.decode(storage, part, memory)


def _permutation(plan: EpochPlan, window: Window, memory: Buffers) -> NDArray[np.int64] | None:
    return plan.permutation(window, memory.new((window.num_rows,), torch.int64)[1]) if plan.shuffled else None


def _order_for_device(
    plan: EpochPlan, window: Window, spans: list[Span] | None, memory: Buffers, pin_memory: bool
) -> RankOrder:
    order = _permutation(plan, window, memory)
    assert order is not None
    return rank_order(order, window, spans, memory, pin_memory)

"""A window of rows on its way to a device, where its rows are going to be put in order."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import DataError
from viviane.data.batch_stack import BatchStack
from viviane.data.block import Block, Jagged, Rows, take
from viviane.data.buffers import Buffers, Maker
from viviane.data.plan import Window
from viviane.data.rank_rows import Span, WindowRows
from viviane.data.storage import DatasetFiles
from viviane.ops.row_stacks import take_rows


class _Sections:
    """Hands out the matrices of a stack in their order, to a block."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self._arrays = iter(arrays)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        array = next(self._arrays).reshape(shape)
        return partial(torch.from_numpy, array), array


class StagedWindow(WindowRows):
    """A window on its way: row groups are decoded into a stack on the host, and copied to one on a device.

    Everything on the device is done on the stream that is current at a call, which is the same one each time.

    Args:
        stacks: form of the stack.
        window: the row groups.
        device: where rows go.
        spans: of the window's order; only their rows go there. None: all of them do.
    """

    def __init__(
        self, stacks: BatchStack, window: Window, device: torch.device, spans: Sequence[Span] | None = None
    ) -> None:
        super().__init__(window, spans)
        self.stacks, self.device = stacks, device
        self._lock = threading.Lock()
        self._host: Tensor | None = None
        self._arrays: list[NDArray[Any]] = []
        self.decodes: list[Future[None]] = []
        self._copied_rows = 0
        self._device_stack: Tensor | None = None
        self._device_order: Tensor | None = None

    def decode(self, storage: DatasetFiles, part: int, memory: Buffers) -> None:
        """Read those rows of a row group that go to the device; any thread may, once for each group.

        Args:
            storage: where the group stands.
            part: its number in the window.
            memory: for a group of which only some rows go there.

        Raises:
            DataError: a row has another number of ids than its column's hotness.
            DataError, KeyRangeError: see `DatasetFiles.decode`.
        """
        group, rows = self.window.groups[part], self.kept(part)
        count, start = self.num_kept(part), self.start(part)
        into = [array[start : start + count] for array in self._memory()]
        block = Block(self.stacks.schema, count, 1, _Sections(into[: self.stacks.num_plain]))
        if rows is None:
            storage.decode(group, block, 0, 0)
            self._take_bags(block.finish().bags, count, slice(0, count), into)
        else:
            view = storage.view(group, memory)
            block.take(view, rows, 0)
            self._take_bags(view.bags, group.num_rows, rows, into)

    def _take_bags(self, bags: Mapping[str, Jagged], num_rows: int, rows: Rows, into: list[NDArray[Any]]) -> None:
        """Take the ids and weights of some rows of a group to where they stand in the stack."""
        for number in range(self.stacks.num_plain, len(into)):
            before, matrix = self.stacks.matrices[number - 1 : number + 1]
            bag = bags[matrix.bag]
            numbers = bag.weights if before.bag == matrix.bag else bag.values  # a bag's ids stand before its weights
            if numbers is None or len(numbers) != num_rows * matrix.width:
                raise DataError(
                    "a row has another number of ids than its column's hotness", where=f"column {matrix.bag!r}",
                    value=f"{0 if numbers is None else len(numbers)} ids in {num_rows} rows",
                    allowed=str(num_rows * matrix.width), fix="write the data set again",
                )  # fmt: skip
            take(((0, numbers.reshape(num_rows, matrix.width)),), rows, into[number])

    def _memory(self) -> list[NDArray[Any]]:
        """Return the matrices of the stack; its memory is made by the thread that comes first, which may take long."""
        with self._lock:
            if self._host is None:
                form, pin = self.stacks.form, self.device.type == "cuda"
                self._host = here = torch.empty(form.num_words(self.num_rows), dtype=torch.int32, pin_memory=pin)
                self._arrays = [
                    form.matrix(here, number, self.num_rows).view(matrix.dtype).numpy()
                    for number, matrix in enumerate(self.stacks.matrices)
                ]
            return self._arrays

    def _decoded(self) -> int:
        """Return how many rows, from the first on, are there."""
        rows = 0
        for part, decode in enumerate(self.decodes):
            if not _succeeded(decode):
                break
            rows += self.num_kept(part)
        return rows

    @property
    def is_decoded(self) -> bool:
        """Whether all of it is on the host, or cannot be had: then `wait` says why."""
        return all(task.done() for task in self._tasks())

    def wait(self) -> None:
        """Wait until all of it is on the host; raises what a decode task raised."""
        for task in self._tasks():
            task.result()

    def _tasks(self) -> list[Future[Any]]:
        return [*self.decodes, *([] if self.order is None else [self.order])]

    def is_on_device(self) -> bool:
        """Whether all copies of it were queued."""
        return self._copied_rows == self.num_rows and self._device_order is not None

    def copy_next(self, most: int | None = None) -> int:
        """Queue the copies of rows that are decoded and were not copied, and of the order; return how many rows.

        Args:
            most: rows.
        """
        if self.is_on_device():
            return 0
        first = self._copied_rows
        last = self._decoded() if most is None else min(self._decoded(), first + most)
        if last > first:
            assert self._host is not None
            self._copy(self._host, first, last)
        if self._device_order is None and self.order is not None and _succeeded(self.order):
            self._device_order = self.order.result().order.to(self.device, non_blocking=True)
        if self.is_on_device():  # its memory is another window's, as soon as the copies are done
            self._host, self._arrays, self.decodes, self.order = None, [], [], None
        return last - first

    def _copy(self, host: Tensor, first: int, last: int) -> None:
        form, count = self.stacks.form, self.num_rows
        if self._device_stack is None:
            self._device_stack = torch.empty(form.num_words(count), dtype=torch.int32, device=self.device)
        if last - first == count:
            self._device_stack.copy_(host, non_blocking=True)
        else:
            for number in range(len(form.widths)):
                here, there = (form.matrix(one, number, count)[first:last] for one in (host, self._device_stack))
                there.copy_(here, non_blocking=True)
        self._copied_rows = last

    def take(self, spans: list[tuple[int, int]], target: Tensor, target_rows: int, first: int) -> int:
        """Take rows [a, b) of the window's order, for each span, to rows of a stack from `first` on; return the next.

        All of the window has been decoded, without an error, and the spans are parts of those that go to the device.
        """
        self.copy_next()
        there, order = self._device_stack, self._device_order
        assert there is not None
        assert order is not None
        taken = [order[a:b] for a, b in self.places(spans)]
        rows = taken[0] if len(taken) == 1 else torch.cat(taken)
        take_rows(self.stacks.form, target, target_rows, first, there, self.num_rows, rows)
        return first + len(rows)


def _succeeded(task: Future[Any]) -> bool:
    """Whether a task is done; an error of it is raised where its batch is wanted."""
    return task.done() and not task.cancelled() and task.exception() is None

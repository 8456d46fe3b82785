"""A window of rows that is copied to a device for shuffling."""

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
from viviane.data.buffers import Buffers, Maker
from viviane.data.packed_layout import PackedLayout
from viviane.data.plan import Window
from viviane.data.rank_rows import Span, WindowRows
from viviane.data.row_buffer import Jagged, RowBuffer, Rows, take
from viviane.data.storage import DatasetFiles
from viviane.ops.row_stacks import take_rows


class _Sections:
    """Supplies the matrices of a stack, in order, as the memory of a row buffer."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self._arrays = iter(arrays)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        array = next(self._arrays).reshape(shape)
        return partial(torch.from_numpy, array), array


class StagedWindow(WindowRows):
    """A window in preparation: row groups are decoded into a stack on the host, which is copied to the device.

    Work on the device uses the current stream, which must be the same in all calls.

    Args:
        layout: layout of the stack.
        window: the row groups.
        device: the target device.
        spans: spans of the window's order whose rows are copied; None: all rows.
    """

    def __init__(
        self, layout: PackedLayout, window: Window, device: torch.device, spans: Sequence[Span] | None = None
    ) -> None:
        super().__init__(window, spans)
        self.layout, self.device = layout, device
        self._lock = threading.Lock()
        self._host: Tensor | None = None
        self._arrays: list[NDArray[Any]] = []
        self.decodes: list[Future[None]] = []
        self._copied_rows = 0
        self._device_stack: Tensor | None = None
        self._device_order: Tensor | None = None

    def decode(self, storage: DatasetFiles, part: int, memory: Buffers) -> None:
        """Read the rows of a row group that are copied to the device; called once per group, from any thread.

        Args:
            storage: the files of the group.
            part: index of the group in the window.
            memory: memory for a group of which only some rows are copied.

        Raises:
            DataError: the number of ids of a row differs from its column's hotness.
            DataError, KeyRangeError: see `DatasetFiles.decode`.
        """
        group, rows = self.window.groups[part], self.kept(part)
        count, start = self.num_kept(part), self.start(part)
        into = [array[start : start + count] for array in self._memory()]
        buffer = RowBuffer(self.layout, count, 1, _Sections(into[: len(self.layout.plain)]))
        if rows is None:
            storage.decode(group, buffer, 0, 0)
            self._take_bags(buffer.finish().bags, count, slice(0, count), into)
        else:
            view = storage.view(group, memory)
            buffer.take(view, rows, 0)
            self._take_bags(view.bags, group.num_rows, rows, into)

    def _take_bags(self, bags: Mapping[str, Jagged], num_rows: int, rows: Rows, into: list[NDArray[Any]]) -> None:
        """Copy the ids and weights of some rows of a group to their position in the stack."""
        for number in range(len(self.layout.plain), len(into)):
            before, matrix = self.layout.matrices[number - 1 : number + 1]
            bag = bags[matrix.bag]
            numbers = bag.weights if before.bag == matrix.bag else bag.values  # a bag's ids precede its weights
            if numbers is None or len(numbers) != num_rows * matrix.width:
                raise DataError(
                    "the number of ids of a row differs from its column's hotness", where=f"column {matrix.bag!r}",
                    value=f"{0 if numbers is None else len(numbers)} ids in {num_rows} rows",
                    allowed=str(num_rows * matrix.width), fix="write the data set again",
                )  # fmt: skip
            take(((0, numbers.reshape(num_rows, matrix.width)),), rows, into[number])

    def _memory(self) -> list[NDArray[Any]]:
        """Return the matrices of the stack; the first calling thread allocates its memory, which may take long."""
        with self._lock:
            if self._host is None:
                form, pin = self.layout.form, self.device.type == "cuda"
                self._host = here = torch.empty(form.num_words(self.num_rows), dtype=torch.int32, pin_memory=pin)
                self._arrays = [
                    form.matrix(here, number, self.num_rows).view(matrix.dtype).numpy()
                    for number, matrix in enumerate(self.layout.matrices)
                ]
            return self._arrays

    def _decoded(self) -> int:
        """Return the number of leading rows that have been decoded."""
        rows = 0
        for part, decode in enumerate(self.decodes):
            if not _succeeded(decode):
                break
            rows += self.num_kept(part)
        return rows

    @property
    def is_decoded(self) -> bool:
        """Whether all rows are decoded, or decoding failed: then `wait` raises the error."""
        return all(task.done() for task in self._tasks())

    def wait(self) -> None:
        """Wait until all rows are decoded; raises the error of a decode task."""
        for task in self._tasks():
            task.result()

    def _tasks(self) -> list[Future[Any]]:
        return [*self.decodes, *([] if self.order is None else [self.order])]

    def is_on_device(self) -> bool:
        """Whether all copies have been queued."""
        return self._copied_rows == self.num_rows and self._device_order is not None

    def copy_next(self, most: int | None = None) -> int:
        """Queue copies of the order and of decoded rows that were not copied yet; return the number of rows.

        Args:
            most: maximum number of rows.
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
        if self.is_on_device():  # when the copies are finished, its memory can be reused by another window
            self._host, self._arrays, self.decodes, self.order = None, [], [], None
        return last - first

    def _copy(self, host: Tensor, first: int, last: int) -> None:
        form, count = self.layout.form, self.num_rows
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
        """Gather rows [a, b) of the window's order, per span, into a stack from row `first` on; return the next row.

        The window must be completely decoded without an error, and the spans must be part of the copied spans.
        """
        self.copy_next()
        there, order = self._device_stack, self._device_order
        assert there is not None
        assert order is not None
        taken = [order[a:b] for a, b in self.places(spans)]
        rows = taken[0] if len(taken) == 1 else torch.cat(taken)
        take_rows(self.layout.form, target, target_rows, first, there, self.num_rows, rows)
        return first + len(rows)


def _succeeded(task: Future[Any]) -> bool:
    """Return whether a task succeeded; its error is raised when its batch is requested."""
    return task.done() and not task.cancelled() and task.exception() is None

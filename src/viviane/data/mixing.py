"""Rows mixed on a GPU: windows are copied there as they stand in the files, and batches are taken out of them there.

A CPU waits for memory at each row that it takes from a random place, and its threads ask for the interpreter's lock as
often as the thread that launches kernels can bear. A GPU takes the same rows in the same order at the speed of its
memory; what is left to the host is to copy rows one behind another, which needs few calls and a fraction of the time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import DataError
from viviane.data.block import Block, one_hot_type
from viviane.data.buffers import ALIGNED, Maker
from viviane.data.plan import Window
from viviane.data.run import Run
from viviane.ops.row_stacks import StackForm, take_rows
from viviane.schema import Schema

_WORD: Final = 4  # bytes
_RUN_ROWS: Final = 131_072
_RUN_BYTES: Final = 1 << 26
_LEAST_ROWS: Final = 32_768  # a copy of fewer takes the host longer than the link
_SHARE_OF_MEMORY: Final = 32
_WINDOWS_THERE: Final = 3  # one that batches are taken from, the next, and a part of the one after it


@dataclass(frozen=True)
class Matrix:
    """A matrix of a batch: its numbers in a row, and their type; `bag` names the column whose ids or weights it has."""

    width: int
    dtype: torch.dtype
    bag: str = ""

    @property
    def words(self) -> int:
        """Words of four bytes in a row."""
        return self.width * self.dtype.itemsize // _WORD


class BatchStack:
    """How batches of a schema stand in a stack; bags have as many ids as their column's hotness.

    Args:
        schema: the columns; `stands_in_the_way` is None.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> stack = BatchStack(schema)
        >>> stack.batch(torch.arange(128, dtype=torch.int32), 2).one_hot.tolist()
        [[64], [65]]
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.layout = Layout.of(schema)
        ids = torch.int64 if one_hot_type(schema) is np.int64 else torch.int32
        self.matrices = [
            Matrix(len(schema.labels), torch.float32),
            Matrix(schema.num_dense, torch.float32),
            Matrix(len(schema.one_hot), ids),
        ]
        if schema.sample_weight is not None:
            self.matrices.append(Matrix(1, torch.float32))
        self.num_plain = len(self.matrices)
        self.hotness = {column.name: column.hotness or 0 for column in schema.bags}
        for column in schema.bags:
            self.matrices.append(Matrix(column.hotness or 0, getattr(torch, column.dtype), column.name))
            if column.weights is not None:
                self.matrices.append(Matrix(column.hotness or 0, torch.float32, column.name))
        self.form = StackForm([matrix.words for matrix in self.matrices])
        self._different: dict[torch.device, Tensor] = {}  # numbers of ids, (H, 1)

    @staticmethod
    def stands_in_the_way(schema: Schema) -> str | None:
        """Say why batches of a schema cannot be taken out of stacks; None: they can."""
        loose = [column.name for column in schema.bags if column.hotness is None]
        return f"bags of column {loose[0]!r} may have any number of ids: it has no hotness" if loose else None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its number in the order."""
        return (self.form.row_words + 1) * _WORD

    def can_be_cut(self, rows: int) -> bool:
        """Say whether batches of so many rows can be slices of one another's tensors, each as aligned as on its own."""
        return rows > 0 and all(rows * words * _WORD % ALIGNED == 0 for words in self.form.widths)

    def batch(self, stack: Tensor, num_rows: int) -> Batch:
        """Return the batch whose rows are in a stack, without another copy."""
        tensors = [
            self.form.matrix(stack, number, num_rows).view(matrix.dtype) for number, matrix in enumerate(self.matrices)
        ]
        return Batch(
            layout=self.layout,
            labels=tensors[0],
            dense=tensors[1],
            one_hot=tensors[2],
            weight=tensors[3].view(-1) if self.num_plain > 3 else None,
            bags=self._bags(tensors[self.num_plain :], num_rows, stack.device),
        )

    def _offsets(self, num_rows: int, device: torch.device) -> dict[int, Tensor]:
        """Return where bags begin, by their number of ids: all in one piece of memory."""
        different = self._different.get(device)
        if different is None:
            numbers = torch.tensor(sorted(set(self.hotness.values())), dtype=torch.int64)
            different = self._different[device] = numbers.view(-1, 1).to(device)
        # Each begins at a multiple of 256 bytes.
        rows = torch.arange(-(-(num_rows + 1) // 32) * 32, dtype=torch.int64, device=device)
        begins = (different * rows)[:, : num_rows + 1]
        return dict(zip(sorted(set(self.hotness.values())), begins.unbind(), strict=True))

    def _bags(self, tensors: list[Tensor], num_rows: int, device: torch.device) -> Mapping[str, Bag]:
        if not self.hotness:
            return {}
        offsets = self._offsets(num_rows, device)
        found: dict[str, Bag] = {}
        for matrix, numbers in zip(self.matrices[self.num_plain :], tensors, strict=True):
            before = found.get(matrix.bag)
            if before is None:
                found[matrix.bag] = Bag(numbers.reshape(-1), offsets[matrix.width])
            else:
                found[matrix.bag] = Bag(before.values, before.offsets, numbers.reshape(-1))
        return found


class _Sections:
    """Hands out the matrices of a stack in their order, to a block."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self._arrays = iter(arrays)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Maker, NDArray[Any]]:
        array = next(self._arrays).reshape(shape)
        return partial(torch.from_numpy, array), array


class StagedWindow:
    """A window on its way: row groups are decoded into a stack on the host, and copied to one on a device.

    Everything on the device is done on the stream that is current at a call, which is the same one each time.

    Args:
        stacks: form of the stack.
        window: the row groups.
        device: where rows go.
    """

    def __init__(self, stacks: BatchStack, window: Window, device: torch.device) -> None:
        self.stacks, self.window, self.device = stacks, window, device
        self.num_rows = window.num_rows
        self._lock = threading.Lock()
        self._host: Tensor | None = None
        self._arrays: list[NDArray[Any]] = []
        self._block: Block | None = None
        self.decodes: list[Future[None]] = []
        self.order: Future[Tensor] | None = None
        self._moved = 0
        self._there: Tensor | None = None
        self._order_there: Tensor | None = None

    @property
    def block(self) -> Block:
        """What row groups are decoded into; its memory is made by the thread that comes first, which may take long."""
        with self._lock:
            if self._block is None:
                form, pin = self.stacks.form, self.device.type == "cuda"
                self._host = here = torch.empty(form.num_words(self.num_rows), dtype=torch.int32, pin_memory=pin)
                self._arrays = [
                    form.matrix(here, number, self.num_rows).view(matrix.dtype).numpy()
                    for number, matrix in enumerate(self.stacks.matrices)
                ]
                plain = _Sections(self._arrays[: self.stacks.num_plain])
                self._block = Block(self.stacks.schema, self.num_rows, len(self.window.groups), plain)
            return self._block

    def settle(self, part: int, start: int) -> None:
        """Take the bags of a row group, which was decoded, to where they stand in the stack.

        Raises:
            DataError: a row has another number of ids than its column's hotness.
        """
        rows = self.window.groups[part].num_rows
        parts = self.block.parts
        for name in self.stacks.hotness:
            bag, parts[name][part] = parts[name][part], None
            assert bag is not None
            named = [number for number, matrix in enumerate(self.stacks.matrices) if matrix.bag == name]
            for number, numbers in zip(named, (bag.values, bag.weights), strict=False):
                target = self._arrays[number][start : start + rows]
                if numbers is None or len(numbers) != target.size:
                    raise DataError(
                        "a row has another number of ids than its column's hotness", where=f"column {name!r}",
                        value=f"{0 if numbers is None else len(numbers)} ids in {rows} rows",
                        allowed=str(target.size), fix="write the data set again",
                    )  # fmt: skip
                np.copyto(target, numbers.reshape(target.shape))

    def _decoded(self) -> int:
        """Return how many rows, from the first on, are there."""
        rows = 0
        for group, decode in zip(self.window.groups, self.decodes, strict=False):
            if not _has_come(decode):
                break
            rows += group.num_rows
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

    def is_there(self) -> bool:
        """Whether all copies of it were queued."""
        return self._moved == self.num_rows and self._order_there is not None

    def move(self, most: int | None = None) -> int:
        """Queue the copies of rows that are decoded and were not copied, and of the order; return how many rows.

        Args:
            most: rows.
        """
        if self.is_there():
            return 0
        first = self._moved
        last = self._decoded() if most is None else min(self._decoded(), first + most)
        if last > first:
            assert self._host is not None
            self._copy(self._host, first, last)
        if self._order_there is None and self.order is not None and _has_come(self.order):
            self._order_there = self.order.result().to(self.device, non_blocking=True)
        if self.is_there():  # its memory is another window's, as soon as the copies are done
            self._host, self._arrays, self._block, self.decodes, self.order = None, [], None, [], None
        return last - first

    def _copy(self, host: Tensor, first: int, last: int) -> None:
        form, count = self.stacks.form, self.num_rows
        if self._there is None:
            self._there = torch.empty(form.num_words(count), dtype=torch.int32, device=self.device)
        if last - first == count:
            self._there.copy_(host, non_blocking=True)
        else:
            for number in range(len(form.widths)):
                here, there = (form.matrix(one, number, count)[first:last] for one in (host, self._there))
                there.copy_(here, non_blocking=True)
        self._moved = last

    def take(self, spans: list[tuple[int, int]], target: Tensor, target_rows: int, first: int) -> int:
        """Take rows [a, b) of the window's order, for each span, to rows of a stack from `first` on; return the next.

        All of the window has been decoded, without an error.
        """
        self.move()
        there, order = self._there, self._order_there
        assert there is not None
        assert order is not None
        taken = [order[a:b] for a, b in spans]
        rows = taken[0] if len(taken) == 1 else torch.cat(taken)
        take_rows(self.stacks.form, target, target_rows, first, there, self.num_rows, rows)
        return first + len(rows)


def _has_come(task: Future[Any]) -> bool:
    """Whether a task is done; an error of it is raised where its batch is wanted."""
    return task.done() and not task.cancelled() and task.exception() is None


class Mixing:
    """What is mixed on a device: the windows on their way there.

    Args:
        stacks: form of the batches.
        device: where they are wanted.
    """

    def __init__(self, stacks: BatchStack, device: torch.device) -> None:
        self.stacks, self.device = stacks, device
        self.pin_memory = device.type == "cuda"
        self._on_their_way: deque[StagedWindow] = deque()

    def run_rows(self, batch_rows: int) -> int:
        """Return the rows that are taken together at most: of one batch, or of as many as are little memory."""
        return max(batch_rows, min(_RUN_ROWS, _RUN_BYTES // self.stacks.row_bytes))

    def stage(self, window: Window) -> StagedWindow:
        """Begin a window."""
        staged = StagedWindow(self.stacks, window, self.device)
        self._on_their_way.append(staged)
        return staged

    def move_ahead(self, num_rows: int) -> None:
        """Queue the copies of about as many rows of the windows that come next as were taken."""
        left = max(num_rows, _LEAST_ROWS)
        while left > 0 and self._on_their_way:
            first = self._on_their_way[0]
            left -= first.move(left)
            if not first.is_there():
                return
            self._on_their_way.popleft()

    @staticmethod
    def why_too_large(stacks: BatchStack, window_rows: int, device: torch.device) -> str | None:
        """Say why windows of so many rows find no room on a GPU; None: they do."""
        if device.type != "cuda":
            return None
        needed = _WINDOWS_THERE * window_rows * stacks.row_bytes
        allowed = torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_MEMORY
        if needed <= allowed:
            return None
        return (
            f"windows of {window_rows:,} rows take {needed >> 20:,} MiB of the GPU, and {allowed >> 20:,} are allowed"
        )


class MixedRun(Run):
    """Several batches, or one, whose rows are taken on the device that they are moved to.

    Args:
        mixing: what their windows belong to.
        parts: windows, and which rows of their order; of each batch, and in the order of the batches.
        rows: of each batch; None: it is the only one.
    """

    def __init__(
        self, mixing: Mixing, parts: list[tuple[StagedWindow, list[tuple[int, int]]]], rows: int | None
    ) -> None:
        super().__init__(_nowhere, rows)  # a method would keep windows alive until the garbage collector comes
        self._mixing = mixing
        self._parts_of_windows = parts
        self._num_rows = sum(last - first for _, spans in parts for first, last in spans)

    @property
    def is_pinned(self) -> bool:
        """They are: nothing has to be done before they are moved."""
        return True

    def to(self, device: torch.device, non_blocking: bool = False) -> Run:
        """Return the run on the device."""
        stacks, count = self._mixing.stacks, self._num_rows
        stack = torch.empty(stacks.form.num_words(count), dtype=torch.int32, device=device)
        first = 0
        for window, spans in self._parts_of_windows:
            first = window.take(spans, stack, count, first)
        there = stacks.batch(stack, count)
        return Run(lambda: there, self._rows, stacks.hotness)

    def move_ahead(self) -> None:
        """Queue copies of what later runs need."""
        self._mixing.move_ahead(self._num_rows)


def _nowhere() -> Batch:
    raise AssertionError("rows that are mixed on a device are nowhere before they are moved there")

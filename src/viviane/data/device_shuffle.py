"""Device shuffle: windows are copied to a GPU in the order of the files, and batches are gathered on the GPU.

Random reads stall a CPU, and its threads compete for the interpreter's lock with the thread that launches kernels. A
GPU gathers the same rows in the same order at its memory bandwidth. The host only copies rows sequentially, in few
calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

from viviane.batch import Batch
from viviane.data.packed_layout import PackedLayout
from viviane.data.plan import Window
from viviane.data.rank_rows import Span
from viviane.data.run import Run
from viviane.data.staged_window import StagedWindow

_RUN_ROWS: Final = 131_072
_RUN_BYTES: Final = 1 << 26
_LEAST_ROWS: Final = 32_768  # copying fewer rows takes the host longer than the transfer
_SHARE_OF_MEMORY: Final = 32
_WINDOWS_ON_DEVICE: Final = 3  # the current window, the next one, and a part of the one after it


class DeviceShuffle:
    """The windows that are being copied to a device for shuffling.

    Args:
        layout: layout of the batches, whose shapes are static.
        device: the device that gathers the rows.
    """

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.pin_memory = device.type == "cuda"
        self._pending: deque[StagedWindow] = deque()

    def run_rows(self, batch_rows: int) -> int:
        """Return the maximum rows of a run: one batch, or as many as the memory limit allows."""
        return max(batch_rows, min(_RUN_ROWS, _RUN_BYTES // self.layout.row_bytes))

    def stage(self, window: Window, spans: Sequence[Span] | None = None) -> StagedWindow:
        """Start staging a window, or only the rows in the given spans of its order."""
        staged = StagedWindow(self.layout, window, self.device, spans)
        self._pending.append(staged)
        return staged

    def copy_ahead(self, num_rows: int) -> None:
        """Queue copies of about as many rows of the next windows as were taken."""
        left = max(num_rows, _LEAST_ROWS)
        while left > 0 and self._pending:
            first = self._pending[0]
            left -= first.copy_next(left)
            if not first.is_on_device():
                return
            self._pending.popleft()

    @staticmethod
    def too_large_reason(layout: PackedLayout, window_rows: int, device: torch.device) -> str | None:
        """Return why windows of this size exceed the memory limit of a GPU; None if they fit."""
        if device.type != "cuda":
            return None
        needed = _WINDOWS_ON_DEVICE * window_rows * layout.row_bytes
        allowed = torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_MEMORY
        if needed <= allowed:
            return None
        return (
            f"windows of {window_rows:,} rows take {needed >> 20:,} MiB of the GPU, and {allowed >> 20:,} are allowed"
        )


class ShuffledRun(Run):
    """One or several batches whose rows are gathered on the target device.

    Args:
        device_shuffle: owner of the windows.
        parts: windows and ranges of their row order, for each batch in turn.
        rows: rows of each batch; None: there is only one.
    """

    def __init__(
        self, device_shuffle: DeviceShuffle, parts: list[tuple[StagedWindow, list[tuple[int, int]]]], rows: int | None
    ) -> None:
        super().__init__(_no_host_batch, rows)  # a method would keep windows alive until garbage collection
        self._device_shuffle = device_shuffle
        self._parts_of_windows = parts
        self._num_rows = sum(last - first for _, spans in parts for first, last in spans)

    @property
    def is_pinned(self) -> bool:
        """Always True: nothing has to be done before the transfer."""
        return True

    def to(self, device: torch.device, non_blocking: bool = False) -> Run:
        """Return the run on the device."""
        layout, count = self._device_shuffle.layout, self._num_rows
        stack = torch.empty(layout.form.num_words(count), dtype=torch.int32, device=device)
        first = 0
        for window, spans in self._parts_of_windows:
            first = window.take(spans, stack, count, first)
        there = layout.from_stack(stack, count)
        return Run(lambda: there, self._rows, layout.hotness)

    def copy_ahead(self) -> None:
        """Queue copies of the rows that later runs need."""
        self._device_shuffle.copy_ahead(self._num_rows)


def _no_host_batch() -> Batch:
    raise AssertionError("shuffled runs have no host batch; move the run to its device first")

"""Assembly of batches from windows: a reader thread takes the rows, or the target device gathers them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from viviane.core.ranges import timed_as
from viviane.data.buffers import Buffers
from viviane.data.device_shuffle import DeviceShuffle, ShuffledRun
from viviane.data.host_gather import Source, gather
from viviane.data.packed_layout import PackedLayout
from viviane.data.plan import Window
from viviane.data.row_buffer import RowBuffer, RowView
from viviane.data.run import Run
from viviane.data.staged_window import StagedWindow

Order = Future[Any]
"""Order of a window's rows: a RankOrder for a device, otherwise the result of `EpochPlan.permutation`."""
Ready = tuple[RowView, NDArray[np.int64] | None]
Made = tuple[Run, int, list[Window]] | Exception
WindowSpan = tuple[Window, int, int]
"""Rows [first, last) of a window's order."""


class Loading:
    """A window in preparation: row groups being decoded into a buffer, or one group mapped from its file."""

    def __init__(self, buffer: RowBuffer | None) -> None:
        self.buffer = buffer
        self._lock = threading.Lock()
        self._ready: Ready | None = None
        self.order: Order | None = None
        self.decodes: list[Future[None]] = []
        self.mapped: Future[RowView] | None = None

    def wait(self) -> Ready:
        """Return the rows and their order; raises the error of a decode task."""
        if self._ready is None:  # checking finished tasks for every batch would take a lock each time
            for task in self.decodes:
                task.result()
            assert self.order is not None
            order = self.order.result()
            with self._lock:
                if self._ready is None:
                    self._ready = self._view(), order
        return self._ready

    def _view(self) -> RowView:
        if self.mapped is not None:
            return self.mapped.result()
        assert self.buffer is not None
        return self.buffer.finish()


Request = list[tuple[WindowSpan, Loading]]
StagedRequest = list[tuple[WindowSpan, StagedWindow]]
_W = TypeVar("_W", Loading, StagedWindow)


@timed_as("assemble")
def assemble(layout: PackedLayout, requests: list[Request], buffers: Buffers) -> list[Made]:
    """Gather the rows of each batch; an error replaces its batch and ends the list."""
    ready, failure = _wait(requests)
    made: list[Made] = []
    # For a GPU the rows of all batches are gathered together, if they can be aligned slices.
    can_be_sliced = layout.can_be_sliced if buffers.pin_memory and not layout.bags else _never
    try:
        for together in _together(ready, can_be_sliced):
            made += _gather(layout, together, buffers)
    except Exception as error:
        failure = error
    return made if failure is None else [*made, failure]


class ShuffledTask:
    """A run of batches whose rows will be gathered on a device; like `assemble`, without the rows.

    Args:
        requests: the batches.
        device_shuffle: owner of their windows.
    """

    def __init__(self, requests: list[StagedRequest], device_shuffle: DeviceShuffle) -> None:
        self._requests, self._device_shuffle = requests, device_shuffle

    def done(self) -> bool:
        """Return whether the result is available without waiting."""
        windows = {id(window): window for batch in self._requests for _, window in batch}
        return all(window.is_decoded for window in windows.values())

    def result(self) -> list[Made]:
        """Return the batches; an error replaces its batch and ends the list."""
        ready, failure = _wait(self._requests)
        made: list[Made] = []
        for together in _together(ready, self._device_shuffle.layout.can_be_sliced):
            rows = sum(last - first for (_, first, last), _ in together[0]) if len(together) > 1 else None
            run = ShuffledRun(self._device_shuffle, _spans(together), rows)
            made += _numbered(run, together)
        return made if failure is None else [*made, failure]


def _wait(requests: list[list[tuple[WindowSpan, _W]]]) -> tuple[list[list[tuple[WindowSpan, _W]]], Exception | None]:
    """Wait for windows; return the batches before the first that fails, and its error."""
    for number, batch in enumerate(requests):
        try:
            for _, window in batch:
                window.wait()
        except Exception as error:
            return requests[:number], error
    return requests, None


def _never(rows: int) -> bool:
    return False


def _together(
    requests: list[list[tuple[WindowSpan, _W]]], can_be_sliced: Callable[[int], bool]
) -> list[list[list[tuple[WindowSpan, _W]]]]:
    """Divide batches into those whose rows are taken together: all, if they can be aligned slices."""
    if len(requests) < 2:
        return [[batch] for batch in requests]
    sizes = [sum(last - first for (_, first, last), _ in batch) for batch in requests]
    equal = set(sizes[:-1]) == {sizes[0]} and 0 < sizes[-1] <= sizes[0]
    return [requests] if equal and can_be_sliced(sizes[0]) else [[batch] for batch in requests]


def _gather(layout: PackedLayout, requests: list[Request], buffers: Buffers) -> list[Made]:
    """Gather the rows of batches into one allocation."""
    make = gather(layout, _sources(requests), buffers)
    if buffers.pin_memory:
        rows = sum(last - first for (_, first, last), _ in requests[0])
        run = Run(partial(make, ""), rows if len(requests) > 1 else None)
    else:  # the consumer computes on the CPU, and no GPU waits for it
        run = Run.one(make(""))
    return _numbered(run, requests)


def _numbered(run: Run, requests: list[list[tuple[WindowSpan, _W]]]) -> list[Made]:
    return [(run, number, [window for (window, _, _), _ in batch]) for number, batch in enumerate(requests)]


def _spans(requests: list[list[tuple[WindowSpan, _W]]]) -> list[tuple[_W, list[tuple[int, int]]]]:
    """Return the row spans of batches, window after window, merged into as few spans as possible."""
    found: list[tuple[_W, list[tuple[int, int]]]] = []
    for (_, first, last), window in (
        requests[0] if len(requests) == 1 else (piece for batch in requests for piece in batch)
    ):
        if not found or found[-1][0] is not window:
            found.append((window, [(first, last)]))
        elif found[-1][1][-1][1] == first:
            found[-1][1][-1] = found[-1][1][-1][0], last
        else:
            found[-1][1].append((first, last))
    return found


def _sources(requests: list[Request]) -> list[Source]:
    """Return views and their requested rows, merged into as few sources as possible."""
    sources: list[Source] = []
    for loading, places in _spans(requests):
        view, order = loading.wait()
        if order is None:
            sources += [(view, slice(first, last)) for first, last in places]
        else:
            rows = [order[first:last] for first, last in places]
            sources.append((view, rows[0] if len(rows) == 1 else np.concatenate(rows)))
    return sources

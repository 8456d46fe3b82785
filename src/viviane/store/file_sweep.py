"""Rows into and out of a file of rows in one sweep over it: large blocks, read and written at the same time.

Each block that has rows to read or to write goes through memory once. A thread reads blocks ahead, the caller copies
rows, a thread writes the blocks that changed; reads and writes bypass the page cache where the system can.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import StoreError
from viviane.store.row_kernels import copy_to_rows
from viviane.store.row_layout import Keys, Rows
from viviane.store.tier import Exchange

PAGE: Final = 4096
BLOCK_BYTES = 4 << 20
_MOST_UNIT: Final = 16 << 20
_AHEAD: Final = 4
_BUFFERS: Final = _AHEAD + 4
_THREADS: Final = 2  # of each direction
SMALLEST_BYTES = 64 << 20  # of blocks: less is moved in no time through the page cache
PAGES_WORTH_A_SWEEP = 1 / 8  # a disk reads a block in the time of so many of its pages, one by one
MOST_WAITING = 64 << 20
_GAP_PAGES: Final = 32  # unchanged pages between changed ones are written again up to this many


@dataclass(frozen=True)
class _Block:
    """A block of the file from row `first` on: the parts of `leaving` and `coming` there, and the bytes to read."""

    first: int
    leaving: slice
    coming: slice
    span: slice


class SweptFile:
    """A file of rows that can be swept.

    Args:
        file: its descriptor.
        direct: another one that bypasses the page cache, or -1.
        row_bytes: of a row: row i stands at byte i * row_bytes.
        path: in messages.
    """

    def __init__(self, file: int, direct: int, row_bytes: int, path: Path) -> None:
        self.row_bytes = row_bytes
        self._file, self._direct, self._path = file, direct, path
        self._rows = self.rows_of(BLOCK_BYTES)
        """Of a block, which begins and ends at a page and at a row; 0: the rows are too wide."""

    def rows_of(self, num_bytes: int) -> int:
        """Return how many rows take about some bytes, and end at a page; 0: so many that they are too wide."""
        unit = math.lcm(PAGE, self.row_bytes)
        return unit // self.row_bytes * max(1, num_bytes // unit) if unit <= _MOST_UNIT else 0

    @property
    def block_rows(self) -> int:
        """Rows of a block; 0: rows are too wide, or the system cannot sweep."""
        return self._rows if hasattr(os, "preadv") else 0

    def is_worth_it(self, change: Exchange) -> bool:
        """Whether a sweep takes less time than reading and writing pages one by one, and little memory."""
        if not self.block_rows:
            return False
        leaving, coming = change.leaving, change.coming
        early = int((change.given_before - np.searchsorted(leaving, coming)).max(initial=0))
        if early * self.row_bytes > MOST_WAITING:
            return False
        blocks = len(self._numbers(change))
        if blocks * self._rows * self.row_bytes < SMALLEST_BYTES:
            return False
        pages = sum(len(_distinct(ids * self.row_bytes // PAGE)) for ids in (leaving, coming))
        return pages >= PAGES_WORTH_A_SWEEP * blocks * (self._rows * self.row_bytes // PAGE)

    def sweep(self, change: Exchange, present: NDArray[np.uint8]) -> tuple[int, int]:
        """Move rows; return the bytes read and written.

        Args:
            change: the rows; all that come are in the file, at the positions that `coming` says.
            present: a bit for each id, set where its row is in the file.

        Raises:
            StoreError: the file was truncated, or the disk is full.
        """
        blocks = self._blocks(change, present)
        size = self._rows * self.row_bytes
        memory = whole_pages(size * min(_BUFFERS, max(1, len(blocks))))
        every = memory.reshape(-1, self._rows, self.row_bytes)
        waiting = _Waiting(change, self.row_bytes)
        reads: list[Future[int] | None] = [None] * len(every)
        writes: list[list[Future[int]]] = [[] for _ in every]
        written = 0
        with ThreadPoolExecutor(_THREADS, "rows in") as reader, ThreadPoolExecutor(_THREADS, "rows out") as writer:

            def begin(number: int) -> int:
                place = number % len(every)
                done = sum(one.result() for one in writes[place])
                writes[place] = []
                block = blocks[number]
                is_read = block.span.stop > 0
                part = every[place].reshape(-1)[block.span]
                offset = block.first * self.row_bytes + block.span.start
                reads[place] = reader.submit(self.read, offset, part) if is_read else None
                if not is_read:
                    every[place] = 0
                return done

            for number in range(min(_AHEAD, len(blocks), len(every))):
                written += begin(number)
            for number, block in enumerate(blocks):
                place = number % len(every)
                arrived = reads[place]
                if arrived is not None:
                    arrived.result()
                self._move(change, block, every[place], waiting)
                ids = change.leaving[block.leaving]
                for low, high in self._changed_spans(ids, block.first):
                    part = every[place].reshape(-1)[low:high]
                    writes[place].append(writer.submit(self.write, block.first * self.row_bytes + low, part))
                if number + _AHEAD < len(blocks):
                    written += begin(number + _AHEAD)
            written += sum(one.result() for place in writes for one in place)
        return sum(block.span.stop - block.span.start for block in blocks), written

    def _numbers(self, change: Exchange) -> NDArray[np.int64]:
        """Return which blocks have rows of an exchange."""
        return np.union1d(*(_distinct(ids // self._rows) for ids in (change.leaving, change.coming)))

    def _blocks(self, change: Exchange, present: NDArray[np.uint8]) -> list[_Block]:
        numbers = self._numbers(change)
        starts = numbers * self._rows
        bounds = [
            np.searchsorted(ids, np.stack([starts, starts + self._rows])).T.tolist()
            for ids in (change.leaving, change.coming)
        ]
        found = []
        for first, leaving, coming in zip(starts.tolist(), *bounds, strict=True):
            own, span = slice(*coming), slice(0, self._rows * self.row_bytes)
            if leaving[0] == leaving[1]:  # only what comes
                ids = change.coming[own] - first
                last = (int(ids[-1]) + 1) * self.row_bytes
                span = slice(int(ids[0]) * self.row_bytes // PAGE * PAGE, -(-last // PAGE) * PAGE)
            elif not present[first >> 3 : (first + self._rows + 7) >> 3].any():
                span = slice(0, 0)
            found.append(_Block(first, slice(*leaving), own, span))
        return found

    def _move(self, change: Exchange, block: _Block, rows: Rows, waiting: _Waiting) -> None:
        """Copy the rows of a block out of it and into it."""
        coming = np.arange(block.coming.start, block.coming.stop)
        if len(coming):
            waiting.give(int(change.given_before[coming[-1]]))
            change.take(coming, rows, change.coming[block.coming] - block.first)
        waiting.give(block.leaving.stop)
        for ids, given in waiting.pop(block.leaving.stop):
            copy_to_rows(rows, ids - block.first, given)

    def _changed_spans(self, ids: Keys, first: int) -> list[tuple[int, int]]:
        """Return the bytes of a block to write: pages with changed rows, and narrow gaps between them."""
        if not len(ids):
            return []
        starts = (ids - first) * self.row_bytes // PAGE
        stops = -(-(ids - first + 1) * self.row_bytes // PAGE)
        breaks = np.flatnonzero(starts[1:] - stops[:-1] > _GAP_PAGES)
        lows, highs = starts[np.append(0, breaks + 1)], stops[np.append(breaks, len(ids) - 1)]
        return [(low * PAGE, high * PAGE) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]

    def read(self, offset: int, data: NDArray[np.uint8]) -> int:
        """Read bytes from an offset on; zeros are behind the end of the file. Returns how many were there."""
        at = 0
        while at < len(data):
            count = self._call(os.preadv, data[at:].data, offset + at)
            if not count:
                data[at:] = 0
                break
            at += count
        return at

    def write(self, offset: int, data: NDArray[np.uint8]) -> int:
        """Write bytes at an offset; returns how many.

        Raises:
            StoreError: the disk is full.
        """
        at = 0
        try:
            while at < len(data):
                at += self._call(os.pwritev, data[at:].data, offset + at)
        except OSError as error:
            raise StoreError("a tier cannot be written", where=str(self._path), value=str(error),
                             fix="make room") from error  # fmt: skip
        return at

    def _call(self, function: Callable[[int, list[Any], int], int], view: memoryview, offset: int) -> int:
        if self._direct >= 0 and offset % PAGE == 0 and len(view) % PAGE == 0:
            try:
                return function(self._direct, [view], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = -1  # the file system wants another alignment
        return function(self._file, [view], offset)


class _Waiting:
    """Rows that were given and not written yet: their slots were needed before their block came."""

    def __init__(self, change: Exchange, row_bytes: int) -> None:
        self._change, self._row_bytes, self._given = change, row_bytes, 0
        self._parts: deque[tuple[Keys, Rows]] = deque()

    def give(self, count: int) -> None:
        """Ask for rows until `count` were given."""
        if count > self._given:
            rows = np.empty((count - self._given, self._row_bytes), np.uint8)
            self._change.give(np.arange(self._given, count), rows)
            self._parts.append((self._change.leaving[self._given : count], rows))
            self._given = count

    def pop(self, count: int) -> list[tuple[Keys, Rows]]:
        """Return the rows before place `count` that were not returned yet."""
        found = []
        first = self._given - sum(len(ids) for ids, _ in self._parts)
        while self._parts and first < count:
            ids, rows = self._parts.popleft()
            own = min(len(ids), count - first)
            found.append((ids[:own], rows[:own]))
            if own < len(ids):
                self._parts.appendleft((ids[own:], rows[own:]))
            first += own
        return found


def whole_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that begins at a page, of large pages where the system has them: a disk then writes to it faster.

    Example:
        >>> len(whole_pages(8192))
        8192
    """
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _distinct(rising: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = rising[np.append(True, rising[1:] != rising[:-1])[: len(rising)]]
    return found

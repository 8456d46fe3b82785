"""Rows of passes that stand beside each other: those that leave are written while those that come are read.

Rows leave and come in rounds: the rows that come in a round take slots that are free by then. Threads read ahead and
write, also for the rounds that follow, while the caller copies the rows that came.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from viviane.store.file_sweep import PAGE, SweptFile, whole_pages
from viviane.store.pass_area import PassArea
from viviane.store.row_layout import Found, Rows
from viviane.store.tier import Exchange

_ROUND_BYTES: Final = 32 << 20
_PIECE_BYTES: Final = 4 << 20  # of a read
_GAP_BYTES: Final = 64 << 10
_MEMORY_BYTES: Final = 32 << 20  # for each direction
EXTENT_BYTES: Final = 2 << 20
"""Of the rows that stand beside each other, about: what is written at once."""
_THREADS: Final = 2  # of each direction


@dataclass(frozen=True)
class Round:
    """Rows that leave and come together.

    Args:
        extents: of rows that leave: the position of the first, and the places in `Exchange.leaving` of all.
        coming: places in `Exchange.coming` by rising position.
    """

    extents: Sequence[tuple[int, NDArray[np.int64]]]
    coming: NDArray[np.int64]


def rounds_of(
    change: Exchange, area: PassArea, num_ids: int, row_bytes: int, there: Found
) -> tuple[list[Round], NDArray[np.int64]]:
    """Give rows that a later pass needs places in an area, and return them with the rows that come from there.

    Rows that come into the slot of one that stays at the place of its id are left out: their slot is not free yet.

    Returns:
        the rounds; the position of each coming row.
    """
    area.release(change.leaving)
    positions = area.positions(change.coming)
    assert change.later is not None
    step = max(1, _ROUND_BYTES // row_bytes)
    lows = range(0, max(1, len(change.leaving)), step)
    extents = []
    for low in lows:
        own = slice(low, low + step)
        parts = area.allocate(change.leaving[own], change.later[own])
        extents.append([(position, places + low) for position, places in parts])
    apart = area.stands_apart(change.leaving)
    before = np.append(0, change.given_before[:-1])[: len(change.coming)]
    taken = change.given_before > before  # from a row that leaves
    ready = there & (positions >= num_ids)
    ready[taken] &= apart[change.given_before[taken] - 1]
    stops = [int(np.searchsorted(change.given_before, low + step, side="right")) for low in lows]
    stops[-1] = len(change.coming)
    found = []
    for parts, first, stop in zip(extents, [0, *stops], stops, strict=False):
        coming = np.flatnonzero(ready[first:stop]) + first
        found.append(Round(parts, coming[np.argsort(positions[coming], kind="stable")]))
    return found, positions


def stream(
    swept: SweptFile, change: Exchange, rounds: Sequence[Round], positions: NDArray[np.int64]
) -> tuple[int, int]:
    """Move the rows of rounds; return the bytes read and written.

    Args:
        swept: the file.
        change, rounds, positions: as of `rounds_of`.
    """
    runs = [run for one in rounds for run in _runs(one.coming, positions, swept.row_bytes)]
    extents = [extent for one in rounds for extent in one.extents]
    writer, reading = _Writer(swept, change, extents), _Ring(_PIECE_BYTES + swept.row_bytes + 2 * PAGE)
    reads: list[Future[int]] = []
    next_run = stop = 0
    with ThreadPoolExecutor(_THREADS, "rows in") as readers, ThreadPoolExecutor(_THREADS, "rows out") as writers:

        def begin() -> None:
            if len(reads) < len(runs):
                part = reading.part(len(reads), runs[len(reads)].num_bytes)
                reads.append(readers.submit(swept.read, runs[len(reads)].offset, part))

        for _ in range(reading.count):
            begin()
        writes = [writers.submit(writer.write, number) for number in range(len(extents))]
        for one in rounds:
            stop, left = stop + len(one.extents), len(one.coming)
            writer.wait_given(stop)
            while left:
                run = runs[next_run]
                reads[next_run].result()
                change.take(run.places, run.rows(reading.part(next_run, run.num_bytes), swept.row_bytes), run.lines)
                next_run, left = next_run + 1, left - len(run.places)
                begin()
        return sum(one.result() for one in reads), sum(one.result() for one in writes)


class _Writer:
    """Writes extents, each by a thread that starts them in turn; their rows are given before they are written."""

    def __init__(self, swept: SweptFile, change: Exchange, extents: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        self._swept, self._change, self._extents = swept, change, extents
        widest = max((len(places) for _, places in extents), default=0)
        self._ring = _Ring(max(EXTENT_BYTES, widest * swept.row_bytes))
        self._given, self._written = ([threading.Event() for _ in extents] for _ in range(2))
        self._num_given = 0

    def write(self, number: int) -> int:
        position, places = self._extents[number]
        num_bytes = len(places) * self._swept.row_bytes
        try:
            if number >= self._ring.count:  # the memory is free again; an earlier thread has it in hand
                self._written[number - self._ring.count].wait()
            part = self._ring.part(number, -(-num_bytes // PAGE) * PAGE)
            self._change.give(places, part[:num_bytes].reshape(-1, self._swept.row_bytes))
            self._given[number].set()
            return self._swept.write(position * self._swept.row_bytes, part)
        finally:  # nobody waits for what failed
            self._given[number].set()
            self._written[number].set()

    def wait_given(self, stop: int) -> None:
        """Return when the rows of the extents before `stop` were given."""
        for event in self._given[self._num_given : stop]:
            event.wait()
        self._num_given = stop


@dataclass(frozen=True)
class _Run:
    """Rows that are read at once: their places in `coming`, and the whole pages that hold them."""

    places: NDArray[np.int64]
    lines: NDArray[np.int64]
    offset: int
    num_bytes: int
    skipped: int

    def rows(self, data: NDArray[np.uint8], row_bytes: int) -> Rows:
        count = int(self.lines[-1]) + 1
        return data[self.skipped : self.skipped + count * row_bytes].reshape(count, row_bytes)


def _runs(places: NDArray[np.int64], positions: NDArray[np.int64], row_bytes: int) -> list[_Run]:
    """Cut rows by rising position into pieces without wide gaps."""
    if not len(places):
        return []
    own = positions[places]
    jumps = np.diff(own) * row_bytes > _GAP_BYTES
    pieces = (own - own[0]) * row_bytes // _PIECE_BYTES
    breaks = np.flatnonzero(jumps | (pieces[1:] != pieces[:-1])) + 1
    found = []
    for first, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(own)], strict=True):
        start, end = int(own[first]) * row_bytes, (int(own[stop - 1]) + 1) * row_bytes
        offset = start // PAGE * PAGE
        num_bytes = -(-end // PAGE) * PAGE - offset
        found.append(_Run(places[first:stop], own[first:stop] - own[first], offset, num_bytes, start - offset))
    return found


class _Ring:
    """Memory for pieces in turn, each at a page; it takes memory when it is used."""

    def __init__(self, piece: int) -> None:
        self._piece = -(-piece // PAGE) * PAGE
        self.count = max(2, _MEMORY_BYTES // self._piece)
        self._memory = whole_pages(self._piece * self.count)

    def part(self, number: int, num_bytes: int) -> NDArray[np.uint8]:
        start = number % self.count * self._piece
        return self._memory[start : start + num_bytes]

"""From the reader to the device: batches are copied ahead of the step, on a stream of their own.

The reader's threads write small batches into one piece of page-locked memory together, and one copy moves them all:
a copy, its event and its memory cost the host as much for one small batch as for eight. The copy of a batch
runs under the steps of those before it; the step waits for it on the device, and the host waits for nothing but the
reader. Memory is bounded: so many batches are copied ahead, or those of one piece, and so many steps may be queued on
the device. Rows that are shuffled may be put in order on the device; see `viviane.data.device_shuffle`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.core.machine import usable_cores
from viviane.core.ranges import time_range
from viviane.data import Dataset, Reader
from viviane.data.run import Cut, Run
from viviane.data.streaming import KafkaStream, StreamReader
from viviane.parallel import Group

_AHEAD: Final = 4  # batches: the copy of a run of small ones takes as long as a step or two
_MOST_QUEUED: Final = 12  # steps: more than replays are ahead of the host's look at them; a bound on batches that wait
_STEPS_BETWEEN: Final = 2  # an event is recorded before every other step: it takes the host as long as a small kernel
_MOST_THREADS: Final = 8
_MOST_COPYING: Final = 4
ShuffleOn = Literal["auto", "host", "device"]


@dataclass(frozen=True)
class _Waiting:
    """A batch that was taken from the reader, or the error in its place, or the end; and the position after it."""

    batch: Batch | Exception | None
    place: tuple[int, int]


class DeviceFeed:
    """Iterates over a reader's epoch, the batches on a device. On a CPU it hands on what the reader gives.

    Position and errors are those of the batches that were handed out, whatever was copied ahead: a saved state
    continues with exactly the next batch, and an error comes in place of its batch.

    Args:
        reader: of the batches; with pin_memory, where the device is a GPU.
        device: where the batches go.
        shuffle_on: where rows that are shuffled are put in order: "host", by the reader's threads; "device", on a GPU,
            which has some windows of rows in its memory then; "auto": there, where `Reader.why_not_mixed_on` has
            nothing against it. Batches are the same.

    Raises:
        ConfigError: shuffle_on is "device", and something prevents it.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> from viviane.schema import Schema
        >>> data = write_dataset(tempfile.mkdtemp() + "/train", Schema(dense=[{"name": "x"}]), [{"x": [0, 1, 2]}])
        >>> feed = DeviceFeed.open(data, 2, torch.device("cpu"))
        >>> [batch.size for batch in feed]
        [2, 1]
    """

    def __init__(self, reader: Reader | StreamReader, device: torch.device, *, shuffle_on: ShuffleOn = "auto") -> None:
        self.reader = reader
        self.device = device
        reason = None if shuffle_on == "host" else self._why_not_there()
        if shuffle_on == "device" and reason is not None:
            raise ConfigError(
                f"rows cannot be shuffled on the device: {reason}", value=shuffle_on, allowed="auto, host",
                fix='take "auto", which does it where it can be done',
            )  # fmt: skip
        self._mixed_on = device if shuffle_on != "host" and reason is None else None
        self._place = (reader.epoch, reader.position)
        self._waiting: deque[_Waiting] = deque()
        self._copies = _Copies(device) if device.type == "cuda" else None

    @classmethod
    def open(
        cls,
        dataset: Dataset | KafkaStream,
        batch_size: int,
        device: torch.device,
        group: Group | None = None,
        shuffle_on: ShuffleOn = "auto",
        **options: Any,
    ) -> Self:
        """Return the feed of a process's share of every batch.

        Args:
            dataset: what to read.
            batch_size: rows of a batch, over all processes.
            device: where the batches go.
            group: the processes that share them; None: this one alone.
            shuffle_on: see `DeviceFeed`.
            options: of the reader; see `Reader`. Threads and page-locked memory are chosen for the device.
        """
        rank, ranks = (0, 1) if group is None else (group.rank, group.size)
        if device.type == "cuda":
            options = {"pin_memory": True} | options
        feed = cls(dataset.reader(batch_size, rank=rank, num_ranks=ranks, **options), device, shuffle_on=shuffle_on)
        if device.type == "cuda" and "num_threads" not in options and isinstance(feed.reader, Reader):
            feed.reader.num_threads = num_threads(feed._only_copies)
        return feed

    def __len__(self) -> int:
        """Number of batches of an epoch.

        Raises:
            TypeError: a stream has none.
        """
        if isinstance(self.reader, StreamReader):
            raise TypeError("a stream has no number of batches")
        return len(self.reader)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._place[0]

    @property
    def has_length(self) -> bool:
        """Whether an epoch has a known number of rows: that of a stream has none."""
        return isinstance(self.reader, Reader)

    @property
    def share_of_whole(self) -> int | None:
        """Rows of every process's share of a whole batch; None: shares differ, or it is a stream, whose batches may."""
        reader = self.reader
        if isinstance(reader, StreamReader) or reader.batch_size % reader.num_ranks:
            return None
        return reader.batch_size // reader.num_ranks * reader.rows_each

    @property
    def is_whole(self) -> bool:
        """Whether the batch that was handed out last is whole over all processes: each knows it without asking."""
        reader = self.reader
        if isinstance(reader, StreamReader):
            return False
        return self._place[1] * reader.batch_size <= reader.dataset.num_rows

    def __iter__(self) -> Iterator[Batch]:
        """Continue at the current position."""
        if self._waiting:
            self.close()
        if self._copies is None:
            return self._at_once(iter(self.reader))
        return self._copied_ahead(self._cuts(), self._copies)

    def _cuts(self) -> Iterator[Cut]:
        reader = self.reader
        if not isinstance(reader, Reader):
            return ((Run.one(batch), 0, batch.origin) for batch in reader)
        return reader.cuts(self._mixed_on)

    @property
    def _only_copies(self) -> bool:
        """Whether the reader's threads do nothing but copy rows: neither decode them nor put them in order."""
        reader = self.reader
        return self._mixed_on is not None and isinstance(reader, Reader) and reader.dataset.storage.mapped

    def _why_not_there(self) -> str | None:
        """Say what prevents rows from being put in order on the device."""
        if self.device.type != "cuda":
            return "it is no GPU"
        if not isinstance(self.reader, Reader):
            return "a stream has an order of its own"
        return self.reader.why_not_mixed_on(self.device)

    def read_on(self, until_epoch: int) -> None:
        """Have epochs before this one read one after another, without a wait between; see `Reader`'s until_epoch.

        It counts when an epoch begins. A stream has no epochs to read on to.
        """
        if isinstance(self.reader, Reader):
            self.reader.until_epoch = until_epoch

    def _at_once(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            with time_range("read"):
                batch = next(batches, None)
            self._place = (self.reader.epoch, self.reader.position)
            if batch is None:
                return
            yield batch

    def _copied_ahead(self, cuts: Iterator[Cut], copies: _Copies) -> Iterator[Batch]:
        waiting = self._waiting
        ended = False
        while True:
            # Only the first is waited for: what the reader has not got yet would hold up a step that is ready.
            while not ended and len(waiting) <= _AHEAD and (not waiting or self.reader.ready):
                waiting.append(self._take(cuts, copies))
                ended = not isinstance(waiting[-1].batch, Batch)
            first = waiting.popleft()
            self._place = first.place
            if first.batch is None:
                return
            if isinstance(first.batch, Exception):
                raise first.batch
            copies.finish(first)
            yield first.batch

    def _take(self, cuts: Iterator[Cut], copies: _Copies) -> _Waiting:
        """Take the reader's next batch, and have its copy begin."""
        try:
            with time_range("read"):
                cut = next(cuts, None)
        except Exception as error:
            return _Waiting(error, self._place)
        place = (self.reader.epoch, self.reader.position)
        if cut is None:
            return _Waiting(None, place)
        with time_range("to device"):
            return copies.start(cut, place)

    def state(self) -> dict[str, Any]:
        """Return the reader's position after the batches that were handed out."""
        epoch, batches = self._place
        return {**self.reader.state(), "epoch": epoch, "batches": batches}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batch that would have come after `state` was taken; see `Reader.restore`."""
        self._waiting.clear()
        self.reader.restore(state)
        self._place = (self.reader.epoch, self.reader.position)

    def close(self) -> None:
        """Stop the reader's threads; the position stays."""
        self.reader.close()
        if self._waiting:
            self.restore(self.state())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Copies:
    """Copies to a GPU on their own stream, and a bound on the steps that are queued there."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.queued: deque[torch.cuda.Event] = deque()
        self._num_finished = 0
        self._there: weakref.WeakKeyDictionary[Run, tuple[Run, torch.cuda.Event]] = weakref.WeakKeyDictionary()

    def start(self, cut: Cut, place: tuple[int, int]) -> _Waiting:
        """Queue the copy of a batch; the memory it comes from is not written to before the copy is done.

        Batches of one run are copied together, with the first of them.
        """
        run, number, origin = cut
        found = self._there.get(run)
        if found is None:
            found = self._there[run] = self._copy(run)
        there, copied = found
        if number + 1 == len(there):
            del self._there[run]
        return _Waiting(there.batch(number, origin).ready_after(copied), place)

    def _copy(self, run: Run) -> tuple[Run, torch.cuda.Event]:
        if not run.is_pinned:
            run = run.pin_memory()
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            there = run.to(self.device, non_blocking=True)
            copied.record(self.stream)
            run.copy_ahead()
        return there, copied

    def finish(self, waiting: _Waiting) -> None:
        """Let what the current stream does from here on come after the copy."""
        assert isinstance(waiting.batch, Batch)
        if self._num_finished % _STEPS_BETWEEN == 0:
            self._hold_back()
        self._num_finished += 1
        waiting.batch.wait()

    def _hold_back(self) -> None:
        """Wait until few enough steps are queued."""
        if len(self.queued) < _MOST_QUEUED // _STEPS_BETWEEN - 1:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            event = self.queued.popleft()
            event.synchronize()
        event.record(torch.cuda.current_stream(self.device.index))
        self.queued.append(event)


def num_threads(only_copies: bool = False) -> int:
    """Return the reader's threads for one GPU: half of the cores that a process of this machine has, 2 to 8.

    Args:
        only_copies: they do nothing but copy rows, and so wait for memory: 4 are enough, and more are in the way of
            the thread that launches kernels.

    Example:
        >>> 2 <= num_threads() <= 8
        True
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    most = _MOST_COPYING if only_copies else _MOST_THREADS
    return min(most, max(2, usable_cores() // processes // 2))

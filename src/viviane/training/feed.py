"""Prefetch of batches from the reader to the device, on a separate stream.

The reader's threads pack several small batches into one page-locked allocation that is copied in one transfer: a copy,
its event and its memory cost the host as much for one small batch as for eight. The copy overlaps earlier steps. The
step waits for it on the device; the host waits only for the reader. Memory is bounded by the number of prefetched
batches and of queued steps. Rows can be shuffled on the device; see `viviane.data.device_shuffle`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.core.machine import usable_cores
from viviane.core.ranges import time_range
from viviane.data import Dataset, Reader
from viviane.data.run import PendingBatch, Run
from viviane.data.streaming import KafkaStream, StreamReader
from viviane.parallel import Group
from viviane.training.look_ahead import LookAhead

_AHEAD: Final = 4  # batches: copying several small batches together takes as long as one or two steps
_MOST_QUEUED: Final = 12  # steps: more than the replays in flight; bounds the number of waiting batches
_STEPS_BETWEEN: Final = 2  # an event is recorded before every second step: it costs the host as much as a small launch
_MOST_THREADS: Final = 8
_MOST_COPYING: Final = 4
ShuffleOn = Literal["auto", "host", "device"]
_log = get_logger("training.feed")


@dataclass(frozen=True)
class _Waiting:
    """A prefetched batch, or an error, or None at the end; and the reader's position after it.

    Args:
        host: the batch in host memory, where rows of its tables are to be fetched and `batch` is on a GPU.
    """

    batch: Batch | Exception | None
    place: tuple[int, int]
    host: Batch | None = None


class DeviceFeed:
    """Iterates over the batches of a reader's epoch on a device. On a CPU it yields the reader's batches.

    Position and errors refer to yielded batches, not to prefetched ones: a restored state continues with
    exactly the next batch, and an error is raised in place of its batch.

    Args:
        reader: reader of the batches; with pin_memory if the device is a GPU.
        device: device of the batches.
        shuffle_on: where rows are shuffled: "host", by the reader's threads; "device", on the GPU, which then keeps
            shuffle windows in its memory; "auto": on the GPU if `Reader.no_device_shuffle_reason` is None. The batches
            are the same.

    Raises:
        ConfigError: shuffle_on is "device", but a device shuffle is not possible.

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
        reason = None if shuffle_on == "host" else self._ineligible_reason()
        if shuffle_on == "device" and reason is not None:
            raise ConfigError(
                f"rows cannot be shuffled on the device: {reason}", value=shuffle_on, allowed="auto, host",
                fix='set "auto", which falls back to the host',
            )  # fmt: skip
        self._shuffle_on = shuffle_on
        self._shuffle_device = device if shuffle_on != "host" and reason is None else None
        self._place = (reader.epoch, reader.position)
        self._waiting: deque[_Waiting] = deque()
        self.look_ahead: LookAhead | None = None
        """Receives prefetched batches, so that rows of their tables can be fetched."""
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
        """Return the feed of a rank's local batches.

        Args:
            dataset: the data to read.
            batch_size: rows of the global batch.
            device: device of the batches.
            group: the ranks that share the global batches; None: this process only.
            shuffle_on: see `DeviceFeed`.
            options: options of `Reader`. Threads and page-locked memory are chosen for the device.
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
            TypeError: the length of a stream is not known.
        """
        if isinstance(self.reader, StreamReader):
            raise TypeError("a stream has no known number of batches")
        return len(self.reader)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._place[0]

    @property
    def has_length(self) -> bool:
        """Whether the number of rows per epoch is known; for a stream it is not."""
        return isinstance(self.reader, Reader)

    @property
    def share_of_whole(self) -> int | None:
        """Rows of the local batch of a full batch; None if ranks differ, or for a stream."""
        reader = self.reader
        if isinstance(reader, StreamReader) or reader.batch_size % reader.num_ranks:
            return None
        return reader.batch_size // reader.num_ranks * reader.rows_each

    @property
    def is_whole(self) -> bool:
        """Whether the last global batch was full; each rank computes it without communication."""
        reader = self.reader
        if isinstance(reader, StreamReader):
            return False
        return self._place[1] * reader.batch_size <= reader.dataset.num_rows

    def __iter__(self) -> Iterator[Batch]:
        """Continue at the current position."""
        if self._waiting:
            self.close()
        if self._copies is None and self._ahead is not None:
            return self._announced(iter(self.reader), self._ahead)
        if self._copies is None:
            return self._read_directly(iter(self.reader))
        return self._prefetched(self._pending_batches(), self._copies)

    def _pending_batches(self) -> Iterator[PendingBatch]:
        reader = self.reader
        if not isinstance(reader, Reader):
            return ((Run.one(batch), 0, batch.origin) for batch in reader)
        if self._needs_host and self._shuffle_device is not None:
            # Rows of tables are fetched by keys that the host knows: it shuffles, and the batches are the same.
            if self._shuffle_on == "device":
                _log.info("rows are shuffled by the host, not by the GPU: tables in tiers need their keys there")
            return reader.pending_batches(None)
        return reader.pending_batches(self._shuffle_device)

    @property
    def _ahead(self) -> LookAhead | None:
        """What batches are announced to, if it fetches rows."""
        ahead = self.look_ahead
        if ahead is None or not ahead.is_needed:
            return None
        # Streams of several processes may end at different batches.
        return ahead if isinstance(self.reader, Reader) or not ahead.exchanges else None

    @property
    def _needs_host(self) -> bool:
        """Whether keys in host memory are needed before their batch is on the device."""
        ahead = self._ahead
        return ahead is not None and ahead.needs_host

    @property
    def _only_copies(self) -> bool:
        """Whether the reader's threads only copy rows, and neither decode nor shuffle them."""
        reader = self.reader
        return self._shuffle_device is not None and isinstance(reader, Reader) and reader.dataset.storage.mapped

    def _ineligible_reason(self) -> str | None:
        """Return why rows cannot be shuffled on the device, or None if they can."""
        if self.device.type != "cuda":
            return "the device is not a GPU"
        if not isinstance(self.reader, Reader):
            return "rows of a stream are not shuffled"
        return self.reader.no_device_shuffle_reason(self.device)

    def read_on(self, until_epoch: int) -> None:
        """Read all epochs up to this one without a pause in between; see `until_epoch` of `Reader`.

        Takes effect when an epoch begins, and does nothing for a stream.
        """
        if isinstance(self.reader, Reader):
            self.reader.until_epoch = until_epoch

    def _read_directly(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            with time_range("read"):
                batch = next(batches, None)
            self._place = (self.reader.epoch, self.reader.position)
            if batch is None:
                return
            yield batch

    def _announced(self, batches: Iterator[Batch], ahead: LookAhead) -> Iterator[Batch]:
        """Yield the reader's batches, and announce those that follow."""
        waiting, announced, ended = self._waiting, 0, False
        while True:
            while not ended and len(waiting) <= ahead.num_batches:
                with time_range("read"):
                    waiting.append(self._next(batches))
                ended = not isinstance(waiting[-1].batch, Batch)
            announced = self._announce(ahead, announced)
            first = waiting.popleft()
            announced = max(0, announced - 1)
            self._place = first.place
            if isinstance(first.batch, Exception):
                raise first.batch
            if first.batch is None:
                return
            yield first.batch
            ahead.forget(first.batch)

    def _announce(self, ahead: LookAhead, announced: int) -> int:
        """Announce waiting batches behind those that were, as far as that is possible; return how many are now."""
        waiting = [*self._waiting][: ahead.num_batches + 1]
        ahead.exchange(one.batch for one in waiting)
        for one in waiting[announced:]:
            if not isinstance(one.batch, Batch) or not ahead.announce(one.batch, one.host):
                break
            announced += 1
        return announced

    def _next(self, batches: Iterator[Batch]) -> _Waiting:
        try:
            batch = next(batches, None)
        except Exception as error:
            return _Waiting(error, self._place)
        return _Waiting(batch, (self.reader.epoch, self.reader.position))

    def _prefetched(self, pending_batches: Iterator[PendingBatch], copies: _Copies) -> Iterator[Batch]:
        waiting, ahead = self._waiting, self._ahead
        announced, ended = 0, False
        while True:
            while not ended and len(waiting) <= _AHEAD and (self._must_wait(ahead) or self.reader.ready):
                waiting.append(self._take(pending_batches, copies))
                ended = not isinstance(waiting[-1].batch, Batch)
            if ahead is not None:
                announced = max(0, self._announce(ahead, announced) - 1)
            first = waiting.popleft()
            self._place = first.place
            if first.batch is None:
                return
            if isinstance(first.batch, Exception):
                raise first.batch
            copies.finish(first)
            yield first.batch
            if ahead is not None:
                ahead.forget(first.batch)

    def _must_wait(self, ahead: LookAhead | None) -> bool:
        """Whether another batch has to be waited for: the first one; of several processes all that are exchanged ahead.

        Waiting for more would delay a step that is ready.
        """
        needed = ahead.num_batches + 1 if ahead is not None and ahead.exchanges else 1
        return len(self._waiting) < needed

    def _take(self, pending_batches: Iterator[PendingBatch], copies: _Copies) -> _Waiting:
        """Take the reader's next batch and start its copy."""
        try:
            with time_range("read"):
                pending = next(pending_batches, None)
        except Exception as error:
            return _Waiting(error, self._place)
        place = (self.reader.epoch, self.reader.position)
        if pending is None:
            return _Waiting(None, place)
        with time_range("to device"):
            waiting = copies.start(pending, place)
        run, number, origin = pending
        return replace(waiting, host=run.batch(number, origin)) if self._needs_host else waiting

    def state(self) -> dict[str, Any]:
        """Return the reader's position after the batches that were yielded."""
        epoch, batches = self._place
        return {**self.reader.state(), "epoch": epoch, "batches": batches}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after those yielded when `state` was taken; see `Reader.restore`."""
        self._waiting.clear()
        self.reader.restore(state)
        self._place = (self.reader.epoch, self.reader.position)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the position in the current epoch is kept. Streams have no epochs to choose."""
        if isinstance(self.reader, Reader):
            self._waiting.clear()
            self.reader.set_epoch(epoch)
            self._place = (self.reader.epoch, self.reader.position)

    @property
    def position(self) -> int:
        """Batches of this epoch that were yielded."""
        return self._place[1]

    def close(self) -> None:
        """Stop the reader's threads and keep the position."""
        self.reader.close()
        if self.look_ahead is not None:
            self.look_ahead.end()
        if self._waiting:
            self.restore(self.state())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Copies:
    """Copies to a GPU on a separate stream, and a bound on the number of queued steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.queued: deque[torch.cuda.Event] = deque()
        self._num_finished = 0
        self._there: weakref.WeakKeyDictionary[Run, tuple[Run, torch.cuda.Event]] = weakref.WeakKeyDictionary()

    def start(self, pending: PendingBatch, place: tuple[int, int]) -> _Waiting:
        """Queue the copy of a batch; its host memory is not reused before the copy is finished.

        All batches of a `Run` are copied together with its first.
        """
        run, number, origin = pending
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
        """Make the current stream wait for the copy."""
        assert isinstance(waiting.batch, Batch)
        if self._num_finished % _STEPS_BETWEEN == 0:
            self._limit_queue()
        self._num_finished += 1
        waiting.batch.wait()

    def _limit_queue(self) -> None:
        """Wait until the number of queued steps is within the bound."""
        if len(self.queued) < _MOST_QUEUED // _STEPS_BETWEEN - 1:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            event = self.queued.popleft()
            event.synchronize()
        event.record(torch.cuda.current_stream(self.device.index))
        self.queued.append(event)


def num_threads(only_copies: bool = False) -> int:
    """Return the number of reader threads for one GPU: half of the cores per process, 2 to 8.

    Args:
        only_copies: the threads only copy rows, so they are bound by memory: 4 are enough, and more would slow down the
            thread that launches kernels.

    Example:
        >>> 2 <= num_threads() <= 8
        True
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    most = _MOST_COPYING if only_copies else _MOST_THREADS
    return min(most, max(2, usable_cores() // processes // 2))

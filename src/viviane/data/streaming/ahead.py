"""A thread that prefetches and decodes messages for the reader: a bounded number of rows, in the order of the log.

It does not depend on batches: the reader takes rows from the queue and advances offsets as it yields them, so rows that
are still in the queue are read again after a resume.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.core.logging import get_logger
from viviane.data.row_buffer import RowView
from viviane.data.streaming.bounds import Position, StreamBounds
from viviane.data.streaming.merge import Merge
from viviane.data.streaming.messages import BadMessageError, MessageDecoder
from viviane.data.streaming.topic import EndOfLog, Message, Topic

POLL_S: Final = 0.25
_MOST_MESSAGES: Final = 16_384
_AHEAD: Final = 4  # maximum batches of rows in the queue
_PATIENCE_S: Final = 2.0  # longer than a poll of responsive brokers
_log = get_logger("streaming")


class Rows:
    """Decoded rows of several messages that have not been yielded yet.

    Args:
        view: all rows.
        messages: the messages of the rows.
        counts: number of rows of each message.
        taken: number of rows of each message that earlier batches took.
    """

    def __init__(self, view: RowView, messages: list[Message], counts: NDArray[np.int64], taken: list[int]) -> None:
        self.view, self.at = view, 0
        self._messages, self._taken = messages, np.minimum(taken, counts)
        ends = np.cumsum(counts)
        kept = [np.arange(end - count + skip, end) for end, count, skip in zip(ends, counts, self._taken, strict=True)]
        self._rows: NDArray[np.int64] = np.concatenate(kept)
        self._ends = np.cumsum(counts - self._taken)
        self.count = len(self._rows)

    def take(self, most: int) -> tuple[NDArray[np.int64], dict[int, Position]]:
        """Return the next rows, and the next position of each of their partitions."""
        first, self.at = self.at, min(self.count, self.at + most)
        places: dict[int, Position] = {}
        start, stop = (int(np.searchsorted(self._ends, row, side="right")) for row in (first, self.at))
        for number in range(start, stop):  # messages whose last row is taken
            places[self._messages[number].partition] = (self._messages[number].offset + 1, 0)
        before = int(self._ends[stop - 1]) if stop else 0
        if self.at > before:  # some rows of the next message
            message = self._messages[stop]
            places[message.partition] = (message.offset, int(self._taken[stop]) + self.at - before)
        return self._rows[first : self.at], places


@dataclass(frozen=True)
class Found:
    """The result of one poll of the topic: rows, then partitions that ended, or an error."""

    rows: Rows | None = None
    ended: frozenset[int] = frozenset()
    num_skipped: int = 0
    error: BaseException | None = field(default=None, repr=False)


class DecodeAhead:
    """Fetches and decodes in a separate thread; one consumer takes the results in order.

    The thread waits while the queue holds rows of `_AHEAD` batches. An error ends the thread and is its last result.

    Args:
        bounds: bounds of the stream.
        on_bad_message: "error" raises for an unreadable message, "skip" skips it.
        topic: a connection that is used only here from now on; `close` closes it.
        decoder: decoder of the messages.
        places: start position of each partition; some rows of its first message may have been yielded already.
        batch_size: rows of a local batch.
        bases: base offset of each partition, for an order of messages that does not depend on their arrival: by
            distance from the base, then by partition. None: in arrival order.
    """

    def __init__(
        self, bounds: StreamBounds, on_bad_message: Literal["error", "skip"], topic: Topic, decoder: MessageDecoder,
        places: Mapping[int, Position], batch_size: int, bases: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._bounds, self._topic, self._decoder = bounds, topic, decoder
        self._on_bad_message = on_bad_message
        self._places, self._batch_size = dict(places), batch_size
        self._open = bounds.unfinished(topic, {one: place[0] for one, place in places.items()})
        self._at_log_end: set[int] = set()
        self._most = min(batch_size, _MOST_MESSAGES)
        self._merge = None if bases is None else Merge(topic, self._open, bases, self._most)
        self._skipped = 0
        self._found: deque[Found] = deque()
        self._waiting_rows = 0
        self._changed = threading.Condition()
        self._closed = self._done = self._left_alone = False
        self.partitions = frozenset(self._open)
        topic.start({one: place[0] for one, place in places.items() if one in self._open})
        self._thread = threading.Thread(target=self._work, name="viviane-stream", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Number of rows that are decoded and not taken yet."""
        return self._waiting_rows

    def next(self, seconds: float) -> Found | None:
        """Return the next result, or None after this many seconds.

        Raises:
            DataError, RemoteError: the error of the thread, after all earlier results.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._found, seconds):
                return None
            found = self._found.popleft()
            self._waiting_rows -= found.rows.count if found.rows else 0
            self._changed.notify_all()
        if found.error is not None:
            raise found.error
        return found

    def close(self) -> None:
        """Stop the thread, wait for its last poll, and disconnect.

        A thread that waits for unresponsive brokers is not joined: it ends when its retries are exhausted.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done, _PATIENCE_S)
            self._left_alone = not self._done
        if not self._left_alone:
            self._thread.join()
            self._topic.close()

    def _work(self) -> None:
        try:
            while self._open and self._room():
                self._put(self._look())
        except BaseException as error:  # raised again by the consumer
            self._put(Found(num_skipped=self._skipped, error=error))
        with self._changed:
            self._done = True
            self._changed.notify_all()
            if not self._left_alone:
                return
        self._topic.close()

    def _room(self) -> bool:
        """Wait for space in the queue; return False once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting_rows < _AHEAD * self._batch_size)
            return not self._closed

    def _put(self, found: Found) -> None:
        with self._changed:
            self._found.append(found)
            self._waiting_rows += found.rows.count if found.rows else 0
            self._skipped = 0
            self._changed.notify_all()

    def _look(self) -> Found:
        """Fetch messages, detect partitions that end, and decode the rest."""
        before = frozenset(self._open)
        messages = []
        wait = POLL_S if self._merge is None or not self._merge.is_ready else 0.0
        for one in self._topic.poll(self._most, wait):
            if one.partition not in self._open or (self._merge is not None and self._merge.is_fetched(one.partition)):
                continue
            if self._bounds.is_end(one):
                self._finish(one.partition)
            elif isinstance(one, EndOfLog):
                self._at_log_end.add(one.partition)
            else:
                self._at_log_end.discard(one.partition)
                messages.append(one)
        if self._bounds.is_over:
            for partition in self._at_log_end & self._open:
                self._finish(partition)
        if self._merge is not None:
            messages = self._merge.add(messages)
            self._open = self._merge.open
        rows = self._decode(messages)
        return Found(rows, before - self._open, self._skipped)

    def _decode(self, messages: list[Message]) -> Rows | None:
        """Decode messages; rows of the first one of each partition that were already yielded are skipped."""
        while messages:
            try:
                view, counts = self._decoder.decode([one.value for one in messages])
            except BadMessageError as error:
                self._bad(messages.pop(error.index), error)
                continue
            taken = [self._places.get(one.partition, (0, 0)) for one in messages]
            skip = [rows if one.offset == offset else 0 for one, (offset, rows) in zip(messages, taken, strict=True)]
            return Rows(view, messages, counts, skip)
        return None

    def _finish(self, partition: int) -> None:
        if self._merge is None:
            self._open.discard(partition)
        else:
            self._merge.end(partition)
        self._topic.stop(partition)

    def _bad(self, message: Message, error: BadMessageError) -> None:
        where = f"{self._bounds.path}, partition {message.partition}, offset {message.offset}"
        if self._on_bad_message == "error":
            raise DataError(
                "a message cannot be decoded", where=where, value=error.cause,
                fix='correct the producer, or set on_bad_message="skip", which skips and counts such messages',
            ) from error  # fmt: skip
        self._skipped += 1
        _log.warning("skipped a message that cannot be decoded: %s: %s", where, error.cause)

"""A thread that fetches and decodes messages ahead of the reader, a bounded number of rows, in the order of the log.

It knows nothing of batches: the reader takes rows from the queue and counts offsets as it delivers them, so that what
lies in the queue is read again after a resume.
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
from viviane.data.block import View
from viviane.data.streaming.bounds import Position, StreamBounds
from viviane.data.streaming.merge import Merge
from viviane.data.streaming.messages import BadMessageError, MessageDecoder
from viviane.data.streaming.topic import EndOfLog, Message, Topic

POLL_S: Final = 0.25
_MOST_MESSAGES: Final = 16_384
_AHEAD: Final = 4  # batches whose rows may wait
_PATIENCE_S: Final = 2.0  # longer than a look at brokers that answer
_log = get_logger("streaming")


class Rows:
    """Decoded rows that are not delivered yet, of several messages.

    Args:
        view: all rows.
        messages: where they come from.
        counts: rows of each message.
        taken: rows of each message that an earlier batch took.
    """

    def __init__(self, view: View, messages: list[Message], counts: NDArray[np.int64], taken: list[int]) -> None:
        self.view, self.at = view, 0
        self._messages, self._taken = messages, np.minimum(taken, counts)
        ends = np.cumsum(counts)
        kept = [np.arange(end - count + skip, end) for end, count, skip in zip(ends, counts, self._taken, strict=True)]
        self._rows: NDArray[np.int64] = np.concatenate(kept)
        self._ends = np.cumsum(counts - self._taken)
        self.count = len(self._rows)

    def take(self, most: int) -> tuple[NDArray[np.int64], dict[int, Position]]:
        """Return the next rows, and what then comes next in each partition they are of."""
        first, self.at = self.at, min(self.count, self.at + most)
        places: dict[int, Position] = {}
        start, stop = (int(np.searchsorted(self._ends, row, side="right")) for row in (first, self.at))
        for number in range(start, stop):  # messages whose last row is among them
            places[self._messages[number].partition] = (self._messages[number].offset + 1, 0)
        before = int(self._ends[stop - 1]) if stop else 0
        if self.at > before:  # some rows of the next one
            message = self._messages[stop]
            places[message.partition] = (message.offset, int(self._taken[stop]) + self.at - before)
        return self._rows[first : self.at], places


@dataclass(frozen=True)
class Found:
    """What came of one look at the topic, in its order: rows, then partitions that ended, or an error."""

    rows: Rows | None = None
    ended: frozenset[int] = frozenset()
    num_skipped: int = 0
    error: BaseException | None = field(default=None, repr=False)


class DecodeAhead:
    """Fetches and decodes in a thread of its own; one consumer takes what was found, in order.

    The thread waits while the queue holds rows of `_AHEAD` batches. An error ends it, and is the last thing found.

    Args:
        bounds: of the stream.
        on_bad_message: "error" raises for a message that cannot be read, "skip" leaves it out.
        topic: a connection that is used by nothing else from now on; closed by `close`.
        decoder: of the messages.
        places: where each partition is read from; rows of the first message may have been delivered.
        batch_size: rows of a batch here.
        bases: where each partition is counted from, for an order of messages that does not depend on when they come:
            the partitions' messages by their distance from there, of equal ones the smaller partition's first. None:
            in the order in which they come.
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
        """Rows that are decoded and not taken yet."""
        return self._waiting_rows

    def next(self, seconds: float) -> Found | None:
        """Return what was found next, or None after this many seconds.

        Raises:
            DataError, RemoteError: what the thread met, after everything that it found before.
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
        """Stop the thread, wait for its last look at the topic, and leave the brokers.

        A thread that is asking brokers that do not respond is left to itself: it leaves when its retries are over.
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
        """Wait for room in the queue; False once it is closed."""
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
        """Fetch messages, see which partitions end, and decode the rest."""
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
        """Decode messages; rows of the first one of each partition that were delivered earlier are left out."""
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
                "a message cannot be read", where=where, value=error.cause,
                fix='correct who writes them; on_bad_message="skip" leaves such messages out and counts them',
            ) from error  # fmt: skip
        self._skipped += 1
        _log.warning("left out a message that cannot be read: %s: %s", where, error.cause)

"""Batches of a topic's messages, with offsets that say exactly which message comes next."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.core.errors import CheckpointError, ConfigError
from viviane.data.block import View
from viviane.data.buffers import Buffers
from viviane.data.slab import BatchShape, Slab
from viviane.data.streaming.ahead import POLL_S, DecodeAhead, Place, Rows
from viviane.data.streaming.messages import MessageDecoder

if TYPE_CHECKING:
    from viviane.data.streaming.kafka import KafkaStream

STATE_VERSION: Final = 1
Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Gives the numbers of every process, in order of rank."""
_REMEMBERED: Final = 16  # batches that a consumer may take ahead of the one it works on


class StreamReader:
    """Iterates over batches of a topic from its current offsets on; made by `KafkaStream.reader`.

    A batch is delivered when it has its rows, or earlier: `max_wait_s` after its first row came. With an end, the
    epoch ends there and the next one begins where this one did.

    Args:
        stream: the topic.
        batch_size: rows of a batch, B, over all ranks.
        epoch: which epoch to start with.
        drop_last: leave out a last batch that is shorter than batch_size.
        max_batches: end the epoch after so many batches.
        rank, num_ranks: this reader takes the partitions p with p % num_ranks == rank, and its share of each batch.

    Raises:
        ConfigError: several ranks without a way to agree, or a number out of range.
        DataError, RemoteError: there is no such topic, or no broker answers.
    """

    def __init__(
        self, stream: KafkaStream, batch_size: int, *, epoch: int, drop_last: bool, max_batches: int | None, rank: int,
        num_ranks: int,
    ) -> None:  # fmt: skip
        if batch_size < num_ranks or not 0 <= rank < num_ranks:
            raise ConfigError("a batch needs a row for every rank", value=batch_size, allowed=f"{num_ranks} or more")
        if num_ranks > 1 and stream.exchange is None:
            raise ConfigError(
                "ranks that share a stream have to agree on each batch",
                fix="train with Trainer.fit or Model.fit; in a loop of your own, use stream.connected(...)",
            )
        self.stream, self.batch_size, self.drop_last, self.max_batches = stream, batch_size, drop_last, max_batches
        self.rank, self.num_ranks = rank, num_ranks
        self.num_skipped = 0
        self._share = batch_size * (rank + 1) // num_ranks - batch_size * rank // num_ranks
        self._shape = BatchShape.of(stream.schema)
        self._decoder = MessageDecoder(stream.messages, stream.schema, stream.etl)
        self._buffers = Buffers(False)
        topic = stream.connect()
        try:
            self._beginning = stream.first_places(topic)
        finally:
            topic.close()  # reading connects anew
        self.topic_id, self._all_partitions = topic.topic_id, topic.partitions
        self._own = [one for one in self._all_partitions if one % num_ranks == rank]
        self._epoch, self._delivered = epoch, 0
        self._places: dict[int, Place] = dict(self._beginning)
        self._history: deque[tuple[int, dict[int, Place]]] = deque([(0, dict(self._places))], _REMEMBERED)
        self._ahead: DecodeAhead | None = None
        self._rest: Rows | None = None
        self._open_ends: set[int] = set()  # partitions that have not come to their end

    @property
    def epoch(self) -> int:
        """The epoch that the reader stands in, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Batches of this epoch that were delivered."""
        return self._delivered

    @property
    def ready(self) -> bool:
        """Whether the rows of the next batch are decoded; never known where other ranks have a say."""
        if self._ahead is None or self.num_ranks > 1:
            return False
        rest = 0 if self._rest is None else self._rest.count - self._rest.at
        return rest + self._ahead.waiting_rows >= self._share

    # Reading ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Continue with the next message."""
        self.close()
        own = {one: self._places.get(one, (0, 0)) for one in self._own}
        topic = self.stream.connect()
        try:
            bases = {one: place[0] for one, place in self._beginning.items()} if self.stream.is_bounded else None
            self._ahead = ahead = DecodeAhead(self.stream, topic, self._decoder, own, self._share, bases)
        except BaseException:
            topic.close()
            raise
        # A reader that is dropped, or stands at the end of the process, leaves no thread behind.
        self._dropped = weakref.finalize(self, ahead.close)
        self._rest, self._open_ends = None, set(ahead.partitions)
        return self._batches(ahead)

    def _batches(self, ahead: DecodeAhead) -> Iterator[Batch]:
        while self.max_batches is None or self._delivered < self.max_batches:
            before = dict(self._places)
            parts, places = self._gather_rows(ahead)
            count = sum(len(rows) for _, rows in parts)
            short = not self._open_ends and count < self._share and self.drop_last
            if short or not parts:
                count, parts = 0, [(self._decoder.empty(), np.empty(0, np.int64))]
            num_rows, ended, stops = self._agree(count, places)
            if stops:
                self._places = before  # what was read and not delivered is read again
                return
            if num_rows == 0:
                if ended:
                    break
                continue
            self._delivered += 1
            self._history.append((self._delivered, dict(self._places)))
            yield Slab.gather(self._shape, parts, self._buffers).batch(self._shape, self._origin())
        self._epoch, self._delivered, self._places = self._epoch + 1, 0, dict(self._beginning)
        self._history.clear()
        self._history.append((0, dict(self._places)))

    def _origin(self) -> str:
        ends = ", ".join(f"{partition}: {place[0]}" for partition, place in sorted(self._places.items()))
        return f"{self.stream.path}, batch {self._delivered - 1} (before offsets {ends})"

    def _gather_rows(self, ahead: DecodeAhead) -> tuple[list[tuple[View, NDArray[np.int64]]], dict[int, Place]]:
        """Collect rows of a batch until it is whole, `max_wait_s` is over, the stream ends or the run stops."""
        parts: list[tuple[View, NDArray[np.int64]]] = []
        places: dict[int, Place] = {}
        count, wait = 0, self.stream.max_wait_s
        # alone, a batch's time begins with its first row; together, nobody lets the others wait for long
        deadline = None if wait is None or self.num_ranks == 1 else time.monotonic() + wait
        while count < self._share and not self.stream.stop():
            if self._rest is None or self._rest.at == self._rest.count:
                left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
                if left <= 0 or not self._open_ends:
                    break
                found = ahead.next(left)
                if found is not None:
                    self._rest = found.rows
                    self._open_ends -= found.ended
                    self.num_skipped += found.num_skipped
                continue
            if deadline is None and wait is not None:
                deadline = time.monotonic() + wait
            rows, reached = self._rest.take(self._share - count)
            parts.append((self._rest.view, rows))
            places |= reached
            count += len(rows)
        return parts, places

    def _agree(self, count: int, places: dict[int, Place]) -> tuple[int, bool, bool]:
        """Move on to the places of all ranks; returns rows of the whole batch, whether all ended, whether one stops."""
        stops = self.stream.stop()
        if self.num_ranks == 1:
            if count:
                self._places |= places
            return count, not self._open_ends and count == 0, stops and count < self._share
        assert self.stream.exchange is not None
        reached = self._places | (places if count else {})
        own = [number for one in self._own for number in reached.get(one, (0, 0))]
        padding = [0] * (2 * -(-len(self._all_partitions) // self.num_ranks) - len(own))
        every = self.stream.exchange([count, int(bool(self._open_ends)), int(stops), *own, *padding])
        if any(one[2] for one in every):
            return 0, False, True
        for rank, numbers in enumerate(every):
            theirs = [one for one in self._all_partitions if one % self.num_ranks == rank]
            self._places |= {p: (numbers[3 + 2 * i], numbers[4 + 2 * i]) for i, p in enumerate(theirs)}
        return sum(one[0] for one in every), not any(one[1] for one in every), False

    # Position ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the place as plain data: offsets of the next message of each partition, after recent batches."""
        after = {str(n): {str(p): list(place) for p, place in sorted(places.items())} for n, places in self._history}
        return {
            "version": STATE_VERSION, "topic": self.stream.topic, "topic_id": self.topic_id,
            "messages": self.stream.messages, "epoch": self._epoch, "batches": self._delivered, "offsets_after": after,
            "beginning": {str(partition): list(place) for partition, place in sorted(self._beginning.items())},
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the message that would have come after `state` was taken.

        Raises:
            CheckpointError: the state is of another topic, or of one that was deleted and made anew.
        """
        try:
            version, epoch, batches = state["version"], int(state["epoch"]), int(state["batches"])
            found = state["offsets_after"][str(batches)]
            places = {int(partition): (int(place[0]), int(place[1])) for partition, place in found.items()}
            begun = state.get("beginning", {})  # versions before 0.2 did not save it
            beginning = {int(partition): (int(place[0]), int(place[1])) for partition, place in begun.items()}
            known = {name: state[name] for name in ("topic", "topic_id", "messages")}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError("not a position in a stream", value=str(error), fix="resume with the data set of "
                                  "the run that was saved") from error  # fmt: skip
        wanted = {"topic": self.stream.topic, "messages": self.stream.messages, "topic_id": self.topic_id}
        for name, value in wanted.items():
            if known[name] != value and not (name == "topic_id" and None in (known[name], value)):
                what = "topic, which was deleted and made anew since" if name == "topic_id" else name
                raise CheckpointError(
                    f"the saved position is of another {what}", where=self.stream.path, value=known[name],
                    allowed=str(value), fix="start a new run",
                )  # fmt: skip
        if version != STATE_VERSION:
            raise CheckpointError("a position of another version", value=version, allowed=str(STATE_VERSION))
        self.close()
        self._beginning |= beginning
        self._epoch, self._delivered, self._places = epoch, batches, {**self._beginning, **places}
        self._history.clear()
        self._history.append((batches, dict(self._places)))

    def close(self) -> None:
        """Stop the thread that decodes, and leave the brokers; the position stays."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._dropped.detach()
            ahead.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A Kafka topic as a data set, and the reader of its batches, whose position is the offset of the next message."""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.core.errors import CheckpointError, ConfigError, SchemaError, suggest
from viviane.data.buffers import Buffers
from viviane.data.host_gather import gather
from viviane.data.packed_layout import PackedLayout
from viviane.data.row_buffer import RowView
from viviane.data.streaming.ahead import POLL_S, DecodeAhead, Rows
from viviane.data.streaming.bounds import Bound, Position, StreamBounds
from viviane.data.streaming.messages import MessageDecoder, MessageKind, RowTransform
from viviane.data.streaming.topic import Topic
from viviane.schema import Schema

STATE_VERSION: Final = 1
Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Gathers the values of all processes, in order of rank."""
_MAX_WAIT_S: Final = 1.0
_OPTIONS: Final = ("messages", "start", "end", "max_wait_s", "on_bad_message")
_REMEMBERED: Final = 16  # maximum batches that a consumer prefetches


class KafkaStream:
    """Rows of a Kafka topic, for `Trainer.fit` and `Model.fit` instead of a data set.

    Offsets are stored in the checkpoints of the run and never committed to Kafka, so that a resumed run trains on
    exactly the next message.

    A bounded stream, whose end is "now", offsets or a time that has passed, yields the same batches whenever it is read
    between the same offsets by the same number of processes, also across stops and resumes, and regardless of the speed
    of brokers and processes: messages are ordered by their distance from the start of their partition. With
    `max_wait_s` the time may end a batch early. "now" is the end of each partition when reading reaches it, which
    changes while messages are written.

    Other streams yield rows in arrival order. `solver.shuffle` and `seed` have no effect, and an endless stream has one
    epoch; `solver.max_steps`, a callback, Ctrl-C or SIGTERM ends it. Processes share the partitions.

    Args:
        servers: host:port of brokers, separated by commas. User and password are read from the environment:
            VIVIANE_KAFKA_USERNAME, VIVIANE_KAFKA_PASSWORD.
        topic: name of the topic.
        schema: the columns of a row; omit it if an ETL is given.
        etl: a fitted ETL that transforms messages of raw rows; its filters do not apply.
        messages: "json": each message is an object, one row; "arrow": each message is an Arrow IPC stream of any
            number of rows.
        start: start of a new run: "beginning", "end", offsets by partition, or a time (datetime, or ISO text).
        end: None is endless; "now": the end of the log when reading reaches it; offsets by partition, exclusive; or a
            time.
        max_wait_s: yield an incomplete batch this many seconds after its first row; None waits. By default None for a
            bounded stream, 1 for others.
        on_bad_message: "error", or "skip", which skips, counts and logs unreadable messages.
        settings: librdkafka's settings, such as {"security.protocol": "SASL_SSL"}; no credentials.

    Raises:
        ConfigError: a setting is invalid.
        SchemaError: neither a schema nor an ETL is given.

    Example:
        >>> stream = KafkaStream("localhost:9092", "clicks", Schema(dense=[{"name": "x"}]), end={0: 1000})
        >>> stream
        KafkaStream('kafka://localhost:9092/clicks')
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        schema: Schema | None = None,
        *,
        etl: RowTransform | None = None,
        messages: MessageKind = "json",
        start: Bound = "beginning",
        end: Bound | None = None,
        max_wait_s: float | Literal["auto"] | None = "auto",
        on_bad_message: Literal["error", "skip"] = "error",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if "@" in servers:
            raise ConfigError(
                "servers must not contain a user or a password", fix="set VIVIANE_KAFKA_USERNAME and _PASSWORD"
            )
        if (schema is None) == (etl is None):
            raise SchemaError("a stream needs the schema of its rows, or the ETL of its raw rows", where=topic)
        if max_wait_s == "auto":
            max_wait_s = None if end == "now" or isinstance(end, Mapping) else _MAX_WAIT_S
        if max_wait_s is not None and not max_wait_s > 0:
            raise ConfigError("max_wait_s is too small", value=max_wait_s, allowed="more than 0, or None")
        if on_bad_message not in ("error", "skip"):
            raise ConfigError("unknown on_bad_message", value=on_bad_message, allowed="error, skip")
        self.servers, self.topic, self.etl, self.messages = servers, topic, etl, messages
        self.schema: Schema = schema if schema is not None else etl.schema  # type: ignore[union-attr]
        self.max_wait_s: float | None = max_wait_s
        self.on_bad_message = on_bad_message
        self.settings = dict(settings or {})
        self.path = f"kafka://{servers}/{topic}"
        self.bounds = StreamBounds(self.path, start, end)
        self.info: dict[str, Any] = {}
        self.exchange: Exchange | None = None
        self.stop: Callable[[], bool] = lambda: False

    @classmethod
    def from_url(cls, url: str, schema: Schema | None = None, *, etl: RowTransform | None = None) -> Self:
        """Create a stream from a URL: kafka://host:9092/topic?start=end&max_wait_s=5.

        Raises:
            ConfigError: an option is unknown.

        Example:
            >>> KafkaStream.from_url("kafka://a:9092,b:9092/clicks?end=now", Schema(dense=[{"name": "x"}])).servers
            'a:9092,b:9092'
        """
        parts = urlsplit(url)
        options: dict[str, Any] = dict(parse_qsl(parts.query))
        for name in options:
            if name not in _OPTIONS:
                raise ConfigError(
                    "unknown option of a stream", where=parts.path, value=name, fix=suggest(name, _OPTIONS)
                )
        if parts.scheme != "kafka" or not parts.netloc or not parts.path.strip("/"):
            raise ConfigError("not a stream URL", value=parts.path, allowed="kafka://host:port/topic")
        if "max_wait_s" in options:
            options["max_wait_s"] = float(options["max_wait_s"])
        return cls(parts.netloc, parts.path.strip("/"), schema, etl=etl, **options)

    def __repr__(self) -> str:
        return f"KafkaStream({self.path!r})"

    def connected(self, exchange: Exchange, stop: Callable[[], bool]) -> Self:
        """Return this stream for processes that read it together, with a request to stop.

        Args:
            exchange: gathers the values of all processes, in order of rank.
            stop: returns whether the run should end before a batch is full.
        """
        other = copy.copy(self)
        other.exchange, other.stop = exchange, stop
        return other

    def reader(
        self, batch_size: int, *, epoch: int = 0, drop_last: bool = False, max_batches: int | None = None,
        rank: int = 0, num_ranks: int = 1, **order: Any,
    ) -> StreamReader:  # fmt: skip
        """Return a reader of this stream's batches; options for the order of rows are ignored."""
        del order  # shuffle, seed, threads: see the class docstring
        return StreamReader(
            self, batch_size, epoch=epoch, drop_last=drop_last, max_batches=max_batches, rank=rank, num_ranks=num_ranks
        )

    # Interface to the reader ------------------------------------------------------------------------------

    def connect(self) -> Topic:
        """Return a connection to the topic."""
        return Topic(self.servers, self.topic, self.settings)


class StreamReader:
    """Iterates over batches of a topic from its current offsets on; created by `KafkaStream.reader`.

    A batch is yielded when it is full, or `max_wait_s` after its first row arrived. With an end, the epoch ends there
    and the next one begins where this one did.

    Args:
        stream: the topic.
        batch_size: rows of a batch, B, over all ranks.
        epoch: first epoch.
        drop_last: skip a last batch that is shorter than batch_size.
        max_batches: end the epoch after this many batches.
        rank, num_ranks: this reader reads the partitions p with p % num_ranks == rank, and its share of each batch.

    Raises:
        ConfigError: several ranks without an exchange, or an argument is out of range.
        DataError, RemoteError: the topic does not exist, or no broker responds.
    """

    def __init__(
        self, stream: KafkaStream, batch_size: int, *, epoch: int, drop_last: bool, max_batches: int | None, rank: int,
        num_ranks: int,
    ) -> None:  # fmt: skip
        if batch_size < num_ranks or not 0 <= rank < num_ranks:
            raise ConfigError("a batch needs a row for every rank", value=batch_size, allowed=f"{num_ranks} or more")
        if num_ranks > 1 and stream.exchange is None:
            raise ConfigError(
                "ranks that share a stream must synchronize each batch",
                fix="train with Trainer.fit or Model.fit; in a custom loop, use stream.connected(...)",
            )
        self.stream, self.batch_size, self.drop_last, self.max_batches = stream, batch_size, drop_last, max_batches
        self.rank, self.num_ranks = rank, num_ranks
        self.num_skipped = 0
        self._share = batch_size * (rank + 1) // num_ranks - batch_size * rank // num_ranks
        self._layout = PackedLayout(stream.schema)
        self._decoder = MessageDecoder(stream.messages, stream.schema, stream.etl)
        self._buffers = Buffers(False)
        topic = stream.connect()
        try:
            self._beginning = stream.bounds.first_positions(topic)
        finally:
            topic.close()  # reading reconnects
        self.topic_id, self._all_partitions = topic.topic_id, topic.partitions
        self._own = [one for one in self._all_partitions if one % num_ranks == rank]
        self._epoch, self._delivered = epoch, 0
        self._places: dict[int, Position] = dict(self._beginning)
        self._history: deque[tuple[int, dict[int, Position]]] = deque([(0, dict(self._places))], _REMEMBERED)
        self._ahead: DecodeAhead | None = None
        self._rest: Rows | None = None
        self._open_ends: set[int] = set()  # partitions that have not ended

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Number of batches of this epoch that were yielded."""
        return self._delivered

    @property
    def ready(self) -> bool:
        """Whether the rows of the next batch are decoded; False with several ranks, which decide together."""
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
            bases = {one: place[0] for one, place in self._beginning.items()} if self.stream.bounds.is_bounded else None
            self._ahead = ahead = DecodeAhead(
                self.stream.bounds, self.stream.on_bad_message, topic, self._decoder, own, self._share, bases
            )
        except BaseException:
            topic.close()
            raise
        # A reader that is dropped, or alive at the end of the process, must not leave a thread behind.
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
                self._places = before  # rows that were read but not yielded are read again
                return
            if num_rows == 0:
                if ended:
                    break
                continue
            self._delivered += 1
            self._history.append((self._delivered, dict(self._places)))
            yield gather(self._layout, parts, self._buffers)(self._origin())
        self._epoch, self._delivered, self._places = self._epoch + 1, 0, dict(self._beginning)
        self._history.clear()
        self._history.append((0, dict(self._places)))

    def _origin(self) -> str:
        ends = ", ".join(f"{partition}: {place[0]}" for partition, place in sorted(self._places.items()))
        return f"{self.stream.path}, batch {self._delivered - 1} (before offsets {ends})"

    def _gather_rows(self, ahead: DecodeAhead) -> tuple[list[tuple[RowView, NDArray[np.int64]]], dict[int, Position]]:
        """Collect rows of a batch until it is full, `max_wait_s` has passed, the stream ends or the run stops."""
        parts: list[tuple[RowView, NDArray[np.int64]]] = []
        places: dict[int, Position] = {}
        count, wait = 0, self.stream.max_wait_s
        # one process: the wait begins with the first row; several: it begins now, so that no rank delays the others
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

    def _agree(self, count: int, places: dict[int, Position]) -> tuple[int, bool, bool]:
        """Advance to the positions of all ranks; return global batch rows, whether all ended, whether one stops."""
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
        """Return the position as plain data: offsets of the next message of each partition, after recent batches."""
        after = {str(n): {str(p): list(place) for p, place in sorted(places.items())} for n, places in self._history}
        return {
            "version": STATE_VERSION, "topic": self.stream.topic, "topic_id": self.topic_id,
            "messages": self.stream.messages, "epoch": self._epoch, "batches": self._delivered, "offsets_after": after,
            "beginning": {str(partition): list(place) for partition, place in sorted(self._beginning.items())},
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the message after those yielded when `state` was called.

        Raises:
            CheckpointError: the state belongs to another topic, or the topic was deleted and recreated.
        """
        try:
            version, epoch, batches = state["version"], int(state["epoch"]), int(state["batches"])
            found = state["offsets_after"][str(batches)]
            places = {int(partition): (int(place[0]), int(place[1])) for partition, place in found.items()}
            begun = state.get("beginning", {})  # versions before 0.2 did not save it
            beginning = {int(partition): (int(place[0]), int(place[1])) for partition, place in begun.items()}
            known = {name: state[name] for name in ("topic", "topic_id", "messages")}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError("not a position of a stream", value=str(error), fix="resume with the data set of "
                                  "the run that was saved") from error  # fmt: skip
        wanted = {"topic": self.stream.topic, "messages": self.stream.messages, "topic_id": self.topic_id}
        for name, value in wanted.items():
            if known[name] != value and not (name == "topic_id" and None in (known[name], value)):
                what = "topic, which was deleted and recreated since" if name == "topic_id" else name
                raise CheckpointError(
                    f"the saved position belongs to another {what}", where=self.stream.path, value=known[name],
                    allowed=str(value), fix="start a new run",
                )  # fmt: skip
        if version != STATE_VERSION:
            raise CheckpointError("the position has an unsupported version", value=version, allowed=str(STATE_VERSION))
        self.close()
        self._beginning |= beginning
        self._epoch, self._delivered, self._places = epoch, batches, {**self._beginning, **places}
        self._history.clear()
        self._history.append((batches, dict(self._places)))

    def close(self) -> None:
        """Stop the decoding thread and disconnect; the position is kept."""
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

"""A Kafka topic where a data set is taken: endless, or up to offsets or a time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from viviane.core.errors import ConfigError, SchemaError, suggest
from viviane.data.streaming.ahead import Place
from viviane.data.streaming.messages import MessageKind, RowTransform
from viviane.data.streaming.reader import Exchange, StreamReader
from viviane.data.streaming.topic import EndOfLog, Message, Topic
from viviane.schema import Schema

Bound = str | int | datetime | Mapping[int, int]
_MAX_WAIT_S: Final = 1.0
_OPTIONS: Final = ("messages", "start", "end", "max_wait_s", "on_bad_message")


class KafkaStream:
    """Rows of a Kafka topic, for `Trainer.fit` and `Model.fit` in the place of a data set.

    Offsets stand in the checkpoints of the run and are never committed to Kafka, so that a resumed run trains on
    exactly the next message.

    A bounded stream, whose end is "now", offsets or a time that has passed, gives the same batches each time it is read
    from and to the same offsets by the same number of processes, over stops and resumes too, however slow brokers or
    processes are: messages of a process's partitions are put in order by their distance from where the partition
    begins. With `max_wait_s` a batch may be cut short by the clock. "now" is the end of each partition when reading
    comes to it, which is another one each time while messages are written.

    Rows of other streams come as they arrive. `solver.shuffle` and `seed` have no effect, and an endless stream has one
    epoch; it ends by `solver.max_steps`, a callback, Ctrl-C or SIGTERM. Partitions are shared among processes.

    Args:
        servers: host:port of brokers, several with commas. User and password come from the environment:
            VIVIANE_KAFKA_USERNAME, VIVIANE_KAFKA_PASSWORD.
        topic: its name.
        schema: the columns of a row; left out where an ETL says it.
        etl: a fitted ETL that messages of raw rows go through; its filters do not apply.
        messages: "json": one object a message, a row; "arrow": an Arrow IPC stream a message, any number of rows.
        start: of a new run: "beginning", "end", offsets by partition, or a time (datetime, or ISO text).
        end: None is endless; "now": what is there when its end is reached; offsets by partition, the first one that is
            not read; or a time.
        max_wait_s: a batch that is not full is delivered so many seconds after its first row; None waits. By default
            None for a bounded stream, 1 for others.
        on_bad_message: "error", or "skip" leaves messages out that cannot be read, and counts and logs them.
        settings: librdkafka's own, such as {"security.protocol": "SASL_SSL"}; no credentials.

    Raises:
        ConfigError: a setting that cannot be.
        SchemaError: neither schema nor ETL.

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
                "servers must not hold a user or a password", fix="set VIVIANE_KAFKA_USERNAME and _PASSWORD"
            )
        if (schema is None) == (etl is None):
            raise SchemaError("a stream takes the schema of its rows, or the ETL of its raw rows", where=topic)
        if max_wait_s == "auto":
            max_wait_s = None if end == "now" or isinstance(end, Mapping) else _MAX_WAIT_S
        if max_wait_s is not None and not max_wait_s > 0:
            raise ConfigError("max_wait_s is too small", value=max_wait_s, allowed="more than 0, or None")
        if on_bad_message not in ("error", "skip"):
            raise ConfigError("unknown on_bad_message", value=on_bad_message, allowed="error, skip")
        self.servers, self.topic, self.etl, self.messages = servers, topic, etl, messages
        self.schema: Schema = schema if schema is not None else etl.schema  # type: ignore[union-attr]
        self.start, self.end = _bound(start, "start", ("beginning", "end")), _bound(end, "end", ("now",))
        self.max_wait_s: float | None = max_wait_s
        self.on_bad_message = on_bad_message
        self.settings = dict(settings or {})
        self.path = f"kafka://{servers}/{topic}"
        self.info: dict[str, Any] = {}
        self.exchange: Exchange | None = None
        self.stop: Callable[[], bool] = lambda: False

    @classmethod
    def from_url(cls, url: str, schema: Schema | None = None, *, etl: RowTransform | None = None) -> Self:
        """Return the stream of a URL: kafka://host:9092/topic?start=end&max_wait_s=5.

        Raises:
            ConfigError: an unknown option.

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
            raise ConfigError("not the URL of a stream", value=parts.path, allowed="kafka://host:port/topic")
        if "max_wait_s" in options:
            options["max_wait_s"] = float(options["max_wait_s"])
        return cls(parts.netloc, parts.path.strip("/"), schema, etl=etl, **options)

    def __repr__(self) -> str:
        return f"KafkaStream({self.path!r})"

    def connected(self, exchange: Exchange, stop: Callable[[], bool]) -> Self:
        """Return this stream for processes that read it together, and that a request to stop may end.

        Args:
            exchange: gives the numbers of every process, in order of rank.
            stop: says whether the run is to end, though no batch is full.
        """
        other = copy.copy(self)
        other.exchange, other.stop = exchange, stop
        return other

    def reader(
        self, batch_size: int, *, epoch: int = 0, drop_last: bool = False, max_batches: int | None = None,
        rank: int = 0, num_ranks: int = 1, **order: Any,
    ) -> StreamReader:  # fmt: skip
        """Return a reader of this stream's batches; options about the order of rows mean nothing here."""
        del order  # shuffle, seed, threads: see the head of the class
        return StreamReader(
            self, batch_size, epoch=epoch, drop_last=drop_last, max_batches=max_batches, rank=rank, num_ranks=num_ranks
        )

    # What the reader asks ---------------------------------------------------------------------------------

    def connect(self) -> Topic:
        """Return a connection to the topic."""
        return Topic(self.servers, self.topic, self.settings)

    def first_places(self, topic: Topic) -> dict[int, Place]:
        """Return where a new run begins in each partition."""
        start = self.start
        if isinstance(start, Mapping):
            unknown = sorted(set(start) - set(topic.partitions))
            if unknown:
                raise ConfigError("the topic has no such partition", where=self.path, value=unknown)
            return {one: (start[one] if one in start else topic.bounds(one)[0], 0) for one in topic.partitions}
        if isinstance(start, int):
            found = topic.offsets_at(start, topic.partitions)
            offsets = {one: topic.bounds(one)[1] if at is None else at for one, at in found.items()}
            return {one: (at, 0) for one, at in offsets.items()}
        return {one: (topic.bounds(one)[start == "end"], 0) for one in topic.partitions}

    def unfinished(self, topic: Topic, offsets: Mapping[int, int]) -> set[int]:
        """Return the partitions that have messages before the end, or may get some."""
        end = self.end
        if not isinstance(end, Mapping):
            return set(offsets)
        return {one for one, offset in offsets.items() if offset < end.get(one, 0)}

    def is_end(self, found: Message | EndOfLog) -> bool:
        """Say whether what was found is beyond the end."""
        end = self.end
        if end is None:
            return False
        if isinstance(end, Mapping):
            return found.offset >= end.get(found.partition, 0)
        if isinstance(found, EndOfLog):
            return end == "now" or self.is_over
        return isinstance(end, int) and found.time_ms >= end

    @property
    def is_bounded(self) -> bool:
        """Whether all rows up to the end are there already, or will be waited for."""
        return self.end == "now" or isinstance(self.end, Mapping) or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the time that ends the stream has passed."""
        return isinstance(self.end, int) and time.time() * 1000 >= self.end


def _bound(value: Bound | None, name: str, words: Sequence[str]) -> str | int | dict[int, int] | None:
    """Return a word, milliseconds since 1970, or offsets by partition."""
    if value is None or (isinstance(value, str) and value in words):
        return value
    if isinstance(value, Mapping):
        offsets = {int(partition): int(offset) for partition, offset in value.items()}
        if any(number < 0 for pair in offsets.items() for number in pair):
            raise ConfigError(f"the stream's {name} has a negative number", value=str(offsets))
        return offsets
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(moment, datetime):
            raise TypeError(f"{type(value).__name__}")
    except (ValueError, TypeError):
        raise ConfigError(
            f"the stream's {name} is nothing that bounds it", value=str(value),
            allowed=", ".join((*words, "offsets by partition", "a time such as 2026-01-31T12:00:00+00:00")),
        ) from None  # fmt: skip
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)

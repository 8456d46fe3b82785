"""A client of a Kafka topic: partitions, messages from given offsets on, ends of logs and failures."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from viviane.core.errors import ConfigError, DataError, RemoteError
from viviane.core.logging import get_logger
from viviane.core.optional import require
from viviane.core.remote.retry import retried, timeout_s

USER_VARIABLE: Final = "VIVIANE_KAFKA_USERNAME"
PASSWORD_VARIABLE: Final = "VIVIANE_KAFKA_PASSWORD"
_SECRET_WORDS: Final = (
    "password",
    "secret",
    "sasl.username",
    "key.pem",
    "jaas",
    "token",
    "passphrase",
    "private.key",
    "oauthbearer.config",
)
_IDLE_S: Final = 2.0
_GONE: Final = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID")
_REWOUND: Final = ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")
_log = get_logger("streaming")


@dataclass(frozen=True)
class Message:
    """One message.

    Args:
        partition, offset: its position in the topic.
        time_ms: when it was written, milliseconds since 1970; -1 if the topic has no timestamps.
        value: its content; None for a tombstone.
    """

    partition: int
    offset: int
    time_ms: int
    value: bytes | None


@dataclass(frozen=True)
class EndOfLog:
    """A partition currently has no message from `offset` on."""

    partition: int
    offset: int


def refuse_credentials(settings: Mapping[str, Any]) -> None:
    """Refuse credentials in librdkafka's settings; the message does not show them.

    Raises:
        ConfigError: there is one.
    """
    for name in settings:
        if any(word in name.lower() for word in _SECRET_WORDS):
            raise ConfigError(
                "credentials must not be in settings, which are written to files and logs", where=name,
                fix=f"set {USER_VARIABLE} and {PASSWORD_VARIABLE} in the environment",
            )  # fmt: skip


def client_settings(servers: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return librdkafka's settings; user and password are read only from the environment.

    Raises:
        ConfigError: the settings contain a credential, or the brokers, which have an argument of their own.

    Example:
        >>> client_settings("localhost:9092", {"fetch.min.bytes": 1})["fetch.min.bytes"]
        1
    """
    refuse_credentials(settings)
    if brokers := [name for name in settings if name in ("bootstrap.servers", "metadata.broker.list")]:
        raise ConfigError("the brokers are part of the address", where=brokers[0], value=str(settings[brokers[0]]),
                          allowed=servers, fix="leave the setting out")  # fmt: skip
    made: dict[str, Any] = {"log_level": 0, **settings, "bootstrap.servers": servers}
    user, password = os.environ.get(USER_VARIABLE), os.environ.get(PASSWORD_VARIABLE)
    if user is not None and password is not None:
        made |= {"sasl.username": user, "sasl.password": password}
    return made


READING: Final[Mapping[str, object]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "allow.auto.create.topics": False,
}
"""What a reader needs of librdkafka: it keeps offsets itself, and missing messages are errors."""
_ALIASES: Final = {"request.required.acks": "acks", "auto.commit.enable": "enable.auto.commit"}


def refuse_fixed(settings: Mapping[str, Any], fixed: Mapping[str, object], where: str) -> None:
    """Refuse settings of librdkafka that have one value here; that value itself may be given.

    Args:
        settings: a user's.
        fixed: names and values.
        where: the address, for errors.

    Raises:
        ConfigError: a setting has another value.

    Example:
        >>> refuse_fixed({"enable.auto.commit": "false"}, READING, "kafka://broker:9092/clicks")
    """
    for name, value in settings.items():
        known = _ALIASES.get(name, name)
        if known in fixed and str(value).lower() != str(fixed[known]).lower():
            raise ConfigError(f"the setting {name!r} of librdkafka cannot be changed", where=where, value=value,
                              allowed=str(fixed[known]).lower(), fix="leave the setting out")  # fmt: skip


def made_client(make: Callable[..., Any], settings: Mapping[str, Any], where: str, **named: Any) -> Any:
    """Return a client of librdkafka.

    Args:
        make: its class.
        settings: of librdkafka.
        where: the address, for errors.

    Raises:
        ConfigError: it refuses a setting.
    """
    kafka = require("confluent_kafka", extra="kafka", purpose="reading a Kafka topic")
    try:
        return make(dict(settings), **named)
    except (kafka.KafkaException, TypeError, ValueError, OverflowError, SystemError) as error:
        said = error.args[0].str() if isinstance(error, kafka.KafkaException) else str(error)
        raise ConfigError("librdkafka refuses a setting", where=where, value=said[:300],
                          fix="correct it: https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md",
                          ) from None  # fmt: skip


class Topic:
    """A connection to a topic's brokers; it never commits offsets.

    Args:
        servers: host:port, separated by commas.
        name: name of the topic.
        settings: additional librdkafka settings.
        wait_s: seconds for each question to the brokers, which is then asked once; None: as for all remote data, with
            retries.

    Raises:
        RemoteError: no broker responds, after retries.
        DataError: the topic does not exist.
    """

    def __init__(self, servers: str, name: str, settings: Mapping[str, Any], *, wait_s: float | None = None) -> None:
        self._kafka = require("confluent_kafka", extra="kafka", purpose="reading a Kafka topic")
        self.url, self.name = f"kafka://{servers}/{name}", name
        self._asks_once, self._wait_s = wait_s is not None, timeout_s() if wait_s is None else wait_s
        refuse_fixed(settings, READING, self.url)
        self._settings = client_settings(servers, settings)
        silent = logging.getLogger("viviane.streaming.librdkafka")
        silent.setLevel(logging.CRITICAL)
        self._consumer: Any = made_client(
            self._kafka.Consumer,
            {
                "group.id": "viviane",  # required by the client; no group is joined
                **self._settings,
                **READING,
            },
            self.url,
            logger=silent,
        )
        self._heard = time.monotonic()
        self._started: dict[int, int] = {}
        try:
            self.partitions: list[int] = self._look_up()
            self.topic_id = self._topic_id()
        except BaseException:
            self.close()
            raise

    def _look_up(self) -> list[int]:
        found = self._requests(lambda: self._consumer.list_topics(self.name, timeout=self._wait_s)).topics[self.name]
        if found.error is not None or not found.partitions:
            raise self._gone(str(found.error))
        return sorted(found.partitions)

    def _topic_id(self) -> str | None:
        """Return the id of this topic, which changes if it is recreated; None for old brokers."""
        admin = require("confluent_kafka.admin", extra="kafka", purpose="reading a Kafka topic")
        try:
            client = admin.AdminClient(self._settings)
            requests = client.describe_topics(self._kafka.TopicCollection([self.name]), request_timeout=self._wait_s)
            return str(requests[self.name].result().topic_id)
        except self._kafka.KafkaException as error:
            _log.info("%s: the brokers return no topic id: %s", self.url, error)
            return None

    def start(self, offsets: Mapping[int, int]) -> None:
        """Start reading partitions at given offsets.

        Raises:
            DataError: messages at these offsets no longer exist.
        """
        wanted = []
        for partition, offset in offsets.items():
            first = self.bounds(partition)[0]
            if offset < first:
                raise self._rewound(partition, offset, f"the first message is {first}")
            wanted.append(self._kafka.TopicPartition(self.name, partition, offset))
        self._started = dict(offsets)
        self._consumer.assign(wanted)
        self._heard = time.monotonic()

    def offsets_at(self, time_ms: int, partitions: Sequence[int]) -> dict[int, int | None]:
        """Return the offset of each partition's first message at or after a time; None if there is none yet."""
        places = [self._kafka.TopicPartition(self.name, partition, time_ms) for partition in partitions]
        found = self._requests(lambda: self._consumer.offsets_for_times(places, timeout=self._wait_s))
        return {one.partition: one.offset if one.offset >= 0 else None for one in found}

    def bounds(self, partition: int) -> tuple[int, int]:
        """Return the offsets of the first existing message and of the next one to be written."""
        place = self._kafka.TopicPartition(self.name, partition)
        low, high = self._requests(lambda: self._consumer.get_watermark_offsets(place, timeout=self._wait_s))
        return int(low), int(high)

    def _requests(self, request: Any) -> Any:
        def requests() -> Any:
            try:
                return request()
            except self._kafka.KafkaException as error:
                if self._asks_once:
                    raise RemoteError("no broker answers", where=self.url, value=error.args[0].str()) from None
                raise OSError(error.args[0].str()) from error

        return retried(requests, self.url, "querying the brokers")

    def poll(self, most: int, seconds: float) -> list[Message | EndOfLog]:
        """Return up to this many messages, as soon as there are some, or none after this many seconds.

        Raises:
            RemoteError: no broker has responded for a while, after retries.
            DataError: the topic was deleted, or the next message no longer exists.
        """
        found: list[Message | EndOfLog] = []
        # Consumer.consume(n, timeout) waits for all n: wait for the first message only, then take what was fetched.
        messages = self._consumer.consume(1, seconds)
        if messages and most > 1:
            messages += self._consumer.consume(most - 1, 0)
        for one in messages:
            error = one.error()
            if error is None:
                found.append(Message(one.partition(), one.offset(), int(one.timestamp()[1]), one.value()))
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                found.append(EndOfLog(one.partition(), one.offset()))
            else:
                self._raise(error, one)
        if found:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > _IDLE_S:
            self._look_up()  # no messages: the topic is idle, or the brokers are unreachable,
            self._check_places()  # or the topic was recreated with smaller offsets
            self._heard = time.monotonic()
        return found

    def _check_places(self) -> None:
        """Compare the next offsets with the known ends of partitions: not every broker refuses offsets beyond the end.

        Raises:
            DataError: a partition ends before the next message.
        """
        for place in self._consumer.position(self._consumer.assignment()):
            offset = place.offset if place.offset >= 0 else self._started.get(place.partition, 0)
            _, end = self._consumer.get_watermark_offsets(place, cached=True)
            if 0 <= end < offset:
                raise self._rewound(place.partition, offset, f"the partition ends before {end}")

    def _raise(self, error: Any, message: Any) -> None:
        name = error.name()
        if name in _GONE:
            raise self._gone(str(error))
        if name in _REWOUND:
            raise self._rewound(message.partition(), message.offset(), error.str())
        if error.retriable() or name in ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT"):
            return  # the client retries; poll handles missing messages
        raise RemoteError("the topic cannot be read", where=self.url, value=str(error))

    def stop(self, partition: int) -> None:
        """Stop fetching a partition."""
        self._consumer.pause([self._kafka.TopicPartition(self.name, partition)])

    def resume(self, partition: int) -> None:
        """Resume fetching a partition."""
        self._consumer.resume([self._kafka.TopicPartition(self.name, partition)])

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def _gone(self, text: str) -> DataError:
        return DataError(
            "the topic does not exist; it was deleted or never created", where=self.url, value=text,
            fix="create the topic, or check its name",
        )  # fmt: skip

    def _rewound(self, partition: int, offset: int, text: str) -> DataError:
        return DataError(
            "the next message is not in the topic: it was removed, or the topic was recreated",
            where=f"{self.url}, partition {partition}", value=f"offset {offset}; {text}",
            fix="increase the retention of the topic beyond the longest pause of a run; start a new run with `start`",
        )  # fmt: skip

"""Deltas through Kafka: a publisher whose outbox survives a crash, and the topic that servers read.

A delta of partition p goes to partition p of the topic. Kafka's offsets are hints alone: what was applied is counted
by each delta's own number.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from viviane.core.errors import ConfigError, RemoteError
from viviane.core.logging import get_logger
from viviane.core.optional import require
from viviane.data.streaming.topic import client_settings, made_client, refuse_fixed
from viviane.store.delta import Delta, DeltaHeader, DeltaKind, decode_delta, partition_of, split_rows
from viviane.store.outbox import Outbox
from viviane.store.row_layout import Keys, Rows

START_TIMEOUT_S: Final = 2.5
"""How long a broker has to answer when a publisher or server starts."""
_DENSE_PART_BYTES: Final = 900_000
_WINDOW: Final = 64  # deltas on their way to the broker at a time
_POLL_S: Final = 0.05
_RETRY_S: Final = 0.5
_log = get_logger("store")


@dataclass(frozen=True)
class StreamAddress:
    """A topic that deltas go through.

    Example:
        >>> StreamAddress.of("kafka://a:9092,b:9092/ctr")
        StreamAddress(servers='a:9092,b:9092', topic='ctr')
    """

    servers: str
    topic: str

    @classmethod
    def of(cls, url: str, where: str | None = None) -> Self:
        """Read a URL.

        Args:
            url: kafka://host:port/topic.
            where: for errors.

        Raises:
            ConfigError: it is no kafka://host:port/topic, or holds a user or options.
        """
        parts = urlsplit(url)
        if parts.scheme != "kafka" or not parts.netloc or not parts.path.strip("/") or parse_qsl(parts.query):
            shown = url.rsplit("@", maxsplit=1)[-1]
            raise ConfigError(
                "not the address of a stream of updates", where=where, value=shown, allowed="kafka://host:port/topic"
            )
        if "@" in parts.netloc:
            fix = "set VIVIANE_KAFKA_USERNAME and VIVIANE_KAFKA_PASSWORD"
            raise ConfigError("the address of a stream must not hold a user or a password", where=where, fix=fix)
        return cls(parts.netloc, parts.path.strip("/"))

    def __str__(self) -> str:
        return f"kafka://{self.servers}/{self.topic}"

    def partitions(self, settings: Mapping[str, Any]) -> int:
        """Ask the brokers for the number of the topic's partitions; within 3 seconds.

        Raises:
            RemoteError: no broker answers, or there is no such topic.
        """
        kafka = require("confluent_kafka", extra="kafka", purpose="a stream of updates")
        # A consumer, since what other clients ask for is made by brokers that make topics on request.
        own = {"group.id": "viviane", **client_settings(self.servers, settings), "allow.auto.create.topics": False}
        client = made_client(kafka.Consumer, own, str(self), logger=_silent())
        try:
            found = client.list_topics(self.topic, timeout=START_TIMEOUT_S).topics[self.topic]
        except kafka.KafkaException as error:
            raise RemoteError("no broker answers", where=str(self), value=error.args[0].str(),
                              fix="start it, or check host and port") from None  # fmt: skip
        finally:
            client.close()
        if found.error is not None or not found.partitions:
            value = "no partitions" if found.error is None else found.error.str()
            raise RemoteError("there is no such topic", where=str(self), value=value, fix="make it first")
        return len(found.partitions)


class DeltaPublisher:
    """Numbers deltas, writes them to the outbox, and sends them from there in a thread of its own.

    What `publish` has returned from is on disk and arrives, whatever happens to the broker or this process: a publisher
    that is started again with the same outbox sends what the broker has not confirmed.

    Args:
        address: kafka://host:port/topic.
        outbox: folder of the outbox, of this publisher alone.
        model: by which servers know the model.
        base: digest of the weights that a new outbox begins with; 0: unknown.
        max_waiting: deltas that may wait for the broker; `publish` waits while there are more.
        max_wait_s: how long `publish` waits then.
        settings: librdkafka's own; no credentials.

    Raises:
        RemoteError: no broker answers within 3 seconds, or there is no such topic.
        StoreError: the outbox is damaged, or another publisher has it.
    """

    def __init__(
        self, address: str, outbox: str | Path, model: str, *, base: int = 0, max_waiting: int = 1024,
        max_wait_s: float = 60.0, settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.address = StreamAddress.of(address)
        self._settings = dict(settings or {})
        refuse_fixed(self._settings, _SENDING, str(self.address))
        self.num_partitions = self.address.partitions(self._settings)
        self.model, self.max_waiting, self.max_wait_s = model, max_waiting, max_wait_s
        self.outbox = Outbox(outbox, model, base=base)
        self._turn = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="viviane-publisher", daemon=True)
        self._thread.start()

    # Publishing -------------------------------------------------------------------------------------------------

    def publish(
        self,
        rows: Mapping[str, tuple[Keys, Rows]],
        *,
        erased: Mapping[str, Keys] | None = None,
        dense: bytes | None = None,
        steps: tuple[int, int] = (0, 0),
    ) -> int:
        """Publish changes that belong together, and return the number of the publication.

        Args:
            rows: changed rows by table, keys (n,) and rows (n, row_bytes); a key at most once.
            erased: keys that were removed, by table.
            dense: a safetensors file of the dense weights.
            steps: the first and last training step whose changes these are.

        Raises:
            StoreError: the disk is full; nothing of the publication was written then.
            RemoteError: the broker has confirmed nothing for `max_wait_s`; nothing was written either.
        """
        self._wait_for_room()
        number = self.outbox.publication + 1
        base = DeltaHeader(
            self.model, "", self.outbox.generation, 0, 1, 0, number, self.outbox.publisher, self.num_partitions,
            *steps, time_us=time.time_ns() // 1000, base=self.outbox.base,
        )  # fmt: skip
        last = dict(self.outbox.last)
        deltas: list[Delta] = []
        for table, (keys, content) in rows.items():
            deltas += self._by_partition(replace(base, table=table), keys, content, last)
        for table, keys in (erased or {}).items():
            gone = replace(base, table=table, kind=DeltaKind.ERASED)
            deltas += self._by_partition(gone, keys, np.empty((len(keys), 0), np.uint8), last)
        if dense is not None:
            deltas += _dense_parts(base, dense, last)
        num_parts = sum(one.header.kind == DeltaKind.DENSE for one in deltas)
        deltas += self._ends(base, last, num_parts)
        self.outbox.append(one.encode() for one in deltas)
        with self._turn:
            self._turn.notify_all()
        return number

    def _by_partition(self, base: DeltaHeader, keys: Keys, rows: Rows, last: dict[tuple[str, int], int]) -> list[Delta]:
        found: list[Delta] = []
        partitions = partition_of(np.ascontiguousarray(keys), self.num_partitions)
        for partition in np.unique(partitions).tolist():
            own = np.flatnonzero(partitions == partition)
            seq = last.get((base.table, partition), 0) + 1
            deltas = list(split_rows(replace(base, partition=partition, seq=seq), keys[own], rows[own]))
            last[base.table, partition] = deltas[-1].header.seq
            found += deltas
        return found

    def _ends(self, base: DeltaHeader, last: dict[tuple[str, int], int], num_parts: int) -> list[Delta]:
        found = []
        for partition in range(self.num_partitions):
            ends = {table: seq for (table, own), seq in last.items() if own == partition and table}
            content = {"last": ends, "dense": 0 if partition else num_parts}
            found.append(_one_row(base, DeltaKind.END, partition, json.dumps(content).encode(), last))
        return found

    def _wait_for_room(self) -> None:
        self._raise()
        end = time.monotonic() + self.max_wait_s
        with self._turn:
            while self.outbox.num_waiting > self.max_waiting and self._error is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise RemoteError("the broker confirms nothing, and the outbox may not grow further",
                                      where=str(self.address), value=f"{self.outbox.num_waiting:,} deltas wait",
                                      fix="start the broker again; nothing is lost")  # fmt: skip
                self._turn.wait(min(left, 1.0))
        self._raise()

    def barrier(self, timeout_s: float = 60.0) -> None:
        """Return when the broker has confirmed all that was published.

        Raises:
            RemoteError: it has not within `timeout_s`.
        """
        with self._turn:
            done = self._turn.wait_for(lambda: self._error is not None or not self.outbox.num_waiting, timeout_s)
        self._raise()
        if not done:
            raise RemoteError("the broker has not confirmed all updates", where=str(self.address),
                              value=f"{self.outbox.num_waiting:,} deltas wait in the outbox")  # fmt: skip

    def _raise(self) -> None:
        if self._error is not None:
            raise RemoteError("updates can no longer be published", where=str(self.address), value=str(self._error))

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what waits, at most for `timeout_s`; the rest stays in the outbox for the next publisher."""
        with self._turn:
            self._turn.wait_for(lambda: self._error is not None or not self.outbox.num_waiting, timeout_s)
            self._stopping = True
            self._turn.notify_all()
        self._thread.join()
        self.outbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread -------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while not self._stopping:
            try:
                self._send_from(self.outbox.sent)
            except _LostError as error:
                _log.warning("%s: %s; sent again from the outbox", self.address, error)
                with self._turn:
                    self._turn.wait_for(lambda: self._stopping, _RETRY_S)
            except BaseException as error:  # raised again by publish and barrier
                with self._turn:
                    self._error = error
                    self._turn.notify_all()
                return

    def _send_from(self, first: int) -> None:
        """Send frames with one producer until it fails: the next one begins at what was not confirmed."""
        sending = _Sending(self.address, self._settings)
        following = first
        try:
            while not self._stopping:
                with self._turn:
                    if self.outbox.next_frame <= following and not self._stopping:
                        self._turn.wait(_POLL_S)
                for number, data in self.outbox.frames(following):
                    while sending.num_waiting >= _WINDOW:
                        self._confirm(sending, _POLL_S)
                    if self._is_stopping():
                        return
                    sending.send(number, data)
                    following = number + 1
                    self._confirm(sending, 0)
                self._confirm(sending, 0 if not sending.num_waiting else _POLL_S)
        finally:
            sending.close()

    def _is_stopping(self) -> bool:
        return self._stopping

    def _confirm(self, sending: _Sending, seconds: float) -> None:
        confirmed = sending.confirmed(seconds)
        if confirmed is not None and confirmed > self.outbox.sent:
            self.outbox.confirm(confirmed)
            with self._turn:
                self._turn.notify_all()


class _LostError(Exception):
    """The broker has not confirmed a delta in time."""


_SENDING: Final[Mapping[str, object]] = {
    "acks": "all",
    "enable.idempotence": True,
    "allow.auto.create.topics": False,
}
"""What a publisher needs of librdkafka: a confirmed delta is neither lost nor repeated."""


class _Sending:
    """One producer, and which frames are on their way."""

    def __init__(self, address: StreamAddress, settings: Mapping[str, Any]) -> None:
        self._kafka = require("confluent_kafka", extra="kafka", purpose="publishing updates")
        own = {
            "delivery.timeout.ms": 30_000, "linger.ms": 2,
            **{name: value for name, value in settings.items() if name != "request.required.acks"}, **_SENDING,
        }  # fmt: skip
        settings = client_settings(address.servers, own)
        self._producer = made_client(self._kafka.Producer, settings, str(address), logger=_silent())
        self._topic, self._waiting = address.topic, deque[int]()
        self._done: set[int] = set()
        self._next: int | None = None
        self._failed: str | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def send(self, number: int, data: bytes) -> None:
        partition = decode_delta(data).header.partition

        def delivered(error: Any, message: Any) -> None:
            del message
            if error is None:
                self._done.add(number)
            else:
                self._failed = error.str()

        if self._next is None:
            self._next = number
        self._waiting.append(number)
        self._producer.produce(self._topic, data, partition=partition, on_delivery=delivered)

    def confirmed(self, seconds: float) -> int | None:
        """Return the frame before which all are confirmed."""
        self._producer.poll(seconds)
        while self._waiting and self._waiting[0] in self._done:
            number = self._waiting.popleft()
            self._done.discard(number)
            self._next = number + 1
        if self._failed is not None:
            raise _LostError(self._failed)
        return self._next

    def close(self) -> None:
        self._producer.purge()
        self._producer.flush(1.0)


def _one_row(base: DeltaHeader, kind: DeltaKind, partition: int, data: bytes, last: dict[tuple[str, int], int],
             part: int = 0, num_parts: int = 1) -> Delta:  # fmt: skip
    before = last.get(("", partition), 0)
    last["", partition] = before + 1
    header = replace(base, kind=kind, partition=partition, seq=before + 1, prev_seq=before, part=part,
                     num_parts=num_parts)  # fmt: skip
    return Delta(header, np.zeros(1, np.int64), np.frombuffer(data, np.uint8).reshape(1, -1))


def _dense_parts(base: DeltaHeader, data: bytes, last: dict[tuple[str, int], int]) -> Iterable[Delta]:
    parts = [data[at : at + _DENSE_PART_BYTES] for at in range(0, len(data), _DENSE_PART_BYTES)]
    return [_one_row(base, DeltaKind.DENSE, 0, part, last, i, len(parts)) for i, part in enumerate(parts)]


def _silent() -> Any:
    logger = logging.getLogger("viviane.store.librdkafka")
    logger.setLevel(logging.CRITICAL)
    return logger

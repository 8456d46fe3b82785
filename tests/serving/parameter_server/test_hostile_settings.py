"""Clauses of tiers that nobody should write: refused with a message, or the bits of the model in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import viviane as vv
from viviane.core.errors import ConfigError, StoreError, VivianeError
from viviane.serving import InferenceSession
from viviane.store.rocks_database import RocksDatabase

ROWS = {"item": [3, 4, 3, 29]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    schema = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": "item", "num_ids": 30}])
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
    model.compile()
    folder = tmp_path_factory.mktemp("hostile") / "ctr"
    model.save(folder)
    return folder, model.predict(ROWS)[:, 0]


HOSTILE: dict[str, dict[str, Any]] = {
    "a cache of 10^12 MB": {"rocksdb": {"folder": "db", "cache_mb": 10**12}},
    "a deadline of 10^300 ms": {"rocksdb": {"folder": "db"}, "deadline_ms": 1e300},
    "a cluster that is not there": {"redis": {"address": "127.0.0.1:1", "cluster": True, "timeout_ms": 50}},
    "a database at a URL": {"rocksdb": {"folder": "s3://bucket/db"}},
    "an outbox that is not there": {"host": {}, "updates": {"address": "kafka://127.0.0.1:1/t", "outbox": "gone"}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_clauses(
    kind: str, saved: tuple[Path, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, expected = saved
    with pytest.raises(VivianeError), InferenceSession(folder, device="cpu", tables=HOSTILE[kind]) as session:
        session.predict(ROWS)
    assert {one.name for one in tmp_path.iterdir()} <= {"db"}
    with InferenceSession(folder, device="cpu", tables={"rocksdb": {"folder": "db"}, "deadline_ms": 3.6e6}) as session:
        assert np.array_equal(session.predict(ROWS), expected)


def test_a_missing_outbox_is_named_before_a_broker_is_asked(saved: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    updates = {"address": "kafka://127.0.0.1:1/t", "outbox": str(tmp_path / "gone")}
    with pytest.raises(StoreError, match=r"no such outbox[\s\S]*gone"):
        InferenceSession(saved[0], device="cpu", tables={"host": {}, "updates": updates})


def test_a_database_is_not_put_among_other_files(saved: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    before = sorted(one.name for one in saved[0].iterdir())
    with pytest.raises(StoreError, match="something else"):
        InferenceSession(saved[0], device="cpu", tables={"rocksdb": {"folder": str(saved[0])}})
    assert sorted(one.name for one in saved[0].iterdir()) == before
    (tmp_path / "db").mkdir()
    for name in ("LOCK", "LOG", "IDENTITY"):  # of one that was killed while it was made
        (tmp_path / "db" / name).touch()
    RocksDatabase(tmp_path / "db").close()


def test_a_huge_cache_is_refused_where_the_settings_are_read() -> None:
    from viviane.serving.parameter_server.settings import TableSettings

    for clause in ({"rocksdb": {"folder": "x", "cache_mb": 1 << 25}}, {"deadline_ms": 1e7}):
        with pytest.raises(ConfigError, match="less than or equal"):
            TableSettings.from_dict(clause)


WRONG_SETTINGS: list[dict[str, Any]] = [
    {"no.such": 1}, {"fetch.wait.max.ms": [1]}, {"fetch.wait.max.ms": 10**12}, {"a": {"b": 1}},
    {"bootstrap.servers": "other:9092"}, {"fetch.wait.max.ms": None},
]  # fmt: skip


@pytest.mark.parametrize("settings", WRONG_SETTINGS, ids=str)
def test_settings_that_librdkafka_refuses(settings: dict[str, Any], saved: tuple[Path, np.ndarray]) -> None:
    """They ended a server with a raw error, and other brokers were left out without a word."""
    pytest.importorskip("confluent_kafka")
    from viviane.data.streaming.topic import Topic

    updates = {"address": "kafka://127.0.0.1:1/t", "settings": settings}
    with pytest.raises(ConfigError, match=r"refuses a setting|part of the address"):
        InferenceSession(saved[0], device="cpu", tables={"host": {}, "updates": updates})
    with pytest.raises(ConfigError, match=r"refuses a setting|part of the address"):
        Topic("127.0.0.1:1", "t", settings, wait_s=0.1)


@pytest.mark.parametrize(
    ("name", "value"), [("enable.auto.commit", True), ("auto.commit.enable", True), ("auto.offset.reset", "latest")]
)
def test_settings_that_have_one_value_are_refused_by_name(
    name: str, value: object, saved: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    """They were replaced without a word."""
    pytest.importorskip("confluent_kafka")
    from viviane.data.streaming.topic import Topic

    updates = {"address": "kafka://127.0.0.1:1/t", "settings": {name: value}}
    with pytest.raises(ConfigError, match=f"{name}[\\s\\S]*cannot be changed"):
        InferenceSession(saved[0], device="cpu", tables={"host": {}, "updates": updates})
    with pytest.raises(ConfigError, match="cannot be changed"):
        Topic("127.0.0.1:1", "t", {name: value}, wait_s=0.1)


@pytest.mark.parametrize("settings", [{"acks": 1}, {"request.required.acks": 1}, {"enable.idempotence": False}])
def test_a_publisher_keeps_its_guarantees(settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka")
    from viviane.store.stream import DeltaPublisher

    with pytest.raises(ConfigError, match="cannot be changed"):
        DeltaPublisher("kafka://127.0.0.1:1/t", tmp_path / "outbox", "ctr", settings=settings)
    assert not (tmp_path / "outbox").exists()


@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
@pytest.mark.parametrize("kind", ["missing", "folder", "text"])
def test_a_wrong_certificate_is_named(name: str, kind: str, saved: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """The message was that no server answers, and the advice to start it."""
    pytest.importorskip("redis")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no certificate")
    tls = {name: str(tmp_path / kind)}
    if name == "key_file":
        tls["cert_file"] = str(tmp_path / "text")
    told = "cert_file" if kind == "text" and name == "key_file" else name
    with pytest.raises(StoreError, match=rf"certificate cannot be (read|used)[\s\S]*redis\.tls\.{told}"):
        InferenceSession(saved[0], device="cpu", tables={"redis": {"address": "127.0.0.1:1", "tls": tls}})


def test_a_key_without_its_certificate_is_refused(saved: tuple[Path, np.ndarray]) -> None:
    with pytest.raises(ConfigError, match="cert_file, which is not set"):
        InferenceSession(
            saved[0], device="cpu", tables={"redis": {"address": "127.0.0.1:1", "tls": {"key_file": "key.pem"}}}
        )


@pytest.mark.parametrize(
    ("tables", "where", "told"),
    [
        ({"cache": {"place": "device"}}, "tables, cache.place", 'leave cache.place at "host"'),
        ({"rocksdb": {"folder": "s3://bucket/ps"}}, "tables, rocksdb.folder", "not a URL"),
        (
            {"host": {}, "updates": {"address": "kafka://h:1/t", "outbox": "s3://b"}},
            "tables, updates.outbox",
            "not a URL",
        ),
        ({"host": {}, "updates": {"address": "kafka:/t"}}, "updates.address", "kafka://host:port/topic"),
        ({"host": {}, "updates": {"address": "kafka://u:secret@h:1/t"}}, "updates.address", "VIVIANE_KAFKA_PASSWORD"),
        ({"redis": {"address": "redis://h:1"}}, "redis.address", "leave redis://"),
        ([], "tables", "list"),
    ],
)
def test_an_error_names_the_clause(saved: tuple[Path, np.ndarray], tables: Any, where: str, told: str) -> None:
    for library in ("redis", "confluent_kafka"):
        pytest.importorskip(library)
    with pytest.raises(ConfigError) as caught:
        InferenceSession(saved[0], device="cpu", tables=tables)
    assert f"where:   {where}" in str(caught.value)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)

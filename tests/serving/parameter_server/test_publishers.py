"""Which published changes a served model takes, and what a server has after a restart, on a real broker."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import viviane as vv
from viviane.cli.main import app
from viviane.core.errors import ConfigError
from viviane.model.publication import Publication
from viviane.serving import InferenceSession


def clause(address: str, **more: Any) -> dict[str, Any]:
    return {"cache": {"rows": 30}, "host": {}, "updates": {"address": address, "visible": "publication"}, **more}


def scores_of(model: vv.Model, rows: dict[str, Any]) -> np.ndarray:
    return model.predict(rows)[:, 0]


def followed(session: InferenceSession, number: int) -> Any:
    assert session.tables is not None
    assert session.tables.updates is not None
    assert session.tables.updates.wait_for(number, 20)
    return session.tables.updates.applier.status


def plain_model(**solver: Any) -> vv.Model:
    """A model without dynamic tables."""
    schema = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": "item", "num_ids": 300}])
    model = vv.Model(vv.Solver(device="cpu", batch_size=64, lr=0.05, **solver), schema)
    model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
    model.compile(vv.AdaGrad(lr=0.1))
    return model


def plain_data(folder: Path, seed: int = 0, count: int = 640) -> vv.Dataset:
    random = np.random.default_rng(seed)
    columns = {"y": random.integers(0, 2, count).astype(np.float32), "item": random.integers(3, 300, count)}
    return vv.write_dataset(folder, plain_model().schema, [columns])


def test_a_server_takes_no_changes_of_a_model_that_began_with_other_weights(
    broker: Any, topic: str, rows: dict[str, Any], tmp_path: Path
) -> None:
    """Two trainings of one model by name publish to one topic, one after the other, and beside each other."""
    from click_models import build, train

    address = f"kafka://{broker.servers}/{topic}"
    first, second = build(seed=1), build(seed=2)
    first.save(tmp_path / "first")
    second.save(tmp_path / "second")
    published = {}
    for name, model in (("first", first), ("second", second)):
        publication = model.publish(address, outbox=tmp_path / f"outbox-{name}")
        train(model, 4, publication=publication)
        published[name] = publication.publish()
        publication.barrier()
        publication.close()
    for name, model in (("first", first), ("second", second)):
        with InferenceSession(tmp_path / name, device="cpu", tables=clause(address)) as session:
            status = followed(session, published[name])
            assert np.array_equal(session.predict(rows), scores_of(model, rows))
            assert name == "first" or status.refused > 0


def test_the_best_weights_are_published_where_fit_restores_them(broker: Any, topic: str, tmp_path: Path) -> None:
    address = f"kafka://{broker.servers}/{topic}"
    model = plain_model(epochs=4, eval_every=5, restore_best=True)
    train, valid = plain_data(tmp_path / "train"), plain_data(tmp_path / "valid", seed=1)
    model.save(tmp_path / "1")
    publication = model.publish(address, outbox=tmp_path / "outbox", every_s=0.001)
    history = model.fit(train, valid, run_folder=tmp_path / "run", verbose=0)
    assert history.restored_step is not None
    assert history.restored_step < 40
    number = publication.publish()
    rows = {"item": np.arange(300)}
    with InferenceSession(tmp_path / "1", device="cpu", tables=clause(address)) as session:
        followed(session, number)
        assert np.array_equal(session.predict(rows), scores_of(model, rows))
    publication.close()


def test_a_model_that_is_saved_while_it_publishes_is_where_servers_begin(
    broker: Any, topic: str, rows: dict[str, Any], tmp_path: Path
) -> None:
    """What the snapshot has is not applied again, so that no older row or dense weights are seen."""
    from click_models import build, train

    address = f"kafka://{broker.servers}/{topic}"
    model = build()
    publication = model.publish(address, outbox=tmp_path / "outbox")
    for first in (0, 10):
        train(model, 4, first, publication)
        number = publication.publish()
    publication.barrier()
    model.save(tmp_path / "1")
    seen: set[bytes] = set()
    with InferenceSession(tmp_path / "1", device="cpu", tables=clause(address)) as session:
        while session.tables.updates.applier.status.publication < number:
            seen.add(session.predict(rows).tobytes())
        status = followed(session, number)
        seen.add(session.predict(rows).tobytes())
        assert seen == {scores_of(model, rows).tobytes()}
        assert status.deltas == 0
        train(model, 2, 20, publication)
        followed(session, publication.publish())
        assert np.array_equal(session.predict(rows), scores_of(model, rows))
    publication.close()


def test_rocksdb_keeps_dense_weights_and_rows_of_one_publication(
    broker: Any, topic: str, rows: dict[str, Any], tmp_path: Path
) -> None:
    """After a restart the first answer is that of the last publication, even if the topic has lost all messages."""
    from click_models import build, train

    address = f"kafka://{broker.servers}/{topic}"
    model = build()
    model.save(tmp_path / "1")
    tables = clause(address, rocksdb={"folder": str(tmp_path / "db")})
    publication = model.publish(address, outbox=tmp_path / "outbox")
    with InferenceSession(tmp_path / "1", device="cpu", tables=tables) as session:
        train(model, 4, 0, publication)
        followed(session, publication.publish())
    broker.delete(topic)
    broker.make(topic, partitions=3)
    with InferenceSession(tmp_path / "1", device="cpu", tables=tables) as session:
        assert np.array_equal(session.predict(rows), scores_of(model, rows))
        train(model, 4, 10, publication)
        followed(session, publication.publish())
        assert np.array_equal(session.predict(rows), scores_of(model, rows))
    publication.close()


def test_an_outbox_that_other_weights_continue(broker: Any, topic: str, tmp_path: Path, caplog: Any) -> None:
    """A killed loop begins again with older weights: servers get all of its rows."""
    address = f"kafka://{broker.servers}/{topic}"
    rows = {"item": np.arange(300)}
    data = plain_data(tmp_path / "train")
    model = plain_model(epochs=1)
    model.save(tmp_path / "1")
    publication = model.publish(address, outbox=tmp_path / "outbox")
    model.fit(data, verbose=0)
    publication.close()
    other = plain_model(epochs=1, seed=5)
    publication = other.publish(address, outbox=tmp_path / "outbox")
    number = publication.publish()
    assert "all rows are published" in caplog.text
    with InferenceSession(tmp_path / "1", device="cpu", tables=clause(address)) as session:
        followed(session, number)
        assert np.array_equal(session.predict(rows), scores_of(other, rows))
    publication.close()


def test_an_outbox_that_other_weights_continue_is_refused_with_dynamic_tables(
    broker: Any, topic: str, tmp_path: Path
) -> None:
    from click_models import build, train

    address = f"kafka://{broker.servers}/{topic}"
    model = build()
    publication = model.publish(address, outbox=tmp_path / "outbox")
    train(model, 2, publication=publication)
    publication.publish()
    publication.close()
    again = model.publish(address, outbox=tmp_path / "outbox")  # the same weights
    again.publish()
    again.close()
    with pytest.raises(ConfigError, match="continues a model with other weights"):
        build(seed=3).publish(address, outbox=tmp_path / "outbox").publish()


def test_a_closed_publication_is_over(broker: Any, topic: str, tmp_path: Path) -> None:
    address = f"kafka://{broker.servers}/{topic}"
    model = plain_model(epochs=1)
    publication = model.publish(address, outbox=tmp_path / "outbox", every_s=0.001)
    publication.close()
    publication.close()
    model.fit(plain_data(tmp_path / "train"), verbose=0)
    with pytest.raises(ConfigError, match="the publication is closed"):
        publication.publish()
    assert publication.position().positions == {}


def test_running_means_are_not_published(tmp_path: Path) -> None:
    model = plain_model(ema_decay=0.9)
    with pytest.raises(ConfigError, match="running mean"):
        Publication(model, "kafka://127.0.0.1:1/t", outbox=tmp_path / "outbox")


def test_the_command_publishes_and_writes_where_servers_begin(broker: Any, topic: str, tmp_path: Path) -> None:
    address = f"kafka://{broker.servers}/{topic}"
    plain_data(tmp_path / "train")
    config = {"name": "ctr", "data": {"train": str(tmp_path / "train")},
              "solver": {"batch_size": 64, "epochs": 2, "lr": 0.05, "device": "cpu"},
              "model": {"zoo": "deepfm", "dim": 4, "deep_mlp": [8]}}  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps(config))
    run = tmp_path / "run"
    command = ["train", str(tmp_path / "train.json"), "--publish", address, "--run-folder", str(run), "--quiet"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    sent = json.loads((run / "outbox" / "sent.json").read_text())["publication"]
    rows = {"item": np.arange(300)}
    with InferenceSession(run / "model", device="cpu") as session:
        truth = session.predict(rows)
    for name in ("snapshot", "model"):
        with InferenceSession(run / name, device="cpu", tables=clause(address)) as session:
            followed(session, sent)
            assert np.array_equal(session.predict(rows), truth)


def test_a_softmax_over_all_items_is_not_published(tmp_path: Path) -> None:
    items = {"num_ids": 20, "vocabulary": "item"}
    columns = [{"name": "hist", "kind": "sequence", "max_length": 4, **items}, {"name": "item", **items}]
    model = vv.Model(vv.Solver(device="cpu"), vv.Schema(labels=[{"name": "y"}], categorical=columns))
    model.add(vv.zoo.SASRec(dim=4))
    model.compile(vv.Adam())
    with pytest.raises(ConfigError, match="moves every row"):
        Publication(model, "kafka://127.0.0.1:1/t", outbox=tmp_path / "outbox")
    folder = model.save(tmp_path / "1")
    with pytest.raises(ConfigError, match="serve without `tables`"):
        InferenceSession(folder, device="cpu", tables={"host": {}})


def test_a_broker_that_is_gone_is_seen_within_seconds_and_delays_no_end(tmp_path: Path, broker: Any) -> None:
    own = type(broker)()
    own.make("t", partitions=1)
    folder = plain_model().save(tmp_path / "1")
    with InferenceSession(folder, device="cpu", tables=clause(f"kafka://{own.servers}/t")) as session:
        assert session.tables is not None
        assert session.tables.updates is not None
        assert session.tables.updates.status()["connected"]
        time.sleep(0.3)  # it reads
        own.kill()
        until = time.monotonic() + 8  # idle for 2 s, asked for 2 s
        while session.tables.updates.status()["connected"]:
            assert time.monotonic() < until
            time.sleep(0.02)
        session.predict({"item": [1]})
        time.sleep(2)  # the thread asks the brokers again
        start = time.monotonic()
    assert time.monotonic() - start < 4

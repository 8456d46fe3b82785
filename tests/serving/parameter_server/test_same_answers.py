"""A model in tiers predicts the bits of the model in memory, whatever the tiers, and whichever of them fail."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.core.errors import ConfigError, KeyRangeError, StoreError
from viviane.serving import InferenceSession
from viviane.store.cache import CacheTier
from viviane.store.hierarchy import TableHierarchy

TIERS: dict[str, dict[str, Any]] = {
    "saved model alone": {"cache": None},
    "small cache": {"cache": {"rows": 3}},
    "cache of all": {"cache": {"share": 1.0}},
    "cache at random": {"cache": {"rows": 40, "eviction": "random"}},
    "host": {"cache": None, "host": {}},
    "small host": {"cache": {"rows": 2}, "host": {"rows": 20, "resolution": 0.5}},
    "rocksdb": {"cache": None, "rocksdb": {"folder": "DB"}},
    "redis": {"cache": None, "redis": {"address": "REDIS"}},
    "all": {"cache": {"rows": 5}, "host": {"rows": 50}, "redis": {"address": "REDIS"}, "rocksdb": {"folder": "DB"}},
    "deadline": {"cache": {"rows": 5}, "deadline_ms": 10_000.0},
}


def filled(clause: Any, folder: Path, address: str) -> Any:
    if isinstance(clause, dict):
        return {name: filled(value, folder, address) for name, value in clause.items()}
    return {"DB": str(folder / "db"), "REDIS": address}.get(clause, clause) if isinstance(clause, str) else clause


@pytest.mark.parametrize("name", TIERS)
def test_every_combination_of_tiers_has_the_bits_of_memory(
    name: str, saved: Path, rows: dict[str, Any], tmp_path: Path, valkey: Any
) -> None:
    valkey.client().flushall()
    with InferenceSession(saved, device="cpu") as session:
        wanted = session.predict(rows)
    with InferenceSession(saved, device="cpu", tables=filled(TIERS[name], tmp_path, valkey.address)) as session:
        assert session.tables is not None
        for _ in range(3):
            assert np.array_equal(session.predict(rows), wanted)
            assert session.tables.mover.drain(5)
        status = session.tables.status()
        assert sum(table["degraded"] + table["deferred"] for table in status["tables"]) == 0
        few = {column: values[:1] for column, values in rows.items()}
        assert session.predict(few).tolist() == wanted[:1].tolist()
    if name == "cache of all":
        item = next(one for one in status["tables"] if one["table"] == "wide.item")
        assert item["tiers"][0]["misses"] == 0


def test_a_model_saved_again_in_its_place_reads_no_older_rows(
    rows: dict[str, Any], tmp_path: Path, valkey: Any
) -> None:
    from click_models import build, train

    valkey.client().flushall()
    model, clause = build(), {"cache": None, "redis": {"address": valkey.address}, "rocksdb": {"folder": "DB"}}
    for step in range(2):
        train(model, 1, step)
        model.save(tmp_path / "ctr")
        tables = filled(clause, tmp_path, valkey.address)
        with InferenceSession(tmp_path / "ctr", device="cpu", tables=tables) as session:
            assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])
            assert session.tables is not None
            assert session.tables.mover.drain(5)
            for one in session.tables.hierarchies.values():  # as an update
                keys, changed = next(iter(one.levels[-1].tier.scan()))
                one.apply(keys[:5], np.zeros_like(changed[:5]), keys[:0], {})


def test_replicas_share_tiers_and_keys_out_of_range_are_named(saved: Path, rows: dict[str, Any]) -> None:
    from click_models import click_batch

    with InferenceSession(saved, device="cpu", tables={}, instances=3) as session:
        wanted = session.predict(rows)
        assert all(np.array_equal(session.predict(rows), wanted) for _ in range(4))
        batch = click_batch(1)
        batch.one_hot[3, 0] = 301
        with pytest.raises(KeyRangeError, match="item"):
            session.predict(batch)


def broken(tier: Any, error: Exception | None) -> None:
    """Let a tier's reads fail as its own would."""
    if error is None:
        tier.__dict__.pop("fetch", None)
        return

    def fetch(keys: Any, out: Any) -> Any:
        raise error

    tier.fetch = fetch


def test_a_tier_that_fails_is_left_out_counted_and_comes_back(
    saved: Path, rows: dict[str, Any], tmp_path: Path, valkey: Any
) -> None:
    with InferenceSession(saved, device="cpu") as session:
        wanted = session.predict(rows)
    clause = filled(TIERS["all"], tmp_path, valkey.address)
    with InferenceSession(saved, device="cpu", tables=clause) as session:
        assert session.tables is not None
        for place in range(4):
            tables: list[TableHierarchy] = list(session.tables.hierarchies.values())
            for table in tables:
                broken(table.levels[place].tier, StoreError("the disk is gone"))
                table.levels[place].breaker.pause_s = 0.0
            assert np.array_equal(session.predict(rows), wanted)
            degraded = sum(table.num_degraded for table in tables)
            # A row that the store may have changed is doubtful; copies hold nothing of their own.
            assert (degraded > 0) == (tables[0].levels[place].role == "store")
            for table in tables:
                broken(table.levels[place].tier, None)
            assert np.array_equal(session.predict(rows), wanted)
            assert all(table.levels[place].breaker.is_closed for table in tables)


def test_strict_tables_raise_instead(saved: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    clause = {"cache": None, "rocksdb": {"folder": str(tmp_path / "db")}, "strict": True}
    with InferenceSession(saved, device="cpu", tables=clause) as session:
        assert session.tables is not None
        wanted = session.predict(rows)
        for table in session.tables.hierarchies.values():
            broken(table.levels[0].tier, StoreError("the disk is gone"))
        with pytest.raises(StoreError, match="a tier fails"):
            session.predict(rows)
        for table in session.tables.hierarchies.values():
            broken(table.levels[0].tier, None)
            table.levels[0].breaker.succeeded()
        assert np.array_equal(session.predict(rows), wanted)


def test_a_threshold_answers_with_defaults_and_fetches_beside(saved: Path, rows: dict[str, Any]) -> None:
    clause = {"cache": {"share": 1.0, "warm_up": False}, "hit_rate_threshold": 0.01}
    with InferenceSession(saved, device="cpu") as session:
        wanted = session.predict(rows)
    with InferenceSession(saved, device="cpu", tables=clause, warm_up=()) as session:
        assert session.tables is not None
        session.predict({column: values[:40] for column, values in rows.items()})  # no hits: exact
        session.tables.mover.drain(5)
        session.predict(rows)
        assert sum(table.num_deferred for table in session.tables.hierarchies.values()) > 0
        session.tables.mover.drain(5)
        assert np.array_equal(session.predict(rows), wanted)


def test_a_deadline_answers_with_defaults(saved: Path, rows: dict[str, Any]) -> None:
    import time

    with InferenceSession(saved, device="cpu", tables={"cache": {"rows": 1}, "deadline_ms": 5.0}) as session:
        assert session.tables is not None
        for table in session.tables.hierarchies.values():
            tier = table.levels[-1].tier
            fetch = tier.fetch
            tier.fetch = lambda keys, out, fetch=fetch: (time.sleep(0.1), fetch(keys, out))[1]  # type: ignore[method-assign]
        start = time.monotonic()
        session.predict(rows)
        assert time.monotonic() - start < 0.4
        assert sum(table.num_degraded for table in session.tables.hierarchies.values()) > 0


def test_a_new_version_begins_with_the_keys_of_the_old_one(saved: Path, rows: dict[str, Any]) -> None:
    clause = {"cache": {"rows": 60, "warm_up": True}}
    with InferenceSession(saved, device="cpu", tables=clause) as old:
        old.predict(rows)
        old.predict(rows)
        assert old.tables is not None
        old.tables.mover.drain(5)
        with InferenceSession(saved, device="cpu", tables=clause, warm_from=old) as new:
            assert new.tables is not None
            for name, table in new.tables.hierarchies.items():
                mine, theirs = table.levels[0].tier, old.tables.hierarchies[name].levels[0].tier
                assert isinstance(mine, CacheTier)
                assert isinstance(theirs, CacheTier)
                assert set(theirs.keys().tolist()) == set(mine.keys().tolist())


@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ({"cach": {}}, "cache"),
        ({"cache": {"rows": 0}}, "rows"),
        ({"updates": {"address": "kafka://a:1/t"}}, "rocksdb"),
        ({"updates": {"address": "http://a"}, "host": {}}, "kafka://"),
        ({"updates": {"address": "kafka://u:p@a:1/t"}, "host": {}}, "VIVIANE_KAFKA"),
        ({"host": {}, "redis": {"address": "a:1"}, "updates": {"address": "kafka://a:1/t"}}, "instance"),
        ({"hit_rate_threshold": 0}, "hit_rate_threshold"),
        (
            {"updates": {"address": "kafka://a:1/t", "settings": {"sasl.password": "hunter2"}}, "host": {}},
            "VIVIANE_KAFKA",
        ),
        (
            {"updates": {"address": "kafka://a:1/t", "settings": {"SSL.Key.Password": "hunter2"}}, "host": {}},
            "VIVIANE_",
        ),
        ({"redis": {"address": "a:1", "password": "hunter2"}}, "the environment"),
    ],
)
def test_clauses_that_cannot_be_are_refused(clause: dict[str, Any], message: str, saved: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        InferenceSession(saved, device="cpu", tables=clause)
    assert not any(secret in str(caught.value) for secret in ("u:p@", "hunter2"))

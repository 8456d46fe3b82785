"""A hierarchy against a dict: random changes, lookups, fills and failures, on several stacks of tiers."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import ConfigError, StoreError
from viviane.store import Column, RowLayout
from viviane.store.applied import AppliedRocksTier
from viviane.store.cache import CacheTier
from viviane.store.hierarchy import Level, TableHierarchy
from viviane.store.host import HostTier
from viviane.store.mover import Mover
from viviane.store.rocks import RocksDatabase

LAYOUT = RowLayout([Column("weight", "int64", 2)])
NONE = np.empty(0, np.int64)


def rows_of(keys: np.ndarray, value: int) -> np.ndarray:
    return np.stack([keys, np.full_like(keys, value)], 1).view(np.uint8)


def base_of(count: int = 30) -> HostTier:
    base = HostTier(LAYOUT, name="base", max_rows=1000)
    base.put(np.arange(count), rows_of(np.arange(count), 1))
    return base


STACKS = {
    "store": lambda: [Level(HostTier(LAYOUT, max_rows=1000), "store")],
    "cache": lambda: [Level(CacheTier(LAYOUT, 4), "volatile"), Level(HostTier(LAYOUT, max_rows=1000), "store")],
    "two copies": lambda: [Level(CacheTier(LAYOUT, 3), "volatile"), Level(HostTier(LAYOUT, max_rows=1000), "volatile"),
                           Level(HostTier(LAYOUT, max_rows=1000), "store")],
}  # fmt: skip
actions = st.lists(
    st.tuples(st.sampled_from(["apply", "lookup", "fail", "erase", "late fill"]),
              st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True), st.integers(2, 10**6)),
    max_size=30,
)  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
@settings(max_examples=40, deadline=None)
@given(actions)
def test_answers_are_those_of_a_dict_whatever_copies_fail(name: str, steps) -> None:
    levels = [*STACKS[name](), Level(base_of(), "base")]
    for level in levels:
        level.breaker.pause_s = 0.0
    table = TableHierarchy("t", LAYOUT, levels)
    truth = dict.fromkeys(range(30), 1)
    late: list[tuple[np.ndarray, np.ndarray, int]] = []
    for what, numbers, value in steps:
        keys = np.array(numbers, np.int64)
        if what == "apply":
            table.apply(keys, rows_of(keys, value), NONE, {})
            truth |= dict.fromkeys(numbers, value)
        elif what == "erase":
            table.apply(NONE, LAYOUT.empty(0), keys, {})
            truth |= dict.fromkeys(numbers, 0)
        elif what == "fail" and levels[0].role == "volatile":
            tier = levels[0].tier
            tier.__dict__["replace"] = tier.__dict__["put"] = _fails
            table.apply(keys, rows_of(keys, value), NONE, {})
            truth |= dict.fromkeys(numbers, value)
            del tier.__dict__["replace"], tier.__dict__["put"]
        elif what == "late fill" and late:  # rows that were read a while ago
            table.fill(*late.pop(0))
        out = LAYOUT.empty(len(keys))
        epoch = table._epoch
        result = table.lookup(keys, out)
        found = out.view(np.int64)[:, 1]
        assert found.tolist() == [truth.get(key, 0) for key in numbers]
        assert result.num_degraded == 0
        late.append((keys[result.found], out[result.found].copy(), epoch))
        for level in levels:
            table.heal(level)


def _fails(keys, rows) -> None:
    raise StoreError("no room")


def test_rocksdb_keeps_changes_and_notes_together(tmp_path: Path) -> None:
    database = RocksDatabase(tmp_path / "db")
    table = TableHierarchy("t", LAYOUT, [Level(AppliedRocksTier(database, "t", LAYOUT), "store"),
                                         Level(base_of(), "base")])  # fmt: skip
    keys = np.array([3, 50])
    table.apply(keys, rows_of(keys, 9), np.array([4]), {"applied": b"12"})
    table.close()
    database.close()
    database = RocksDatabase(tmp_path / "db")
    table = TableHierarchy("t", LAYOUT, [Level(AppliedRocksTier(database, "t", LAYOUT), "store"),
                                         Level(base_of(), "base")])  # fmt: skip
    out = LAYOUT.empty(4)
    table.lookup(np.array([3, 50, 4, 5]), out)
    assert out.view(np.int64)[:, 1].tolist() == [9, 9, 0, 1]
    assert table.note("applied") == b"12"
    database.close()


def test_copies_are_filled_beside_lookups() -> None:
    mover = Mover()
    cache = CacheTier(LAYOUT, 100)
    table = TableHierarchy("t", LAYOUT, [Level(cache, "volatile"), Level(base_of(), "base")], mover=mover)
    keys = np.arange(30)
    table.lookup(keys, LAYOUT.empty(30))
    assert mover.drain(5)
    assert cache.num_rows() == 30
    before = table.levels[1].hits
    table.lookup(keys, LAYOUT.empty(30))
    assert table.levels[1].hits == before
    mover.close()
    with pytest.raises(StoreError, match="no tier keeps changes"):
        table.apply(keys, rows_of(keys, 1), NONE, {})


def test_orders_of_tiers_that_cannot_be_are_refused() -> None:
    host = HostTier(LAYOUT, max_rows=10)
    for roles in ([], ["base", "store"], ["store", "volatile"], ["store", "store"]):
        with pytest.raises(ConfigError):
            TableHierarchy("t", LAYOUT, [Level(host, role) for role in roles])

"""A hierarchy against a dict: random changes, lookups, fills and failures, on several stacks of tiers."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linearizable import hammer, problem_of
from linearizable import rows_of as certified

from viviane.core.errors import ConfigError, StoreError
from viviane.store import Column, RowLayout
from viviane.store.applied import AppliedRocksTier
from viviane.store.cache import CacheTier
from viviane.store.hierarchy import Level, TableHierarchy
from viviane.store.host import HostTier
from viviane.store.mover import Mover
from viviane.store.rocks_database import RocksDatabase

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


@pytest.mark.parametrize("lookups", [200_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_lookups_beside_a_writer_are_linearizable(lookups: int) -> None:
    counts = hammer(lookups, num_keys=min(100_000, lookups // 20), cache_rows=500)
    assert counts["evicted"] > 0
    assert counts["changes"] > 0
    assert counts["cache hits"] > 0


def test_the_check_of_rows_sees_what_is_wrong() -> None:
    keys, floor = np.array([3, 4]), np.array([5, 5])
    right = np.ascontiguousarray(certified(keys, 5)).view(np.int64)
    assert problem_of(keys, right, floor, 5) is None
    assert problem_of(keys, right, floor + 1, 5) == "a row older than one that was seen or written"
    assert problem_of(keys, right, floor, 4) == "a row from the future"
    for column in (0, 1, 14, 15):
        wrong = right.copy()
        wrong[1, column] += 1
        assert problem_of(keys, wrong, floor, 9) == "a torn row"


def test_a_lookup_that_overlaps_with_a_change_gives_the_row_that_later_lookups_give() -> None:
    """A copy is filled after it was asked; the store is changed before the copy, whose row is current."""
    key, written, go = np.array([7]), threading.Event(), threading.Event()
    cache, store = CacheTier(LAYOUT, 10), HostTier(LAYOUT, max_rows=100)
    table = TableHierarchy("t", LAYOUT, [Level(cache, "volatile"), Level(store, "store")])
    table.apply(key, rows_of(key, 1), NONE, {})
    replace, fetch = cache.replace, store.fetch

    def late(keys: np.ndarray, rows: np.ndarray) -> None:
        written.set()
        assert go.wait(10)
        replace(keys, rows)

    writer = threading.Thread(target=lambda: table.apply(key, rows_of(key, 2), NONE, {}))

    def slow(keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        store.fetch = fetch  # type: ignore[method-assign]
        table.fill(key, rows_of(key, 1), table._epoch)
        writer.start()
        assert written.wait(10)
        return fetch(keys, out)

    cache.replace, store.fetch = late, slow  # type: ignore[method-assign]
    seen = []
    for _ in range(2):
        out = LAYOUT.empty(1)
        table.lookup(key, out)
        seen.append(int(out.view(np.int64)[0, 1]))
    go.set()
    writer.join()
    table.lookup(key, out)
    assert [*seen, int(out.view(np.int64)[0, 1])] == [1, 1, 2]


class Bound(HostTier):
    """A copy that removes the rows that were not used for longest when it is asked to."""

    notes_use = True

    def __init__(self, most: int) -> None:
        super().__init__(LAYOUT, max_rows=1000)
        self.most, self.asked, self.clock = most, 0, 0
        self.times: dict[int, int] = {}

    def touch(self, keys: np.ndarray) -> None:
        self.clock += 1
        self.times |= dict.fromkeys(keys.tolist(), self.clock)

    def make_room(self) -> int:
        self.asked += 1
        keys = np.concatenate([one for one, _ in self.scan()]) if self.num_rows() else NONE
        old = sorted(keys.tolist(), key=lambda key: self.times.get(key, 0))[: max(0, len(keys) - self.most)]
        return self.erase(np.array(old, np.int64))


@pytest.mark.parametrize("above", [False, True], ids=["first", "below a cache"])
def test_a_bound_holds_where_no_more_rows_are_missing(above: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that came within a second of the last removal stayed beyond the bound, for as long as all were found."""
    monkeypatch.setattr("viviane.store.hierarchy._EVICTION_SECONDS", 3600.0)
    tier, mover = Bound(10), Mover()
    cache = [Level(CacheTier(LAYOUT, 30), "volatile")] if above else []
    table = TableHierarchy("t", LAYOUT, [*cache, Level(tier, "volatile"), Level(base_of(), "base")], mover=mover)
    keys, out = np.arange(30), LAYOUT.empty(30)
    for part in (keys[:5], keys):  # the second one comes too soon for a removal
        table.lookup(part, out[: len(part)])
        assert mover.drain(5)
    assert tier.num_rows() == 30
    monkeypatch.setattr("viviane.store.hierarchy._EVICTION_SECONDS", 0.0)
    for _ in range(4):
        assert table.lookup(keys[:8], out[:8]).found.all()
        assert mover.drain(5)
    assert tier.num_rows() == 10
    assert np.array_equal(out[:8], rows_of(keys[:8], 1))
    mover.close()


def test_rows_that_are_read_are_not_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows that were filled in counted as used: of a copy that lookups ask first, the most popular ones went."""
    monkeypatch.setattr("viviane.store.hierarchy._EVICTION_SECONDS", 0.05)
    tier, mover = Bound(10), Mover()
    table = TableHierarchy("t", LAYOUT, [Level(tier, "volatile"), Level(base_of(), "base")], mover=mover)
    for first in range(0, 30, 5):
        for keys in (np.arange(5), np.arange(first, first + 5)):
            table.lookup(keys, LAYOUT.empty(5))
            assert mover.drain(5)
            assert tier.fetch(np.arange(5), LAYOUT.empty(5)).all()
            time.sleep(0.06)
    mover.close()


def test_rows_of_a_cache_whose_keys_are_all_there_still_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup on a GPU ends with `count_hits`: the rows of the host's memory never changed places with others."""
    monkeypatch.setattr("viviane.store.hierarchy._EVICTION_SECONDS", 0.05)
    tier, mover = Bound(10), Mover()
    table = TableHierarchy("t", LAYOUT, [Level(tier, "volatile"), Level(base_of(), "base")], mover=mover)
    for _ in range(4):
        table.begin()
        table.count_hits(3)
        assert mover.drain(5)
        time.sleep(0.06)
    assert tier.asked == 4
    mover.close()

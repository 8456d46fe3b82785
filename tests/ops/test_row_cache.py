"""The row cache against a dict, and its readers beside a writer."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import ConfigError
from viviane.ops.row_cache import RowCache
from viviane.ops.row_cache.reference import DictCache

NASTY = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 7, 8]


def rows_of(keys: np.ndarray, value: int, width: int = 24) -> np.ndarray:
    return ((keys[:, None] * 31 + value + np.arange(width)) % 251).astype(np.uint8)


steps = st.lists(
    st.tuples(st.sampled_from(["insert", "erase", "find", "present", "absent"]),
              st.lists(st.sampled_from([*NASTY, *range(20, 60)]), max_size=30), st.integers(0, 250)),
    max_size=25,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(steps)
def test_it_is_a_dict_while_all_keys_fit(steps) -> None:
    cache, truth = RowCache(60, 24), DictCache(24)
    for what, numbers, value in steps:
        keys = np.array(numbers, np.int64)
        rows = rows_of(keys, value)
        if what == "insert":
            cache.insert(keys, rows)
            truth.insert(keys, rows)
        elif what == "present":
            cache.insert(keys, rows, only="present")
            there = np.array([key in truth.rows for key in keys.tolist()], np.bool_)
            truth.insert(keys[there], rows[there])
        elif what == "absent":
            cache.insert(keys, rows, only="absent")
            for key, row in zip(keys.tolist(), rows, strict=True):
                truth.rows.setdefault(key, row.tobytes())
        elif what == "erase":
            assert cache.erase(keys) == truth.erase(keys)
        mine, theirs = np.zeros((len(keys), 24), np.uint8), np.zeros((len(keys), 24), np.uint8)
        assert np.array_equal(cache.find(keys, mine), truth.find(keys, theirs))
        assert np.array_equal(mine, theirs)
        assert len(cache) == len(truth.rows)
        assert set(cache.keys().tolist()) == set(truth.rows)


@settings(max_examples=40, deadline=None)
@given(steps, st.sampled_from([1, 2, 7]), st.sampled_from(["oldest", "random"]))
def test_a_full_cache_forgets_but_never_lies(steps, capacity, eviction) -> None:
    cache, truth = RowCache(capacity, 24, eviction=eviction), DictCache(24)
    for what, numbers, value in steps:
        keys = np.array(numbers, np.int64)
        if what == "erase":
            cache.erase(keys)
            truth.erase(keys)
        else:
            cache.insert(keys, rows_of(keys, value))
            truth.insert(keys, rows_of(keys, value))
        out, wanted = np.zeros((len(keys), 24), np.uint8), np.zeros((len(keys), 24), np.uint8)
        found, there = cache.find(keys, out), truth.find(keys, wanted)
        assert not (found & ~there).any()
        assert np.array_equal(out[found], wanted[found])
        assert len(cache) <= capacity


def test_a_cache_as_large_as_its_table_holds_all_of_it() -> None:
    for count in (1, 2, 100, 5000):
        keys = np.random.default_rng(count).integers(-(2**62), 2**62, count)
        cache = RowCache(count, 8)
        cache.insert(keys, rows_of(keys, 1, 8))
        assert cache.find(keys, np.empty((count, 8), np.uint8)).all()
        assert cache.num_evicted == 0


def test_the_rows_read_last_stay() -> None:
    cache = RowCache(1000, 8)
    keys = np.arange(1000)
    cache.insert(keys, rows_of(keys, 0, 8))
    time.sleep(0.01)
    cache.find(keys[:500], np.empty((500, 8), np.uint8))
    cache.insert(np.arange(2000, 2300), rows_of(np.arange(300), 0, 8))
    assert cache.find(keys[:500], np.empty((500, 8), np.uint8)).all()
    assert cache.evict_older(1000.0) == 0


def test_rows_may_go_into_columns_of_a_wider_matrix() -> None:
    cache, keys = RowCache(10, 8), np.arange(5)
    cache.insert(keys, rows_of(keys, 3, 8))
    wide = np.zeros((5, 40), np.uint8)
    assert cache.find(keys, wide[:, 16:24]).all()
    assert np.array_equal(wide[:, 16:24], rows_of(keys, 3, 8))
    assert not wide[:, :16].any()
    assert not wide[:, 24:].any()


@pytest.mark.parametrize(("capacity", "width"), [(0, 8), (5, 0), (5, 12), (2**33, 8)])
def test_sizes_that_cannot_be_are_refused(capacity: int, width: int) -> None:
    with pytest.raises(ConfigError):
        RowCache(capacity, width)


@pytest.mark.parametrize(("capacity", "lookups"), [(400, 300_000), (64, 300_000)])
def test_no_row_is_torn_and_none_older_than_one_seen(capacity: int, lookups: int) -> None:
    """Each row is (key, number, key, number, ...): one writer counts up, evicts and erases, readers check."""
    hammer(capacity, lookups, num_keys=400)


def hammer(capacity: int, lookups: int, num_keys: int, width: int = 16, readers: int = 3) -> int:
    """Return the number of rows found; `width` numbers a row."""
    cache = RowCache(capacity, 8 * width)
    ended, problems, found_rows = threading.Event(), [], []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        newest = np.zeros(num_keys, np.int64)
        out = np.zeros((512, width), np.int64)
        hits = 0
        for _ in range(lookups // 512 // readers + 1):
            keys = random.integers(0, num_keys, 512)
            found = cache.find(keys, out.view(np.uint8))
            rows, own = out[found], keys[found]
            hits += len(own)
            if not ((rows[:, ::2] == own[:, None]).all() and (rows[:, 1::2] == rows[:, 1:2]).all()):
                problems.append("torn")
            if (rows[:, 1] < newest[own]).any():
                problems.append("older")
            np.maximum.at(newest, own, rows[:, 1])
        found_rows.append(hits)

    def write() -> None:
        random = np.random.default_rng(0)
        number = 0
        while not ended.is_set():
            number += 1
            keys = np.unique(random.integers(0, num_keys, 64))
            rows = np.empty((len(keys), width), np.int64)
            rows[:, ::2], rows[:, 1::2] = keys[:, None], number
            cache.insert(keys, rows.view(np.uint8))
            if number % 7 == 0:
                cache.erase(random.integers(0, num_keys, 20))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(readers)]
    writer = threading.Thread(target=write)
    for one in (writer, *threads):
        one.start()
    for one in threads:
        one.join()
    ended.set()
    writer.join()
    assert not problems, problems[:5]
    assert sum(found_rows) > 0
    return sum(found_rows)

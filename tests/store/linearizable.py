"""Readers beside a writer on a hierarchy of tiers: each row certifies itself, and its number never falls.

A row is (key, number, key, number, ...). The writer replaces and erases rows and adds new keys, so that the store
grows; lookups promote rows to the cache, which evicts others. A reader checks three things of every row: it is whole;
it is not older than a row of the key that this reader has seen; it is not older than what the writer had finished
writing before the lookup began.
"""

from __future__ import annotations

import threading

import numpy as np

from viviane.store import Column, HostTier, RowLayout
from viviane.store.cache import CacheTier
from viviane.store.hierarchy import Level, TableHierarchy
from viviane.store.mover import Mover

WIDTH = 16
LAYOUT = RowLayout([Column("weight", "int64", WIDTH)])
_NONE = np.empty(0, np.int64)


def rows_of(keys: np.ndarray, number: int) -> np.ndarray:
    rows = np.empty((len(keys), WIDTH), np.int64)
    rows[:, ::2], rows[:, 1::2] = keys[:, None], number
    return rows.view(np.uint8)


def problem_of(keys: np.ndarray, rows: np.ndarray, floor: np.ndarray, number: int) -> str | None:
    """Say what is wrong with rows, int64 (n, WIDTH); `floor`: the least numbers that they may have."""
    absent = ~rows.any(1)  # the default: a key that was erased, or never written
    if not ((rows[:, ::2] == keys[:, None]).all(1) & (rows[:, 1::2] == rows[:, 1:2]).all(1) | absent).all():
        return "a torn row"
    if (rows[:, 1] < floor)[~absent].any():
        return "a row older than one that was seen or written"
    if (rows[:, 1] > number).any():
        return "a row from the future"
    return None


def hammer(lookups: int, *, num_keys: int, cache_rows: int, readers: int = 2, batch: int = 2048) -> dict[str, int]:
    """Look up `lookups` keys beside a writer; returns counts.

    Raises:
        AssertionError: a row was torn, older than allowed, or from the future.
    """
    base = HostTier(LAYOUT, name="base", max_rows=num_keys)
    old = np.arange(num_keys // 2)
    base.put(old, rows_of(old, 1))
    store, cache, mover = HostTier(LAYOUT, max_rows=2 * num_keys), CacheTier(LAYOUT, cache_rows), Mover()
    levels = [Level(cache, "volatile"), Level(store, "store"), Level(base, "base")]
    table = TableHierarchy("t", LAYOUT, levels, mover=mover)
    written = np.zeros(num_keys, np.int64)  # by key the number of the last change that is finished
    state = {"number": 1, "changed": 0, "erased": 0}
    ended, problems, checked = threading.Event(), [], []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        newest, out, count = np.zeros(num_keys, np.int64), LAYOUT.empty(batch), 0
        while count < lookups // readers and not problems:
            # Half of the keys come from a fiftieth of the table: hits beside misses, promotion and eviction.
            keys = random.integers(0, num_keys, batch)
            keys[::2] %= num_keys // 50
            floor = np.maximum(newest[keys], written[keys])
            table.lookup(keys, out)
            rows = out.view(np.int64)
            found = problem_of(keys, rows, floor, state["number"])
            if found is not None:
                problems.append(found)
            np.maximum.at(newest, keys, rows[:, 1])
            count += batch
        checked.append(count)

    def write() -> None:
        random, top = np.random.default_rng(0), num_keys // 2
        while not ended.is_set():
            state["number"] += 1
            top = min(num_keys, top + 16)  # new keys
            keys = np.unique(np.concatenate([random.integers(0, top, 96), random.integers(0, num_keys // 50, 32)]))
            erased, keys = (keys[:4], keys[4:]) if state["number"] % 8 == 0 else (_NONE, keys)
            table.apply(keys, rows_of(keys, state["number"]), erased, {})
            written[keys] = state["number"]
            state["changed"] += len(keys)
            state["erased"] += len(erased)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(readers)]
    writer = threading.Thread(target=write)
    for one in (writer, *threads):
        one.start()
    for one in threads:
        one.join()
    ended.set()
    writer.join()
    mover.drain(5)
    status = table.status()
    mover.close()
    table.close()
    assert not problems, problems[:5]
    assert status["degraded"] == 0
    assert store.stats().rows_written
    hits = status["tiers"][0]["hits"]
    return {"lookups": sum(checked), "cache hits": hits, "changes": state["changed"], "erased": state["erased"],
            "evicted": cache.num_evicted}  # fmt: skip

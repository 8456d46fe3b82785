"""Memory that processes share: what one writes the others read, whole, also where one is killed while it writes."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from tiers import LAYOUT, rows_of
from viviane.core.errors import ConfigError, StoreError
from viviane.store import Column, RowLayout
from viviane.store.shared import SharedTier

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is a folder of Linux")
KEYS = np.arange(-500, 500)


@pytest.fixture
def name() -> Iterator[str]:
    made = f"test-{uuid4().hex[:8]}"
    yield made
    assert not files(made), "the last one to close it removes it"


def files(name: str) -> list[str]:
    return [str(one) for one in Path("/dev/shm").glob(f"viviane-*-{name}*")]


def certified(tier: SharedTier, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which keys are there, and their versions; every row is whole."""
    out = LAYOUT.zeros(len(keys))
    found = tier.fetch(keys, out)
    mixed = out[found].view(np.uint64)[:, 0]
    factor = pow(0xBF58476D1CE4E5B9, -1, 2**64)
    version = (mixed * np.uint64(factor)) - keys[found].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for one in np.unique(version):
        own = version == one
        assert np.array_equal(out[found][own], rows_of(keys[found][own], int(one))), "a torn row"
    return found, version


def test_rows_are_those_of_a_dict(name: str) -> None:
    random, expected = np.random.default_rng(1), {}
    with_room = SharedTier(name, LAYOUT, max_rows=200)
    for step in range(24):
        keys = random.integers(-60, 60, 20)
        if step % 3 == 2:
            assert with_room.erase(keys) == len({one for one in keys.tolist() if expected.pop(one, None) is not None})
        elif step % 3:
            rows = rows_of(np.concatenate([keys, keys]), step)[random.permutation(20)]
            with_room.put(keys, rows)
            expected.update({one: rows[i] for i, one in enumerate(keys.tolist())})
        else:
            with_room.replace(keys, rows_of(keys, step))
            changed = zip(keys.tolist(), rows_of(keys, step), strict=True)
            expected.update({one: row for one, row in changed if one in expected})
        every = np.arange(-60, 60)
        out = LAYOUT.zeros(120)
        assert every[with_room.fetch(every, out)].tolist() == sorted(expected)
        assert all(np.array_equal(out[one + 60], row) for one, row in expected.items())
        assert with_room.num_rows() == len(expected) == sum(len(part) for part, _ in with_room.scan(7))
    with_room.close()


@pytest.mark.parametrize("eviction", ["oldest", "random"])
def test_it_holds_what_it_is_made_for_and_others_make_room(eviction: str, name: str) -> None:
    with_room = SharedTier(name, LAYOUT, max_rows=len(KEYS), eviction=eviction)  # type: ignore[arg-type]
    with_room.put(KEYS, rows_of(KEYS, 1))
    assert with_room.num_rows() > 0.999 * len(KEYS)
    more = np.arange(10_000, 13_000)
    with_room.fill(more, rows_of(more, 2))
    assert with_room.num_rows() <= 1504
    found, version = certified(with_room, np.concatenate([KEYS, more]))
    assert found.sum() == with_room.num_rows()
    assert set(version.tolist()) <= {1, 2}
    with_room.close()


def test_memory_is_at_most_a_quarter_more_than_the_rows(name: str) -> None:
    layout = RowLayout([Column("weight", "float32", 32)])
    tier = SharedTier(name, layout, max_rows=10_000)
    assert sum(Path(one).stat().st_size for one in files(name)) <= 1.25 * 10_000 * layout.row_bytes
    tier.close()


def test_segments_of_others_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="valid name"):
        SharedTier("../etc", LAYOUT, max_rows=9)
    one = SharedTier(name, LAYOUT, max_rows=100, remove=False)
    one.close()
    one = SharedTier(name, LAYOUT, max_rows=101 * 7)  # no process uses it: it is created again
    one.close()
    one = SharedTier(name, LAYOUT, max_rows=100)
    with pytest.raises(StoreError, match="another table, or has"):
        SharedTier(name, RowLayout([Column("weight", "float32", 6)]), max_rows=100)
    with pytest.raises(StoreError, match="another table, or has"):
        SharedTier(name, LAYOUT, max_rows=900)
    with pytest.raises(StoreError, match="make room in /dev/shm"):
        SharedTier(f"{name}-large", LAYOUT, max_rows=2**45)
    assert not files(f"{name}-large")
    one.close()
    with pytest.raises(StoreError, match="closed"):
        one.fetch(KEYS[:1], LAYOUT.zeros(1))


def test_altered_memory_is_not_read(name: str) -> None:
    tier = SharedTier(name, LAYOUT, max_rows=8)
    tier.put(KEYS[:4], rows_of(KEYS[:4], 1))
    place = next(one for one in files(name) if not one.endswith(".users"))
    with Path(place).open("r+b") as file:
        data = file.read()
        at = data.index(rows_of(KEYS[2:3], 1).tobytes())
        file.seek(at + 5)
        file.write(bytes([data[at + 5] ^ 1]))
    found, _ = certified(tier, KEYS[:4])
    assert found.tolist() == [True, True, False, True]
    assert tier.stats().damaged == 1
    tier.close()


def write_for_ever(name: str, first: int) -> None:
    tier, number = SharedTier(name, LAYOUT, max_rows=len(KEYS)), first
    while True:
        tier.put(KEYS, rows_of(KEYS, number))
        number += 2


def test_processes_are_killed_while_they_write_and_no_row_is_torn(name: str) -> None:
    context, tier = multiprocessing.get_context("fork"), SharedTier(name, LAYOUT, max_rows=len(KEYS))
    random, reads, ended = np.random.default_rng(0), [0], threading.Event()

    def read() -> None:
        while not ended.is_set():
            reads[0] += int(certified(tier, KEYS)[0].sum())

    reader = threading.Thread(target=read)
    reader.start()
    for kill in range(5):
        writers = [context.Process(target=write_for_ever, args=(name, i)) for i in range(2)]
        for one in writers:
            one.start()
        time.sleep(0.05 + 0.05 * random.random())
        for one in writers:
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            one.join()
        tier.put(KEYS, rows_of(KEYS, 10**6 + kill))  # the lock of the dead ones is free
        found, version = certified(tier, KEYS)
        assert found.sum() > 0.99 * len(KEYS)
        assert set(version.tolist()) == {10**6 + kill}
    ended.set()
    reader.join()
    assert reads[0] > 0
    tier.close()

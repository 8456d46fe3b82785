"""Rows that leave and come in one sweep over a working file, against a dict."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers import LAYOUT, rows_of
from viviane.config import SGD
from viviane.core.errors import StoreError
from viviane.embedding import TableConfig
from viviane.embedding.tier_rows import TierRows
from viviane.store import ArrayTier, FileTier, file_sweep
from viviane.store.file_sweep import SweptFile
from viviane.store.tier import Exchange, Exchanging

IDS = 700
pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="sweeps need vectored reads")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few hundred rows fill many blocks."""
    monkeypatch.setattr(file_sweep, "BLOCK_BYTES", 1)
    monkeypatch.setattr(file_sweep, "SMALLEST_BYTES", 0)


def by_key(keys: np.ndarray, version: int) -> dict[int, bytes]:
    return {int(key): row.tobytes() for key, row in zip(keys, rows_of(keys, version), strict=True)}


class Slots:
    """Slots that rows leave and enter: a slot's old row must have left when its new one comes."""

    def __init__(self, old: dict[int, bytes], pairs: list[tuple[int, int]], later: np.ndarray | None) -> None:
        self.held, self.pairs = dict(old), pairs
        self.leaving = np.array([one for one, _ in pairs if one >= 0], np.int64)
        self.coming = np.array([one for _, one in pairs], np.int64)
        dirty = np.array([one >= 0 for one, _ in pairs], np.bool_)
        self.came: dict[int, bytes] = {}
        self.change = Exchange(self.leaving, self._give, self.coming, self._take, np.cumsum(dirty), later)

    def _give(self, places: np.ndarray, rows: np.ndarray) -> None:
        for line, key in enumerate(self.leaving[places].tolist()):
            rows[line] = np.frombuffer(self.held.pop(key), np.uint8)

    def _take(self, places: np.ndarray, rows: np.ndarray, lines: np.ndarray) -> None:
        for place, row in zip(places.tolist(), rows[lines], strict=True):
            assert self.pairs[place][0] not in self.held, "the slot is still taken"
            self.came[int(self.coming[place])] = row.tobytes()


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    ids = st.lists(st.integers(0, IDS - 1), max_size=80, unique=True).map(sorted)
    return draw(st.lists(st.tuples(ids, ids), min_size=1, max_size=4))


@settings(max_examples=40)
@given(steps=moves(), direct=st.booleans(), swept=st.booleans(), passes=st.integers(0, 3))
def test_rows_come_and_leave_as_in_a_dict(
    steps: list[tuple[list[int], list[int]]], direct: bool, swept: bool, passes: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.delattr(os, "O_DIRECT", raising=False)
        patch.setattr(file_sweep, "PAGES_WORTH_A_SWEEP", 0.0 if swept else 2.0)
        tier, known = FileTier(Path(name) / "t", LAYOUT, IDS, durable=False), {}
        for version, (some, others) in enumerate(steps):
            coming = [one for one in others if one not in some]
            leaving = some[: len(coming)]
            pairs = list(zip(leaving + [-1] * (len(coming) - len(leaving)), coming, strict=True))
            new = by_key(np.array(leaving, np.int64), version)
            later = (np.array(leaving, np.int16) + version) % (passes + 1) - 1 if passes else None
            slots = Slots(new, pairs, later)
            there = tier.exchange(slots.change)
            assert there.tolist() == [one in known for one in coming]
            assert slots.came == {one: known[one] for one in coming if one in known}
            assert not slots.held
            known |= new
            keys = np.arange(version * 7, version * 7 + 20)  # rows that go another way are seen by sweeps
            tier.put(keys, rows_of(keys, 90 + version))
            known |= by_key(keys, 90 + version)
            tier.erase(keys[:3])
            known = {key: row for key, row in known.items() if key not in keys[:3]}
            scanned = {int(k): row.tobytes() for ks, rows in tier.scan(64) for k, row in zip(ks, rows, strict=True)}
            assert scanned == known
        out = LAYOUT.zeros(IDS)
        found = tier.fetch(np.arange(IDS), out)
        assert {int(k): out[k].tobytes() for k in np.flatnonzero(found)} == known
        tier.close()


def change(leaving: np.ndarray, coming: np.ndarray, later: np.ndarray | None = None) -> Exchange:
    def give(places: np.ndarray, rows: np.ndarray) -> None:
        rows[:] = 7

    before = np.minimum(np.arange(1, len(coming) + 1), len(leaving))
    return Exchange(leaving, give, coming, lambda places, rows, lines: None, before, later)


def test_few_rows_and_wide_rows_are_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = change(np.arange(0, 300), np.arange(300, 700))
    assert not SweptFile(-1, -1, (1 << 19) + 8, tmp_path).is_worth_it(some)  # no small block ends at a page and a row
    swept = SweptFile(-1, -1, LAYOUT.row_bytes, tmp_path)
    assert swept.is_worth_it(some)
    for limit, value in (("SMALLEST_BYTES", 1 << 30), ("PAGES_WORTH_A_SWEEP", 2.0)):
        with monkeypatch.context() as patch:
            patch.setattr(file_sweep, limit, value)
            assert not swept.is_worth_it(some)
    monkeypatch.setattr(file_sweep, "MOST_WAITING", 299 * LAYOUT.row_bytes)
    assert swept.is_worth_it(some)
    assert not swept.is_worth_it(change(np.arange(400, 700), np.arange(300)))  # slots are needed before their rows left


def test_a_pass_reads_what_was_written_for_it_in_one_run(tmp_path: Path) -> None:
    """Every 40th of 100,000 rows: at their own places they lie on most pages, and beside each other on few."""
    tier, keys = FileTier(tmp_path / "t", LAYOUT, 100_000, durable=False), np.arange(0, 100_000, 40)
    others = keys + 20
    tier.exchange(change(np.sort(np.concatenate([keys, others])), keys[:0], np.tile(np.int16([2, 0]), len(keys))))
    before = tier.stats().bytes_read
    assert tier.exchange(change(keys[:0], others)).all()
    assert tier.stats().bytes_read - before < len(others) * LAYOUT.row_bytes + 4 * 4096
    for _ in range(20):  # extents are used again
        tier.exchange(change(others, keys, np.zeros(len(others), np.int16)))
        tier.exchange(change(keys, others, np.ones(len(keys), np.int16)))
    out = LAYOUT.zeros(len(others))
    assert tier.fetch(others, out).all()
    assert (out == 7).all()
    tier.close()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path / "t", LAYOUT, IDS, durable=False)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StoreError, match=r"(?s)a tier cannot be written.*No space left.*make room"):
            tier.exchange(change(np.arange(0, 300), np.arange(300, 700)))
    tier.close()


def test_a_sweep_reads_only_what_was_written(tmp_path: Path) -> None:
    """Rows that were never in the file are not read, and blocks without rows of the move are not touched."""
    tier = FileTier(tmp_path / "t", LAYOUT, 1 << 20, durable=False)
    before = tier.stats()
    tier.exchange(change(np.arange(0, 300), np.arange(300, 600)))
    after = tier.stats()
    assert after.bytes_read == before.bytes_read
    assert 300 * LAYOUT.row_bytes <= after.bytes_written < 300 * LAYOUT.row_bytes + 2 * 4096
    assert (after.rows_read, after.rows_written) == (0, 300)
    tier.close()


class Forwarding:
    """A tier of another class around a file."""

    def __init__(self, below: FileTier) -> None:
        self.below, self.exchange, self.asked = below, self._exchange, 0

    def _exchange(self, change: Exchange) -> np.ndarray:
        self.asked += 1
        return self.below.exchange(change)


def test_every_tier_that_can_exchange_is_asked_to(tmp_path: Path) -> None:
    table = TableConfig(name="t", num_rows=IDS, dim=3)
    file = FileTier(tmp_path / "file", LAYOUT, IDS)
    keys = np.arange(20)
    file.put(keys, rows_of(keys, 1))
    tier = Forwarding(file)
    slots = Slots({}, [(-1, 4), (-1, 30)], None)
    there = TierRows(table, LAYOUT, SGD(), 0, tier).exchange(slots.change)
    assert (there is not None and there.tolist(), tier.asked) == ([True, False], 1)
    assert slots.came == by_key(np.array([4]), 1)
    assert isinstance(file, Exchanging)
    array = ArrayTier(LAYOUT, IDS)
    assert TierRows(table, LAYOUT, SGD(), 0, array).exchange(slots.change) is None
    file.close()

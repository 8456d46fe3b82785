"""The slots of a cache: what every admission keeps true, and the same with threads as without."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import viviane.store.slots as slots_of_cache
from viviane.store.slots import CacheFullError, Region, SlotMap

REGIONS = [Region("a", 0, 20, 0, 6), Region("b", 20, 30, 6, 9)]
BATCHES = st.lists(
    st.tuples(st.lists(st.integers(0, 51), min_size=1, max_size=12), st.booleans(), st.integers(0, 2)), max_size=25
)


def check_map(slots: SlotMap) -> None:
    """A row has a slot if and only if the slot has the row."""
    rows = np.flatnonzero(slots.slot_of > 0)
    assert (slots.owner[slots.slot_of[rows] - 1] == rows).all()
    assert np.count_nonzero(slots.owner >= 0) == len(rows)


@settings(max_examples=60, deadline=None)
@given(batches=BATCHES)
def test_any_sequence_of_batches_keeps_rows_in_use_and_reports_what_moved(batches: list[Any]) -> None:
    slots = SlotMap(REGIONS, pinned=2)
    held: dict[int, int] = {}  # of each slot, the row that a cache would hold there
    dirty: set[int] = set()
    written_by: dict[int, int] = {}
    in_use: list[tuple[int, set[int]]] = []
    for stamp, (given_rows, trains, ahead) in enumerate(batches, 1):
        in_use = in_use[len(in_use) - min(ahead, len(in_use)) :]
        guard = in_use[0][0] if in_use else stamp
        rows = np.array(given_rows, np.int32)
        try:
            admission = slots.admit(rows, stamp, guard)
        except CacheFullError:
            check_map(slots)
            assert all(slots.slot_of[row] > 0 for _, own in in_use for row in own)
            continue
        assert (slots.owner[admission.slots] == rows).all()
        assert (np.diff(admission.new_rows) > 0).all()
        for row, slot, old, was_dirty, left in zip(
            admission.new_rows.tolist(), admission.new_slots.tolist(), admission.old_rows.tolist(),
            admission.old_dirty.tolist(), admission.left.tolist(), strict=True,
        ):  # fmt: skip
            assert held.get(slot, -1) == old
            assert not any(old in own for _, own in in_use), "a row in use was evicted"
            assert was_dirty == (old in dirty)
            assert left == written_by.pop(row, 0)
            if was_dirty:
                written_by[old] = admission.ticket
            dirty.discard(old)
            held[slot] = row
        assert {row for row in given_rows if row < 50} <= set(held.values())
        check_map(slots)
        if trains:
            slots.mark_dirty(admission.slots)
            dirty |= {row for row in given_rows if row < 50}
        in_use.append((stamp, {row for row in given_rows if row < 50}))


def test_threads_give_the_same_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [Region(str(t), 500 * t, 500, 200 * t, 200) for t in range(7)]
    alone, shared = SlotMap(regions, pinned=2), SlotMap(regions, pinned=2)
    random = np.random.default_rng(0)
    for stamp in range(1, 30):
        rows = (3500 * random.random(700) ** 1.5).astype(np.int64)
        one = alone.admit(rows, stamp, stamp)
        with monkeypatch.context() as patch:
            patch.setattr(slots_of_cache, "_SMALL", 4)
            patch.setattr("viviane.store.threads.num_workers", lambda: 3)
            other = shared.admit(rows, stamp, stamp)
        for name in ("slots", "new_rows", "new_slots", "old_rows", "old_dirty", "left"):
            assert (getattr(one, name) == getattr(other, name)).all(), name
        for slots in (alone, shared):
            slots.mark_dirty(one.slots[::3])
    assert (alone.owner == shared.owner).all()


def test_what_could_not_be_written_back_has_its_slot_again() -> None:
    slots = SlotMap([Region("a", 0, 20, 0, 3)], pinned=0)
    slots.mark_dirty(slots.admit(np.array([1, 2, 3]), 1, 1).slots)
    slots.put_back(slots.admit(np.array([7, 2, 8]), 2, 2))
    check_map(slots)
    assert sorted(slots.owner.tolist()) == [1, 2, 3]
    assert slots.dirty.all()

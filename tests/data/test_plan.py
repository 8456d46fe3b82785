from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from viviane.data.plan import EpochPlan, RowGroup
from viviane.data.row_buffer import Jagged, Rows


def groups_of(sizes: list[int]) -> list[RowGroup]:
    return [RowGroup(i // 3, i % 3, 0, rows) for i, rows in enumerate(sizes)]


@given(sizes=st.lists(st.integers(0, 9), max_size=12), shuffle_rows=st.none() | st.integers(1, 30))
def test_windows_cover_every_group_once_and_are_large_enough(sizes: list[int], shuffle_rows: int | None) -> None:
    plan = EpochPlan(groups_of(sizes), shuffle_rows, seed=1, epoch=0)
    members = [group for window in plan.windows for group in window.groups]
    assert sorted((g.file, g.index) for g in members) == [(g.file, g.index) for g in groups_of(sizes) if g.num_rows]
    assert plan.num_rows == sum(sizes)
    start = 0
    for window in plan.windows:
        assert window.start == start
        assert window.num_rows == sum(group.num_rows for group in window.groups)
        start += window.num_rows
    for window in plan.windows[:-1]:
        assert window.num_rows >= (shuffle_rows or 1)
        # no larger than needed: without its last group it would be too small
        assert window.num_rows - window.groups[-1].num_rows < (shuffle_rows or 1)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    shuffle_rows=st.none() | st.integers(1, 30),
    data=st.data(),
)
def test_pieces_are_the_rows_asked_for(sizes: list[int], shuffle_rows: int | None, data: st.DataObject) -> None:
    plan = EpochPlan(groups_of(sizes), shuffle_rows, seed=1, epoch=0)
    start = data.draw(st.integers(0, plan.num_rows - 1))
    stop = data.draw(st.integers(start, plan.num_rows))
    rows = [window.start + row for window, first, last in plan.pieces(start, stop) for row in range(first, last)]
    assert rows == list(range(start, stop))


def test_the_order_is_frozen() -> None:
    # a saved position means the same rows only as long as this order stays what it is
    plan = EpochPlan(groups_of([4, 4, 4, 4]), 8, seed=7, epoch=2)
    assert [[(g.file, g.index) for g in window.groups] for window in plan.windows] == ORDER
    orders = [plan.permutation(window) for window in plan.windows]
    assert [order.tolist() for order in orders if order is not None] == PERMUTATIONS


ORDER = [[(1, 0), (0, 1)], [(0, 2), (0, 0)]]
PERMUTATIONS = [[4, 0, 1, 6, 7, 2, 5, 3], [0, 1, 2, 4, 6, 5, 7, 3]]


def take(bags: Jagged, rows: Rows) -> Jagged:
    offsets = np.concatenate([[0], np.cumsum(bags.lengths(rows))]).astype(np.int64)
    values, weights = np.empty(offsets[-1], bags.values.dtype), np.empty(offsets[-1], np.float32)
    bags.take(rows, values, weights)
    return Jagged(values, offsets, weights)


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    data=st.data(),
)
def test_taking_rows_of_bags(lengths: list[int], data: st.DataObject) -> None:
    offsets = np.cumsum([0, *lengths])
    values = np.arange(offsets[-1], dtype=np.int32)
    bags = Jagged(values, offsets, values.astype(np.float32) / 2)
    lists = [values[a:b].tolist() for a, b in pairwise(offsets)]
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=30))
    first = data.draw(st.integers(0, len(lengths)))
    last = data.draw(st.integers(first, len(lengths)))
    for chosen, wanted in ((np.array(rows, np.int64), rows), (slice(first, last), range(first, last))):
        taken = take(bags, chosen)
        assert taken.weights is not None
        found = [taken.values[a:b].tolist() for a, b in pairwise(taken.offsets)]
        assert found == [lists[row] for row in wanted]
        assert (taken.weights * 2).tolist() == taken.values.tolist()
        assert taken.offsets[0] == 0
    joined = Jagged.join([take(bags, slice(0, first)), take(bags, slice(first, len(lengths)))])
    assert joined.values.tolist() == values.tolist()
    assert joined.offsets.tolist() == offsets.tolist()

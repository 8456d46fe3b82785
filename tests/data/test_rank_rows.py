"""Rows of a window that are one process's: those of its share of every batch, against a plain count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from viviane.data.buffers import Buffers
from viviane.data.plan import RowGroup, Window
from viviane.data.rank_rows import BatchRanges, WindowRows, rank_order


def places(start: int, num_rows: int, batch: int, share: tuple[int, int], first_row: int, last_row: int) -> list[int]:
    """Return which places of a window's order are a share's, one by one."""
    found = []
    for place in range(num_rows):
        row = start + place
        if not first_row <= row < last_row:
            continue
        begin = first_row + (row - first_row) // batch * batch
        size = min(batch, last_row - begin)
        rank, ranks = share
        if begin + size * rank // ranks <= row < begin + size * (rank + 1) // ranks:
            found.append(place)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranges_of_batches_make_up_the_epoch(ranks: int) -> None:
    for first_row, last_row, batch in itertools.product((0, 20), (0, 20, 41, 60), (1, 4, 10, 50)):
        shares = [BatchRanges(first_row, last_row, batch, (rank, ranks)) for rank in range(ranks)]
        wanted = [(start, min(start + batch, last_row)) for start in range(first_row, last_row, batch)]
        assert {len(share) for share in shares} == {len(wanted)}
        for number, (start, stop) in enumerate(wanted):
            parts = [share[number] for share in shares]
            assert [row for first, last in parts for row in range(first, last)] == list(range(start, stop))
            assert max(last - first for first, last in parts) <= -(-(stop - start) // ranks)
        assert shares[0].some(-2, 2) == [shares[0][number] for number in range(min(2, len(wanted)))]
        assert shares[0].some(len(wanted), len(wanted) + 5) == []


def test_ranges_of_an_epoch_of_any_length_take_no_memory() -> None:
    ranges = BatchRanges(0, 2**50, 3, (1, 2))
    assert ranges[len(ranges) - 1] == (2**50 - 1, 2**50)
    with pytest.raises(IndexError):
        ranges[len(ranges)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_spans_are_those_of_the_batches(ranks: int) -> None:
    cases = itertools.product((0, 7, 40), (1, 6, 33), (1, 4, 10, 50), (0, 10, 20), (41, 60, 73))
    for start, num_rows, batch, first_row, last_row in cases:
        taken = []
        for rank in range(ranks):
            window = Window(0, start, num_rows, ())
            ranges = BatchRanges(first_row, last_row, batch, (rank, ranks))
            spans = ranges.spans(window)
            assert spans is not None
            assert all(first < last for first, last in ranges.within(window))
            assert bool(spans) == (next(ranges.within(window), None) is not None)
            wanted = places(start, num_rows, batch, (rank, ranks), first_row, last_row)
            assert [place for first, last in spans for place in range(first, last)] == wanted
            assert all(last < first for (_, last), (first, _) in itertools.pairwise(spans))  # as few as there can be
            taken += wanted
        assert sorted(taken) == [p for p in range(num_rows) if first_row <= start + p < last_row]


def test_one_process_has_all_rows() -> None:
    window = Window(0, 0, 5, (RowGroup(0, 0, 0, 5),))
    ranges = BatchRanges(0, 5, 2, (0, 1))
    assert ranges.spans(window) is None
    assert list(ranges.within(window)) == [(0, 2), (2, 4), (4, 5)]
    found = rank_order(np.array([4, 0, 1, 3, 2]), window, None, Buffers())
    assert found.rows is None
    assert found.order.dtype == torch.int32
    assert found.order.tolist() == [4, 0, 1, 3, 2]


def test_the_order_counts_among_own_rows() -> None:
    rng = np.random.default_rng(1)
    sizes = [100, 1, 37, 62]
    begins = np.cumsum([0, *sizes])
    groups = tuple(RowGroup(0, i, int(begins[i]), size) for i, size in enumerate(sizes))
    window = Window(3, 1000, 200, groups)
    order = rng.permutation(200)
    memory = Buffers()
    for spans in ([], [(0, 200)], [(5, 6)], [(0, 50), (100, 150)], [(3, 9), (20, 21), (190, 200)]):
        found = rank_order(order, window, spans, memory)
        assert found.rows is not None
        staged = np.concatenate([rows + begin for rows, begin in zip(found.rows, begins, strict=False)])
        wanted = np.concatenate([order[:0], *(order[first:last] for first, last in spans)])
        assert (np.diff(staged) > 0).all()
        assert staged[found.order.numpy()].tolist() == wanted.tolist()
        assert len(found.rows) == 4


def test_spans_stand_side_by_side_among_own_rows() -> None:
    window = Window(0, 0, 40, (RowGroup(0, 0, 0, 40),))
    rows = WindowRows(window, [(5, 10), (20, 25), (30, 40)])
    assert rows.num_rows == 20
    kept = [*range(5, 10), *range(20, 25), *range(30, 40)]
    for spans in ([(5, 10), (20, 22)], [(6, 9), (21, 25), (30, 31)], [(39, 40)], [(5, 7), (8, 10), (20, 25), (30, 40)]):
        wanted = [kept.index(position) for first, last in spans for position in range(first, last)]
        found = rows.places(spans)
        assert [place for first, last in found for place in range(first, last)] == wanted
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(found))
    assert rows.places([(5, 10), (20, 25), (30, 40)]) == [(0, 20)]
    assert WindowRows(window, None).places([(0, 3), (3, 5), (7, 40)]) == [(0, 5), (7, 40)]

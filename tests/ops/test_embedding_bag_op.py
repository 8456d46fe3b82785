"""Lookup and pooling against their reference, forward; nasty shapes; messages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import VivianeError
from viviane.ops import embedding_bag as op
from viviane.ops.embedding_bag import reference


@st.composite
def bags(draw):
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    num_rows = draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    total = sum(lengths)
    rows = torch.randint(num_rows, (total,), generator=generator)
    # Small whole numbers: every sum is exact, so that the comparison needs no tolerance.
    storage = torch.randint(-8, 9, (num_rows, draw(st.integers(1, 19))), generator=generator).float()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.randint(-3, 4, (total,), generator=generator).float() if draw(st.booleans()) else None
    return storage, rows, offsets, weights


@given(bags())
@settings(deadline=None, max_examples=60)
def test_pooling_equals_the_reference_exactly(case):
    storage, rows, offsets, weights = case
    assert torch.equal(op.embedding_bag(storage, rows, offsets, weights), reference.embedding_bag(*case))
    assert torch.equal(op.embedding_lookup(storage, rows), reference.embedding_lookup(storage, rows))


@given(bags(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_mean_weights_equal_the_reference(case, masked):
    _, rows, offsets, weights = case
    counted = (rows % 2 == 0) if masked else None
    found = op.mean_weights(offsets, counted, weights, len(rows))
    # One division rounds once here, twice (reciprocal, product) in the operation: 2 ulp of float32.
    torch.testing.assert_close(
        found, reference.mean_weights(offsets, counted, weights, len(rows)), rtol=3e-7, atol=0, equal_nan=False
    )


def test_no_bags_and_only_empty_bags():
    table, none = torch.ones(3, 5), torch.zeros(0, dtype=torch.int64)
    assert op.embedding_bag(table, none, torch.tensor([0])).shape == (0, 5)
    assert op.embedding_bag(table, none, torch.tensor([0, 0, 0])).tolist() == [[0.0] * 5] * 2
    assert op.embedding_lookup(table, none).shape == (0, 5)
    assert op.mean_weights(torch.tensor([0, 0]), None, None, 0).shape == (0,)


def test_threads_do_not_change_a_bit():
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(50, 17, generator=generator)
    rows = torch.randint(50, (40_000,), generator=generator)
    offsets = torch.tensor([0, 7, 7, 30_000, 40_000])
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(op.embedding_bag(table, rows, offsets))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("rows", "storage", "message"),
    [
        (
            torch.zeros(2, dtype=torch.int32),
            torch.ones(2, 2),
            r"rows must be a vector of torch.int64[\s\S]*torch.int32",
        ),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2), r"rows must be a vector[\s\S]*\(2, 2\)"),
        (torch.zeros(2, dtype=torch.int64), torch.ones(2, 4).t(), "storage must be a contiguous matrix"),
    ],
)
def test_malformed_arguments_are_named(rows, storage, message):
    with pytest.raises(VivianeError, match=message):
        op.embedding_lookup(storage, rows)

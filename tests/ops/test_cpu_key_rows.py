"""From keys to rows on the CPU: every policy against the reference, the first offender, strides, threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import VivianeError
from viviane.ops.key_rows import HASH, RAISE, REPLACE, SKIP, ColumnRule, KeyRules, key_rows, reference

CPU = torch.device("cpu")


@st.composite
def columns_and_keys(draw):
    rules = []
    for _ in range(draw(st.integers(1, 5))):
        num_rows = draw(st.integers(2, 20))
        padding = draw(st.sampled_from([-1, 0, num_rows - 1]))
        policy = draw(st.sampled_from([RAISE, REPLACE, HASH, SKIP]))
        rules.append(ColumnRule(draw(st.integers(0, 50)), num_rows, policy, draw(st.integers(0, 99)), padding))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    edge = torch.iinfo(dtype)
    one = st.one_of(st.integers(-2, 22), st.sampled_from([edge.min, edge.max]))
    chosen = draw(st.booleans())
    width = draw(st.integers(1, 6)) if chosen else len(rules)
    size = draw(st.integers(0, 9))
    keys = torch.tensor(draw(st.lists(one, min_size=size * width, max_size=size * width)), dtype=dtype)
    keys = keys.view(width, size).t() if draw(st.booleans()) else keys.view(size, width)
    columns = torch.tensor([draw(st.integers(0, width - 1)) for _ in rules]) if chosen else None
    null_row = draw(st.sampled_from([100, 2**31 - 2, 2**31 - 1, 2**40]))
    return keys, KeyRules(rules, null_row, CPU), columns


@given(columns_and_keys())
@settings(deadline=None, max_examples=300)
def test_equals_the_reference(case):
    for found, expected in zip(key_rows(*case), reference.key_rows(*case), strict=True):
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        assert torch.equal(found, expected)


def test_the_first_offender_is_reported_for_any_number_of_threads(on_threads):
    rules = KeyRules([ColumnRule(0, 10, RAISE), ColumnRule(10, 10, SKIP)], 20, CPU)
    keys = torch.zeros(60_000, 2, dtype=torch.int32)
    keys[:, 1] = 11
    keys[41_234, 0], keys[41_233, 0], keys[59_999, 0] = 77, -3, 12
    for rows, record in on_threads(lambda: key_rows(keys, rules)):
        assert record.tolist() == [1, 2 * 41_233, -3]
        assert rows[41_234].tolist() == [20, 20]


def test_the_largest_key_of_a_large_table_and_an_empty_batch():
    rules = KeyRules([ColumnRule(2**31, 2**40, RAISE)], 2**41, CPU)
    rows, record = key_rows(torch.tensor([[2**40 - 1], [0]]), rules)
    assert rows.tolist() == [[2**31 + 2**40 - 1], [2**31]]
    assert record.tolist() == [0, 0, 0]
    assert key_rows(torch.zeros(0, 1, dtype=torch.int64), rules)[0].shape == (0, 1)


def test_keys_that_are_no_whole_numbers_are_refused():
    with pytest.raises(VivianeError, match="whole numbers"):
        key_rows(torch.zeros(1, 1), KeyRules([ColumnRule(0, 1, RAISE)], 1, CPU))


def test_rows_go_where_they_are_told():
    rules = KeyRules([ColumnRule(10, 5, SKIP)], 99, CPU)
    out = torch.zeros(2, 1, dtype=torch.int32)
    assert key_rows(torch.tensor([[4], [5]]), rules, out=out)[0] is out
    assert out.tolist() == [[14], [99]]
    with pytest.raises(VivianeError, match="do not fit"):
        key_rows(torch.tensor([[4]]), rules, out=out)

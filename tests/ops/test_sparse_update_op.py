"""Summing duplicates and the row rules: hand-computed steps, the reference, nasty input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import VivianeError
from viviane.ops import sparse_update as op
from viviane.ops.sparse_update import reference


@st.composite
def entries(draw):
    count, dim = draw(st.integers(0, 40)), draw(st.integers(1, 19))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    rows = torch.randint(draw(st.integers(1, 12)), (count,), generator=generator)
    shared = draw(st.booleans())
    matrices = draw(st.integers(1, 5)) if shared else count
    # Whole numbers: sums are exact whatever their order.
    gradients = torch.randint(-8, 9, (matrices, dim), generator=generator).float()
    sources = torch.randint(matrices, (count,), generator=generator) if shared else None
    weights = torch.randint(-3, 4, (count,), generator=generator).float() if draw(st.booleans()) else None
    return rows, gradients, sources, weights


@given(entries(), st.sampled_from([None, 12, 2**31 + 1]))
@settings(deadline=None, max_examples=80)
def test_sums_equal_the_reference_exactly(case, num_rows):
    rows, sums = op.sum_duplicates(*case, num_rows=num_rows)
    expected_rows, expected = reference.sum_duplicates(*case)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, expected_rows)
    assert torch.equal(sums, expected)


def test_one_row_100_000_times_and_rows_beyond_32_bits():
    rows = torch.full((100_001,), 2**33 + 5)
    rows[-1] = 2**33 + 4
    found, sums = op.sum_duplicates(rows, torch.ones(100_001, 3))
    assert found.tolist() == [2**33 + 4, 2**33 + 5]
    assert sums.tolist() == [[1.0] * 3, [100_000.0] * 3]


def test_threads_and_runs_do_not_change_a_bit():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(300, (60_000,), generator=generator)
    gradients = torch.randn(60_000, 16, generator=generator)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(op.sum_duplicates(rows, gradients, num_rows=300)[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])


def test_sgd_by_hand():
    table = torch.tensor([[1.0], [2.0]])
    op.sgd_update(table, torch.tensor([1]), torch.tensor([[0.5]]), lr=0.1, weight_decay=0.25)
    # g = 0.5 + 0.25 * 2 = 1;  w = 2 - 0.1
    assert table[:, 0].tolist() == pytest.approx([1.0, 1.9], rel=1e-6)


def test_three_steps_of_adagrad_by_hand():
    table, s = torch.tensor([[1.0]]), torch.tensor([[0.1]])
    for g in (0.3, -0.4, 0.1):
        op.adagrad_update(table, s, torch.tensor([0]), torch.tensor([[g]]), lr=0.5, epsilon=0.01)
    # s: 0.19, 0.35, 0.36;  roots 0.4358899, 0.5916080, 0.6
    # w: 1 - 0.15 / 0.4458899 = 0.6635942;  + 0.2 / 0.6016080 = 0.9960366;  - 0.05 / 0.61 = 0.9140694
    assert s.item() == pytest.approx(0.36, rel=1e-6)
    assert table.item() == pytest.approx(0.9140694, rel=1e-6)


def test_two_steps_of_adam_by_hand():
    table, m, v = torch.tensor([[1.0]]), torch.zeros(1, 1), torch.zeros(1, 1)
    rule = {"lr": 0.1, "beta1": 0.5, "beta2": 0.75, "epsilon": 0.01}
    op.adam_update(table, m, v, torch.tensor([0]), torch.tensor([[2.0]]), step=1, **rule)
    # m = 1, v = 1, a = 0.1 * sqrt(0.25) / 0.5 = 0.1;  w = 1 - 0.1 / 1.01
    assert table.item() == pytest.approx(1 - 0.1 / 1.01, rel=1e-6)
    op.adam_update(table, m, v, torch.tensor([0]), torch.tensor([[-1.0]]), step=2, **rule)
    # m = 0.5 - 0.5 = 0, v = 0.75 + 0.25 = 1: the means cancel and w stays
    assert (m.item(), v.item()) == (0.0, 1.0)
    assert table.item() == pytest.approx(1 - 0.1 / 1.01, rel=1e-6)
    op.adam_update(table, m, v, torch.tensor([0]), torch.tensor([[2.0]]), step=3, **rule)
    # m = 1, v = 0.75 + 1 = 1.75, a = 0.1 * sqrt(1 - 0.421875) / 0.875
    alpha = 0.1 * math.sqrt(0.578125) / 0.875
    assert table.item() == pytest.approx(1 - 0.1 / 1.01 - alpha / (math.sqrt(1.75) + 0.01), rel=1e-6)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "adam_ages"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_rules_equal_the_reference_over_blocks(rule, weight_decay, monkeypatch):
    monkeypatch.setattr(op, "_BLOCK_ELEMENTS", 20)  # several uneven blocks
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(40, generator=generator)[:17].sort().values
    tables = [torch.randn(40, 7, generator=generator), torch.rand(40, 7), torch.rand(40, 7)]
    ours, theirs = [t.clone() for t in tables], [t.double() for t in tables]
    for step in (1, 2, 3):
        g = torch.randn(17, 7, generator=generator)
        for module, (w, a, b), grad in ((op, ours, g), (reference, theirs, g.double())):
            if rule == "sgd":
                module.sgd_update(w, rows, grad, lr=0.1, weight_decay=weight_decay)
            elif rule == "adagrad":
                module.adagrad_update(w, a, rows, grad, lr=0.1, epsilon=1e-3, weight_decay=weight_decay)
            else:
                age = torch.arange(17) + step if rule == "adam_ages" else step
                options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3, "weight_decay": weight_decay}
                module.adam_update(w, a, b, rows, grad, step=age, **options)
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[rows] = False
    for mine, exact, start in zip(ours, theirs, tables, strict=True):
        # float32 against float64 over three steps of numbers near 1.
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(mine[untouched], start[untouched])


def test_malformed_arguments_are_named():
    with pytest.raises(VivianeError, match=r"without sources, each row needs one gradient[\s\S]*3 and 2"):
        op.sum_duplicates(torch.zeros(3, dtype=torch.int64), torch.ones(2, 2))
    with pytest.raises(VivianeError, match=r"each row needs one gradient[\s\S]*1 and \(2, 2\)"):
        op.sgd_update(torch.ones(3, 2), torch.tensor([0]), torch.ones(2, 2), lr=0.1)

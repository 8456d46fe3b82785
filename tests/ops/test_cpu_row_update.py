"""Row updates on the CPU: every rule against the reference in float64, sums, ranges, rows of 16 bits, threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.config.optimizers import (
    SGD,
    Adadelta,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Lamb,
    RMSProp,
    RowWiseAdam,
)  # fmt: skip
from viviane.core.errors import VivianeError
from viviane.ops.row_update import Entries, Scratch, initial_state, reference, state_shape, sum_rows, update_rows
from viviane.ops.row_update.rounding import noise, round_bfloat16, round_float16

RULES = [
    SGD(),
    SGD(momentum=0.9, weight_decay=0.1),
    SGD(momentum=0.9, nesterov=True, clip_row_norm=1.0),
    SGD(momentum=0.9, update="global", weight_decay=0.01),
    AdaGrad(clip_row_norm=0.5, weight_decay=0.1),
    AdaGrad(initial_accumulator=0.1, epsilon=0.01, epsilon_inside_root=True),
    AdaGrad(row_wise=True),
    RMSProp(),
    RMSProp(epsilon=0.01, epsilon_inside_root=True),
    Adam(),
    Adam(update="global", epsilon=1e-3, epsilon_inside_root=True),
    Adam(update="lazy_global"),
    Adam(update="lazy_global", beta1=0.0),
    Adamax(epsilon=1e-3, weight_decay=0.1),
    Adamax(epsilon=1e-3, update="global"),
    Adadelta(epsilon=0.01, update="global"),
    RMSProp(epsilon=0.01, update="global"),
    Adadelta(epsilon=0.01, clip_row_norm=1.0),
    AdamW(weight_decay=0.1, clip_row_norm=1.0),
    AdamW(update="global", epsilon=1e-3, epsilon_inside_root=True),
    RowWiseAdam(epsilon=1e-3, weight_decay=0.1),
    RowWiseAdam(epsilon=0.01, epsilon_inside_root=True),
    Lamb(epsilon=1e-3, weight_decay=0.1),
    Ftrl(lambda1=0.05, lambda2=0.1, beta=1.0, weight_decay=0.1),
]


@st.composite
def entry_lists(draw, dim, dtype=torch.float32):
    count, num_rows = draw(st.integers(0, 40)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    rows = torch.randint(-3, num_rows + 4, (count,), generator=generator)
    rows = rows.to(draw(st.sampled_from([torch.int32, torch.int64])))
    gradients = torch.randn(max(count, 1) * dim, generator=generator).to(dtype)
    sources = None
    if draw(st.booleans()):
        sources = torch.randint(len(gradients) - dim + 1, (count,), generator=generator)
        sources = sources.to(draw(st.sampled_from([torch.int32, torch.int64])))
    weights = torch.randn(count, generator=generator) if draw(st.booleans()) else None
    return Entries(rows, gradients[: count * dim] if sources is None else gradients, sources, weights), num_rows


def widened(entries):
    weights = None if entries.weights is None else entries.weights.double()
    return Entries(entries.rows, entries.gradients.double(), entries.sources, weights)


def beginning(rule, weight):
    return {name: torch.full(state_shape(name, weight, rule), value) for name, value in initial_state(rule).items()}


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_rules_equal_the_reference(rule, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    dim = 7
    steps = [data.draw(entry_lists(dim)) for _ in range(3)]
    num_rows = max(rows for _, rows in steps)
    weight = torch.randn(num_rows, dim, generator=generator)
    state, scratch = beginning(rule, weight), Scratch()
    wide, wide_state = weight.double(), {name: part.double() for name, part in state.items()}
    settings_ = {
        "lr": 0.1,
        "scale": data.draw(st.sampled_from([1.0, -0.5])),
        "first_row": data.draw(st.integers(-2, 2)),
    }
    for step, (entries, _) in zip((1, 2, 7), steps, strict=True):
        update_rows(weight, state, entries, rule, step=step, scratch=scratch, **settings_)
        reference.update_rows(wide, wide_state, widened(entries), rule, step=step, **settings_)
    # Three steps of about 20 float32 operations on numbers around 1: 60 * 2^-24 = 4e-6 of the largest operand. FTRL
    # holds its row as z lr, ten times as large. Where g^2 is all that a root has, g / |g| magnifies the error of a
    # sum that nearly cancels.
    torch.testing.assert_close(weight.double(), wide, rtol=1e-4, atol=2e-5)
    for name, part in state.items():
        torch.testing.assert_close(part.double(), wide_state[name], rtol=1e-4, atol=5e-5)


WHOLE_ROW_RULES = [
    AdaGrad(row_wise=True),
    SGD(clip_row_norm=0.5),
    Ftrl(lambda1=0.05, beta=1.0),
    RowWiseAdam(epsilon=1e-3),
    Lamb(epsilon=1e-3),
]


def whole_row_cases():
    """Each rule and width compiles a kernel: below 64 numbers, one rule shows in CI what a width changes."""
    for rule in WHOLE_ROW_RULES:
        for dim in (1, 16, 33, 100):
            marks = () if dim >= 64 or rule.type == "lamb" else pytest.mark.slow
            yield pytest.param(rule, dim, marks=marks, id=f"{rule.type}-{dim}")


@pytest.mark.parametrize(("rule", "dim"), whole_row_cases())
def test_rules_that_look_at_a_whole_row_at_every_width(rule, dim):
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(9, dim, generator=generator)
    state = beginning(rule, weight)
    wide, wide_state = weight.double(), {name: part.double() for name, part in state.items()}
    for step in (1, 2):
        rows = torch.randint(9, (20,), generator=generator)
        entries = Entries(rows, torch.randn(20 * dim, generator=generator))
        update_rows(weight, state, entries, rule, lr=0.1, step=step)
        reference.update_rows(wide, wide_state, widened(entries), rule, lr=0.1, step=step)
    # As above; a sum of 100 squares is rounded some 10 times on its way.
    torch.testing.assert_close(weight.double(), wide, rtol=1e-4, atol=2e-5)
    for name, part in state.items():
        torch.testing.assert_close(part.double(), wide_state[name], rtol=1e-4, atol=5e-5)


def test_ftrl_keeps_nan_and_its_zeros_have_no_sign():
    rule = Ftrl(lambda1=5.0)
    weight = torch.full((1, 16), 2.0)
    gradient = torch.linspace(-1.0, 1.0, 16)
    gradient[3] = torch.nan
    update_rows(weight, beginning(rule, weight), Entries(torch.tensor([0]), gradient), rule, lr=1.0, step=1)
    assert weight.isnan().nonzero().tolist() == [[0, 3]]
    rest = weight[~weight.isnan()]
    assert rest.tolist() == [0.0] * 15
    assert not rest.signbit().any()


def test_row_wise_adagrad_without_a_gradient_moves_nothing_however_small_epsilon():
    # lr / epsilon is beyond float32: multiplied by a gradient of zero it would be NaN.
    rule = AdaGrad(row_wise=True, epsilon=1e-39)
    weight = torch.ones(2, 5)
    update_rows(weight, beginning(rule, weight), Entries(torch.tensor([1]), torch.zeros(5)), rule, lr=1.0, step=1)
    assert torch.equal(weight, torch.ones(2, 5))


def test_a_scratch_serves_fewer_threads_and_more_rows_than_before():
    scratch, before = Scratch(), torch.get_num_threads()
    try:
        for threads, num_rows in ((4, 20_000), (1, 20_060)):
            torch.set_num_threads(threads)
            rows = torch.arange(num_rows).repeat(4)
            found, sums = sum_rows(Entries(rows, torch.ones(4 * num_rows)), 1, num_rows=num_rows, scratch=scratch)
            assert torch.equal(found, torch.arange(num_rows))
            assert sums.unique().tolist() == [4.0]
            assert bool((scratch.tensors["head"] == -1).all())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 100])
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_sums_and_sgd_equal_the_reference_at_every_width(dim, data):
    entries, num_rows = data.draw(entry_lists(dim))
    rows, sums = sum_rows(entries, dim, first_row=1, num_rows=num_rows)
    expected_rows, expected = reference.sum_rows(widened(entries), dim, first_row=1, num_rows=num_rows)
    assert torch.equal(rows, expected_rows)
    # At most 40 products of size about 10, each sum rounded: 40 * 2^-24 * 40.
    torch.testing.assert_close(sums.double(), expected, rtol=0, atol=1e-4)
    weight = torch.zeros(num_rows, dim)
    update_rows(weight, {}, entries, SGD(), lr=0.5, step=1, first_row=1)
    moved = torch.zeros(num_rows, dim)
    moved[rows] = -0.5 * sums
    assert torch.equal(weight, moved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_rows_and_gradients_of_16_bits(dtype, data):
    dim = 16
    entries, num_rows = data.draw(entry_lists(dim, dtype))
    # Whole numbers: what both make in float32 is exact, and the rounding then equal to the bit.
    entries = Entries(entries.rows, (entries.gradients * 4).round() / 1024, entries.sources)
    weight = torch.randint(-64, 65, (num_rows, dim), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = weight.clone()
    for part, module in ((weight, None), (expected, reference)):
        update = update_rows if module is None else module.update_rows
        update(part, {}, entries, SGD(), lr=0.5, step=3, first_row=1, seed=2**40 + 5)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=8), seed=st.integers(0, 2**63), step=st.integers(1, 2**31)
)
@settings(deadline=None, max_examples=200)
def test_rounding_equals_its_definition_bit_by_bit(dtype, values, seed, step):
    number = torch.tensor(values)
    weight = torch.zeros(len(values), 1, dtype=dtype)
    update_rows(weight, {}, Entries(torch.arange(len(values)), -number), SGD(), lr=1.0, step=step, seed=seed)
    random = noise(seed, step, torch.arange(len(values)), 1)
    rounded = (round_bfloat16 if dtype == torch.bfloat16 else round_float16)(number.unsqueeze(1), random)
    # -(-0.0) + 0.0 is 0.0 here: signs of zeros are left to the arithmetic before the rounding.
    assert torch.equal(weight.nan_to_num(12345.0), rounded.nan_to_num(12345.0))


def test_one_row_100_000_times_and_rows_beyond_32_bits():
    rows = torch.full((100_001,), 2**33 + 5)
    rows[-1] = 2**33 + 4
    entries = Entries(rows, torch.ones(300_003))
    found, sums = sum_rows(entries, 3, first_row=2**33, num_rows=9)
    assert found.tolist() == [4, 5]
    assert sums.tolist() == [[1.0] * 3, [100_000.0] * 3]


def test_nothing_to_do_changes_nothing():
    weight, none = torch.ones(3, 7), torch.zeros(0, dtype=torch.int32)
    update_rows(weight, {}, Entries(none, torch.zeros(0)), SGD(), lr=1.0, step=1)
    update_rows(weight, {}, Entries(torch.tensor([-1, 3]), torch.ones(14)), SGD(), lr=1.0, step=1)
    assert torch.equal(weight, torch.ones(3, 7))
    rows, sums = sum_rows(Entries(none, torch.zeros(0)), 7, num_rows=3)
    assert (rows.shape, sums.shape) == ((0,), (0, 7))


def test_a_scratch_is_clean_after_each_call_and_grows():
    scratch = Scratch()
    for num_rows in (5, 50, 20):
        rows = torch.arange(num_rows).repeat(3)
        found, sums = sum_rows(Entries(rows, torch.ones(3 * num_rows)), 1, num_rows=num_rows, scratch=scratch)
        assert torch.equal(found, torch.arange(num_rows))
        assert sums.unique().tolist() == [3.0]
        assert bool((scratch.tensors["head"] == -1).all())


@pytest.mark.parametrize("rule", [Adam(), Adam(update="global")], ids=repr)
def test_threads_and_runs_do_not_change_a_bit(rule, on_threads):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3000, (60_000,), generator=generator)
    entries = Entries(rows, torch.randn(60_000 * 7, generator=generator))

    def updated():
        weight = torch.zeros(3000, 7, dtype=torch.bfloat16)
        state = beginning(rule, weight)
        update_rows(weight, state, entries, rule, lr=0.1, step=1)
        return torch.cat([weight.float(), state["v"], sum_rows(entries, 7, num_rows=3000)[1]])

    first, *others = on_threads(updated)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dim", [1, 7, 33, 128])
def test_moving_at_the_last_gradient_equals_summing_first_bit_by_bit(dim, on_threads):
    generator = torch.Generator().manual_seed(3)
    rows = (torch.rand(5000, generator=generator) ** 6 * 3000).long()  # some once, some twice, row 0 a quarter
    entries, begin = Entries(rows, torch.randn(5000 * dim, generator=generator)), torch.ones(3000, dim)

    def summed_first():
        weight, (distinct, sums) = begin.clone(), sum_rows(entries, dim, num_rows=3000)
        update_rows(weight, {}, Entries(distinct, sums.view(-1)), SGD(), lr=0.1, step=1)
        return weight

    def at_once():
        weight = begin.clone()
        update_rows(weight, {}, entries, SGD(), lr=0.1, step=1)
        return weight

    expected = summed_first()
    assert all(torch.equal(weight, expected) for weight in on_threads(at_once))


def test_values_that_are_no_numbers_stay_in_their_rows():
    weight = torch.zeros(3, 16)
    gradients = torch.zeros(3, 16)
    gradients[1, 2], gradients[2, 0] = float("nan"), float("inf")
    update_rows(weight, {}, Entries(torch.arange(3), gradients.flatten()), SGD(), lr=1.0, step=1)
    assert weight[1].isnan().nonzero().tolist() == [[2]]
    assert weight[2].isinf().nonzero().tolist() == [[0]]
    assert bool((weight[0] == 0).all())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (Entries(torch.zeros(2), torch.ones(4)), "rows must be contiguous, of int32 or int64"),
        (Entries(torch.zeros(2, dtype=torch.int64), torch.ones(4).double()), "float64"),
        (Entries(torch.zeros(4, dtype=torch.int64)[::2], torch.ones(4)), "rows must be contiguous"),
    ],
)
def test_malformed_entries_are_named(entries, message):
    with pytest.raises(VivianeError, match=message):
        update_rows(torch.ones(3, 2), {}, entries, SGD(), lr=1.0, step=1)

"""Layers of predictions in 8 bits on the CPU: what their formula says, and a row's bits never depend on other rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import VivianeError
from viviane.ops.linear.cpu_int8 import is_worth_it, linear_int8, pack_int8, reason_against_int8

pytestmark = pytest.mark.skipif(reason_against_int8() is not None, reason=str(reason_against_int8()))
SIZES = st.sampled_from([1, 2, 3, 5, 8, 11, 12, 95, 96, 97, 200])
OUTPUTS = st.sampled_from([1, 15, 16, 17, 31, 48, 50, 64, 65, 130])
INPUTS = st.sampled_from([1, 3, 4, 15, 16, 17, 63, 64, 65, 257, 600])


def given_rows(size: int, n: int, k: int, spread: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size * 1000 + n * 10 + k)
    x, weight = torch.randn(size, k, generator=generator), torch.randn(n, k, generator=generator)
    x *= 10.0 ** torch.randint(-spread, spread + 1, (size, 1), generator=generator)
    x[::3] = x[::3].relu()
    weight *= 10.0 ** torch.randint(-spread, spread + 1, (n, 1), generator=generator)
    return x, weight, torch.randn(n, generator=generator)


def by_formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The formula of the module in float64, but for the ranges and the rounding, which float32 decides."""
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    step = (high - low) / 255
    steps = torch.where(step > 1e-37, 1 / step, 0.0)
    q = ((x - low[:, None]) * steps[:, None] + 0.5).floor().double()
    scale = weight.abs().amax(1) / 127
    v = (weight / torch.where(scale > 0, scale, 1.0)[:, None]).round().double()
    assert 0 <= q.min() <= q.max() <= 255
    assert v.abs().max() <= 127
    return scale.double() * (low.double()[:, None] * v.sum(1) + step.double()[:, None] * (q @ v.t())) + bias


@settings(max_examples=60, deadline=None)
@given(SIZES, OUTPUTS, INPUTS, st.booleans(), st.sampled_from([0, 3]))
def test_the_formula_whatever_the_batch_and_the_threads(size, n, k, relu, spread) -> None:
    x, weight, bias = given_rows(size, n, k, spread)
    y = linear_int8(x, weight, bias, relu=relu)
    truth = by_formula(x, weight, bias)
    largest = float(x.abs().max() * weight.abs().max() * k)
    # Sums of whole numbers are exact; four operations of float32 follow, of terms of the product's size.
    np.testing.assert_allclose(y, truth.relu() if relu else truth, rtol=1e-6, atol=1e-6 * max(1.0, largest))
    for begin in {0, size // 2, size - 1}:
        assert torch.equal(linear_int8(x[begin:], weight, bias, relu=relu), y[begin:])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(linear_int8(x, weight, bias, relu=relu), y)
    finally:
        torch.set_num_threads(before)


def test_close_to_the_layer_itself() -> None:
    x, weight, bias = given_rows(64, 128, 512, 0)
    error = linear_int8(x, weight, bias) - torch.nn.functional.linear(x, weight, bias)
    # Errors of at most half a step of each factor, independent of one another.
    assert error.std() < 0.01 * 512**0.5


def test_rows_of_zeros_of_one_number_and_of_tiny_ones() -> None:
    _, weight, bias = given_rows(1, 16, 20, 0)
    x = torch.zeros(4, 20)
    x[1], x[2], x[3, 7] = 3.0, 1e-39, -2.5
    y = linear_int8(x, weight, bias)
    assert torch.equal(y[0], bias)
    np.testing.assert_allclose(y[1:], by_formula(x, weight, bias)[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", [0, 15, 16, 39])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_rows_beyond_float32_are_no_numbers_and_others_stay(place, value) -> None:
    x, weight, bias = given_rows(5, 20, 40, 0)
    truth = linear_int8(x, weight, bias, relu=True)
    x[1, place] = value
    x[1, 20] = -3e38
    y = linear_int8(x, weight, bias, relu=True)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3, 4]], truth[[0, 2, 3, 4]])


def test_weights_that_are_zero_or_not_finite() -> None:
    x, weight, bias = given_rows(3, 17, 33, 0)
    weight[4] = 0.0
    assert torch.equal(linear_int8(x, weight, bias)[:, 4], bias[4].expand(3))
    weight[5, 6] = float("inf")
    with pytest.raises(VivianeError, match="not finite"):
        pack_int8(weight)


def test_small_layers_stay_as_they_are() -> None:
    assert is_worth_it(torch.empty(16, 16))
    assert not any(is_worth_it(torch.empty(n, k)) for n, k in ((15, 16), (16, 15), (16, 60_001)))

"""Layers of predictions on the CPU: right to rounding, and a row's bits never depend on the other rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import SchemaError
from viviane.ops.dispatch import use_implementation
from viviane.ops.linear import linear, machine_reason, reason
from viviane.ops.linear.cpu import pack
from viviane.ops.probabilities import probabilities

pytestmark = pytest.mark.skipif(machine_reason() is not None, reason=str(machine_reason()))
SIZES = st.sampled_from([1, 2, 3, 5, 6, 7, 11, 12, 13, 95, 96, 97, 200])
OUTPUTS = st.sampled_from([1, 3, 4, 5, 15, 16, 17, 31, 48, 50, 64, 65, 130])
INPUTS = st.sampled_from([1, 2, 7, 31, 32, 33, 100, 255, 256, 257, 600])


def given_rows(size: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size * 1000 + n * 10 + k)
    x, weight = torch.randn(size, k, generator=generator), torch.randn(n, k, generator=generator) / k**0.5
    return x, weight, torch.randn(n, generator=generator)


@settings(max_examples=60, deadline=None)
@given(SIZES, OUTPUTS, INPUTS, st.booleans(), st.booleans())
def test_right_and_independent_of_the_batch_and_of_threads(size, n, k, relu, biased) -> None:
    x, weight, bias = given_rows(size, n, k)
    with torch.no_grad():
        y = linear(x, weight, bias if biased else None, relu=relu)
        exact = x.double() @ weight.double().t() + (bias if biased else 0)
        np.testing.assert_allclose(y, exact.relu() if relu else exact, atol=3e-6 * max(1, k / 100))
        for begin in {0, size // 2, size - 1}:
            part = linear(x[begin:], weight, bias if biased else None, relu=relu)
            assert torch.equal(part, y[begin:])
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert torch.equal(linear(x, weight, bias if biased else None, relu=relu), y)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 4, 5, 16, 37])
def test_cross_layers_views_and_three_dimensions(n) -> None:
    x, weight, bias = given_rows(101, n, n)
    with torch.no_grad():
        first = torch.randn(101, n)
        y = linear(x, weight, bias, cross=(first, x))
        np.testing.assert_allclose(y, x + first * (x @ weight.t() + bias), atol=1e-5)
        strided = torch.randn(101, n + 3)[:, 2 : 2 + n]
        turned = weight.t().contiguous().t()
        assert torch.equal(linear(strided, turned, bias), linear(strided.contiguous(), weight, bias))
        deep = torch.randn(5, 6, n)
        assert torch.equal(linear(deep, weight, bias).view(30, n), linear(deep.view(30, n), weight, bias))


def test_numbers_that_are_none_and_infinite_stay_so() -> None:
    x, weight, bias = given_rows(8, 20, 40)
    x[1, 3], x[2, 0], x[3, 39] = float("nan"), float("inf"), -float("inf")
    with torch.no_grad():
        y = linear(x, weight, bias, relu=True)
    assert y[1].isnan().all()
    assert torch.equal(y[2].isinf(), weight[:, 0] > 0)
    assert torch.equal(y[3].isinf(), weight[:, 39] < 0)
    assert torch.equal(y[[0, 4, 5, 6, 7]].isfinite(), torch.ones(5, 20, dtype=torch.bool))


def test_what_the_kernel_leaves_to_torch() -> None:
    x, weight, bias = given_rows(3, 4, 5)
    assert reason(x, weight) == "gradients are asked for"
    with torch.no_grad():
        assert reason(x, weight) is None
        assert reason(x[:0], weight) is not None
        assert linear(x[:0], weight, bias).shape == (0, 4)
        assert reason(x.double(), weight.double()) is not None
        with use_implementation("reference"):
            assert torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x, weight, bias).dtype == torch.bfloat16
        with pytest.raises(SchemaError, match="must fit"):
            linear(x, weight.t(), bias)
    weight.requires_grad_()
    linear(x, weight, bias).sum().backward()
    assert weight.grad is not None


def test_packed_weights_hold_zeros_behind_the_last_output() -> None:
    weight = torch.arange(1.0, 1 + 18 * 3).view(18, 3)
    packed = pack(weight)
    assert packed.shape == (2, 3, 16)
    assert torch.equal(packed[0].t(), weight[:16])
    assert torch.equal(packed[1, :, :2].t(), weight[16:])
    assert not packed[1, :, 2:].any()


def test_probabilities_are_rounded_once() -> None:
    z = torch.cat([torch.linspace(-110, 110, 2001), torch.tensor([float("inf"), -float("inf"), 0.0])])
    with torch.no_grad():
        p = probabilities(z, 0.25)
    exact = (1 / (1 + np.exp(0.25 - z.numpy().astype(np.float64)))).astype(np.float32)
    np.testing.assert_array_max_ulp(p.numpy(), exact, maxulp=1)
    assert probabilities(torch.tensor([float("nan")])).isnan().all()

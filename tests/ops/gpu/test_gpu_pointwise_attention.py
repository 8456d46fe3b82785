"""The kernels of pointwise attention against the reference in float64: forward and every gradient."""

import pytest
import torch
from tests.ops.gpu.conftest import ON_GPU

from viviane.ops.dispatch import use_implementation
from viviane.ops.pointwise_attention import UNKNOWN_TIME, pointwise_attention, reason
from viviane.ops.pointwise_attention.reference import pointwise_attention as plain

DEVICE = "cuda" if ON_GPU else "cpu"
CASES = {
    "plain": {"batch": 2, "length": 5, "heads": 1, "dim": 3, "width": 4},
    "two tiles, biases": {"batch": 3, "length": 37, "heads": 2, "dim": 16, "width": 8, "position": True, "times": True},
    "place alone": {"batch": 1, "length": 33, "heads": 1, "dim": 17, "width": 16, "position": True},
    "time alone": {"batch": 2, "length": 7, "heads": 2, "dim": 4, "width": 4, "times": True},
    "one place": {"batch": 1, "length": 1, "heads": 1, "dim": 1, "width": 1, "position": True, "times": True},
}


def make(batch, length, heads, dim, width, position=False, times=False):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, length, heads, dim, generator=generator, dtype=torch.float64) for _ in "qk")
    v = torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64)
    held = torch.rand(batch, length, generator=generator) < 0.8  # empty places in the middle and at both ends, too
    given = {"q": q * 2, "k": k, "v": v, "held": held}
    if position:
        given["position"] = torch.randn(length, generator=generator, dtype=torch.float64)
    if times:
        when = torch.randint(0, 10**6, (batch, length), generator=generator).sort(1).values
        when[:, length // 2] += 5 * 10**5  # not in order
        when[0, 0] = UNKNOWN_TIME if length > 1 else 3
        given |= {"times": when, "time_bias": torch.randn(6, generator=generator, dtype=torch.float64), "unit": 50}
    return given


def moving(given):
    return {name: one for name, one in given.items() if torch.is_tensor(one) and one.is_floating_point()}


# The kernel sums 64 products of float32 in another order; 16 bits round every factor. The interpreter has no bfloat16
# products.
SIXTEEN = [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)] if ON_GPU else [(torch.float16, 5e-3)]
RUNS = [*((name, torch.float32, 2e-5) for name in CASES), *(("two tiles, biases", *one) for one in SIXTEEN)]


@pytest.mark.parametrize(("name", "dtype", "tolerance"), RUNS, ids=str)
def test_equals_the_reference(name, dtype, tolerance):
    exact = make(**CASES[name])
    for one in ("q", "k", "v"):
        exact[one] = exact[one].to(dtype).double()
    here = {n: (one.to(DEVICE) if torch.is_tensor(one) else one) for n, one in exact.items()}
    for one in moving(here):
        here[one] = here[one].to(dtype if one in "qkv" else torch.float32).requires_grad_()
    for one in moving(exact).values():
        one.requires_grad_()
    expected = plain(**exact)
    with use_implementation("gpu"):
        assert reason(here["q"], here["v"]) is None
        result = pointwise_attention(**here)
    assert result.dtype == dtype
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(result.double().cpu(), expected, rtol=0, atol=tolerance * scale)
    expected.sin().sum().backward()
    result.double().sin().sum().backward()
    for one, truth in moving(exact).items():
        scale = max(1.0, truth.grad.abs().max().item())
        torch.testing.assert_close(here[one].grad.double().cpu(), truth.grad, rtol=0, atol=4 * tolerance * scale)


def test_far_scores_stay_finite_and_runs_repeat_bit_for_bit():
    given = make(**CASES["two tiles, biases"])
    given["q"] *= 1e4
    given = {n: (one.to(DEVICE) if torch.is_tensor(one) else one) for n, one in given.items()}
    given = {n: (one.float() if n in moving(given) else one) for n, one in given.items()}
    runs = []
    for _ in range(2):
        leaves = {n: one.clone().requires_grad_() for n, one in moving(given).items()}
        with use_implementation("gpu"):
            pointwise_attention(**{**given, **leaves}).sum().backward()
        runs.append({n: one.grad for n, one in leaves.items()})
    assert all(one.isfinite().all() for one in runs[0].values())
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])

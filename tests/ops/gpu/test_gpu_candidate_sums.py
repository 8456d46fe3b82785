"""The kernels of a softmax over candidates against the reference in float64."""

import pytest
import torch
from tests.ops.gpu.conftest import ON_GPU

from viviane.nn.candidates import log_sum_over_candidates
from viviane.ops.candidate_sums import reason
from viviane.ops.candidate_sums.reference import log_sum
from viviane.ops.dispatch import use_implementation

DEVICE = "cuda" if ON_GPU else "cpu"
CASES = {  # rows, candidates, width, share of the rows that count
    "several tiles": (150, 131, 20, 0.6),
    "one of each": (1, 1, 1, 1.0),
    "no row counts": (70, 5, 16, 0.0),
    "wide": (33, 40, 130, 1.0),
}


def make(rows, candidates, width, share):
    generator = torch.Generator().manual_seed(1)
    u = 3 * torch.randn(rows, width, generator=generator, dtype=torch.float64) / width**0.5
    v = torch.randn(candidates, width, generator=generator, dtype=torch.float64)
    correction = torch.randn(candidates, generator=generator, dtype=torch.float64)
    correction[::7] = torch.inf  # no candidates
    own = torch.randn(rows, generator=generator, dtype=torch.float64)
    ids, of = (torch.randint(0, 20, (n,), generator=generator) for n in (rows, candidates))
    counts = torch.rand(rows, generator=generator) < share
    return u, v, correction, own, ids, of, counts


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    exact = make(*CASES[name])
    here = [one.to(DEVICE) for one in exact]
    here = [one.float() if one.is_floating_point() else one for one in here]
    for values in (exact, here):
        for place in (0, 1, 3):
            values[place].requires_grad_()
    u, v, correction, own, ids, of, counts = here
    expected = log_sum(*exact)
    with use_implementation("gpu"):
        assert reason(u, v) is None
        sums = log_sum_over_candidates(u, v, correction, own.unsqueeze(1), ids.unsqueeze(1), of, counts)[:, 0]
    counted = exact[6]
    # Sums of up to 131 terms in float32, each with a product of 130 numbers behind it.
    torch.testing.assert_close(sums[counts].double().cpu(), expected[counted], rtol=1e-5, atol=1e-5)
    weight = torch.linspace(0.5, 2.0, len(expected), dtype=torch.float64)
    (expected * weight)[counted].sum().backward()
    (sums * weight.float().to(DEVICE))[counts].sum().backward()
    for place in (0, 1, 3):
        truth = exact[place].grad
        torch.testing.assert_close(here[place].grad.double().cpu(), truth, rtol=1e-4, atol=1e-5)


def test_scores_beyond_what_exp_holds():
    big = torch.full((2, 1), 300.0, device=DEVICE)
    ids = torch.tensor([[1], [2]], device=DEVICE)
    with use_implementation("gpu"):
        big.requires_grad_()
        sums = log_sum_over_candidates(big, big, torch.zeros(2, device=DEVICE), big.detach(), ids, ids.flatten())
        sums.sum().backward()
    assert sums.tolist() == [[90000.0], [90000.0]]
    assert big.grad.tolist() == [[600.0], [600.0]]

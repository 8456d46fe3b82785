"""The normaliser of a softmax over candidates, against the matrix of all scores."""

import pytest
import torch

from viviane.nn import candidates
from viviane.nn.candidates import log_sum_over_candidates

EMPTY = -(2**63)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(u, v, correction, own, ids, of):
    z = u @ v.t() - correction
    z = z.masked_fill((of == ids) | (of == EMPTY), -torch.inf)
    return torch.cat([own, z], 1).logsumexp(1, keepdim=True)


def inputs():
    ids = torch.tensor([3, 4, 4, 5, 6, 7, 8])
    of = torch.tensor([4, 9, EMPTY, 3, 5])
    correction = draw(5, seed=2).masked_fill(of == EMPTY, torch.inf)
    return draw(7, 3), draw(5, 3, seed=1), correction, draw(7, 1, seed=3), ids[:, None], of


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_value_and_gradients_for_any_number_of_rows_at_once(rows_at_once, monkeypatch):
    monkeypatch.setattr(candidates, "_CACHED_BYTES", rows_at_once * 5 * 8)
    *numbers, ids, of = inputs()
    results = []
    for function in (log_sum_over_candidates, plain):
        given = [one.clone().requires_grad_() for one in numbers]
        value = function(*given, ids, of)
        (value * draw(7, 1, seed=4)).sum().backward()
        results.append([value.detach(), *(one.grad for one in given)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # float64 sums of a few numbers of about 1
        assert one.abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(log_sum_over_candidates(*numbers, ids, of), results[0][0], rtol=1e-12, atol=1e-12)


def test_a_row_without_any_candidate_has_its_own_score_and_no_gradient_elsewhere():
    u, v, own = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2), torch.full((1, 1), 2.0, requires_grad=True)
    value = log_sum_over_candidates(u, v, torch.zeros(1), own, torch.tensor([[5]]), torch.tensor([5]))
    value.sum().backward()
    assert (value.item(), own.grad.item()) == (2.0, 1.0)
    assert torch.equal(u.grad, torch.zeros(1, 2))


def test_no_rows():
    u = torch.ones(0, 2, requires_grad=True)
    ids = torch.ones(0, 1, dtype=torch.int64)
    value = log_sum_over_candidates(u, u, torch.zeros(0), u[:, :1], ids, ids.flatten())
    value.sum().backward()
    assert value.shape == (0, 1)

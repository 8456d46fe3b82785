"""Sums over pairs of vectors: against loops, and the kernel against plain torch."""

import pytest
import torch

from viviane.core.errors import SchemaError
from viviane.ops import pair_sums as op
from viviane.ops.dispatch import use_implementation
from viviane.ops.pair_sums import pair_sums


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_against_loops():
    e = draw(3, 5, 4)
    expected = sum(e[:, i] * e[:, j] for i in range(5) for j in range(i))
    torch.testing.assert_close(pair_sums(e), expected, rtol=1e-5, atol=1e-5)  # ten products of about 1, float32


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 5), (600, 39, 16), (9, 2, 70)])
def test_the_kernel_and_its_gradient_equal_plain_torch(shape):
    given, gradient, results = draw(*shape), draw(shape[0], shape[2], seed=1), []
    for name in ("auto", "reference"):
        e = given.clone().requires_grad_()
        with use_implementation(name):
            assert (op.reason(e) is None) == (name == "auto")
            y = pair_sums(e)
        y.backward(gradient)
        results.append((y.detach(), e.grad))
    for one, other in zip(*results, strict=True):
        # Up to 39 float32 numbers of about 1 are added in another order, and squared sums of them taken apart.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_vectors_and_gradients_of_any_strides():
    wide = draw(6, 10).requires_grad_()
    pair_sums(wide[:, 1:9].unflatten(1, (4, 2))).sum(1).sum().backward()  # the gradient of a sum is expanded
    expected = draw(6, 10).requires_grad_()
    with use_implementation("reference"):
        pair_sums(expected[:, 1:9].unflatten(1, (4, 2))).sum().backward()
    torch.testing.assert_close(wide.grad, expected.grad)
    assert wide.grad.abs().sum() > 0


def test_other_shapes_are_refused():
    with pytest.raises(SchemaError, match=r"\(B, S, D\)"):
        pair_sums(torch.ones(2, 3))

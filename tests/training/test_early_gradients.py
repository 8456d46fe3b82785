"""Gradients that an operator tells of before it returns: taken at once if autograd leaves them as they are."""

import pytest
import torch

from viviane.core.errors import VivianeError
from viviane.ops.finished_gradients import tell_of_gradient, telling_of_gradients
from viviane.parallel import Group
from viviane.training.step.dense_exchange import DenseExchange, in_order_of_use

WIDTH = 2048  # a matrix fills a bucket
seen = []


class TwoLayers(torch.autograd.Function):
    """x W1 W0, which tells of each weight's gradient as soon as it is there."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(x, first, second)
        return x @ first @ second

    @staticmethod
    def backward(ctx, grad):
        x, first, second = ctx.saved_tensors
        dsecond = (x @ first).T @ grad
        tell_of_gradient(second, dsecond)
        seen.append("between")
        below = grad @ second.T
        dfirst = x.T @ below
        tell_of_gradient(first, dfirst)
        seen.append("end")
        return below @ first.T, dfirst, dsecond


def make(wire=None):
    torch.manual_seed(0)
    first, second = (torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))
    bias = torch.nn.Parameter(torch.zeros(WIDTH))
    exchange = DenseExchange([first, bias, second], Group(), wire)
    assert [len(one.parameters) for one in exchange.buckets if one.parameters] == [1, 1, 1]  # the vector comes last
    return exchange, first, second, bias


def run(exchange, loss_of, parameters, *, captured):
    """Run a pass, from Python or as one that is captured; returns what happened in order, and the sums."""
    seen.clear()
    for one in parameters:
        one.grad = None
    exchange.look = (lambda numbers: seen.append(f"summed {len(numbers)}")) if captured else None
    loss = loss_of()
    exchange.begin(loss)
    with exchange.backward():
        loss.backward()
    seen.append("backward")
    exchange.finish()
    return list(seen), [one.grad.clone() for one in parameters]


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_sums_begin_before_the_operator_returns(wire):
    exchange, first, second, bias = make(wire)
    x = torch.randn(3, WIDTH)

    def loss_of():
        return (TwoLayers.apply(x, first, second) + bias).square().sum()

    every = (first, second, bias)
    _, truth = run(exchange, loss_of, every, captured=False)
    order, found = run(exchange, loss_of, every, captured=True)
    matrix, vector = f"summed {WIDTH * WIDTH}", f"summed {WIDTH}"
    assert order == [matrix, "between", matrix, vector, "end", "backward"]
    assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))


def test_without_a_pass_from_python_nothing_is_believed():
    exchange, first, second, bias = make()

    def loss_of():
        return (TwoLayers.apply(torch.ones(1, WIDTH), first, second) + bias).sum()

    order, _ = run(exchange, loss_of, (first, second, bias), captured=True)
    assert order[:2] == ["between", "end"]


def test_a_weight_of_two_uses_waits_for_both():
    exchange, first, second, bias = make()
    x = torch.randn(3, WIDTH)

    def twice():
        once = TwoLayers.apply(x, first, second)
        return (TwoLayers.apply(once, first, second) + bias).square().sum()

    def beside():  # the second use is none of an operator that tells
        return (TwoLayers.apply(x, first, second) + x @ second + bias).square().sum()

    every = (first, second, bias)
    for loss_of, early in ((twice, []), (beside, [])):
        _, truth = run(exchange, loss_of, every, captured=False)
        order, found = run(exchange, loss_of, every, captured=True)
        assert order[: order.index("between")] == early
        assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))
        plain = torch.autograd.grad(loss_of(), every)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_weight_that_gets_a_second_use_is_refused():
    exchange, first, second, bias = make()
    x, every = torch.randn(3, WIDTH), (first, second, bias)

    def once():
        return (TwoLayers.apply(x, first, second) + bias).square().sum()

    run(exchange, once, every, captured=False)
    with pytest.raises(VivianeError, match="summed over the processes before it was complete"):
        run(exchange, lambda: once() + (x @ second).sum(), every, captured=True)
    exchange.drop()
    _, truth = run(exchange, once, every, captured=False)
    _, found = run(exchange, once, every, captured=True)
    assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))


def test_listeners_are_restored_and_told_of_whole_gradients_alone():
    heard, device = [], torch.device("cpu")
    weight = torch.ones(2, 2)
    with telling_of_gradients(device, lambda parameter, gradient: heard.append("outer")):
        with telling_of_gradients(device, lambda parameter, gradient: heard.append("inner")):
            tell_of_gradient(weight, torch.zeros(2, 2))
            tell_of_gradient(weight, torch.zeros(2, 3))
            tell_of_gradient(weight, torch.zeros(2, 2).T)
        tell_of_gradient(weight, torch.zeros(2, 2))
    tell_of_gradient(weight, torch.zeros(2, 2))
    assert heard == ["inner", "outer"]


def test_lists_of_a_module_are_used_item_by_item():
    names = ["a.weight", "b.weights.0", "b.weights.1", "b.projections.0", "b.projections.1", "c.0.weight"]
    named = {name: torch.nn.Parameter(torch.full((1,), float(i))) for i, name in enumerate(names)}
    assert [int(one) for one in in_order_of_use(named)] == [0, 1, 3, 2, 4, 5]

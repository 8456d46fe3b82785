"""Operators in an eager step: the autograd of a `torch.library` operator without its dispatcher."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from viviane.ops.eager import Kernels, call, is_differentiated, is_traced


def scaled_sums(x: Tensor, weights: list[Tensor], factor: float, bias: Tensor | None) -> list[Tensor]:
    """y_i = factor x w_i + bias: tensors, a list of them, a value, and one that may be absent."""
    return [factor * x * w + (0 if bias is None else bias) for w in weights]


def keep(ctx, inputs, output):
    x, weights, ctx.factor, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, *weights)


def gradient(ctx, grads: list[Tensor | None]):
    x, *weights = ctx.saved_tensors
    dx = sum(ctx.factor * grad * w for grad, w in zip(grads, weights, strict=True))
    return dx, [ctx.factor * grad * x for grad in grads], None, sum(grads) if ctx.has_bias else None


KERNELS = Kernels(scaled_sums, keep, gradient)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.booleans(), st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 99))
def test_gradients_are_those_of_torch(count, has_bias, needed, seed):
    """Nested inputs, absent ones and ones without a gradient get what torch's own autograd gives them."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_(need) for need in needed[: count + 2]
    ]
    x, bias, *weights = leaves
    inputs = (x, weights, 2.5, bias if has_bias else None)
    found, expected = call(KERNELS, *inputs), scaled_sums(*inputs)
    assert len(found) == count
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == any(leaf.requires_grad for leaf in (x, *weights, *([bias] if has_bias else [])))
    used = [leaf for leaf in (x, *weights, *([bias] if has_bias else [])) if leaf.requires_grad]
    if used:
        # Every output takes part, so that each has a gradient.
        pairs = [torch.autograd.grad(sum(one.square().sum() for one in ys), used) for ys in (found, expected)]
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_nothing_is_recorded_without_a_gradient():
    """Neither under no_grad nor for inputs that need none."""
    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert call(KERNELS, x, [w], 1.0, None)[0].grad_fn is None
    assert call(KERNELS, x, [w.detach()], 1.0, None)[0].grad_fn is None


def test_one_tensor_and_absent_gradients():
    """An operator with one output gives a tensor; an input whose list has no gradients is left alone."""
    one = Kernels(
        lambda x, others: x * sum(others), lambda ctx, inputs, output: None, lambda ctx, grad: (3 * grad, None)
    )
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    call(one, x, [other, other]).sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert other.grad is None


def test_who_follows_a_call_is_noticed():
    """A plain call is not traced; compilers, exporters, transforms, modes and subclasses are."""
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(is_traced(x))
        return x * 2

    x = torch.ones(2)
    look(x)
    look(nn.Parameter(x))
    assert seen == [False, False]
    seen.clear()
    make_fx(look)(x)
    make_fx(look, tracing_mode="fake")(x)
    torch.func.vmap(look)(x)
    torch.func.grad(lambda one: look(one).sum())(x)
    torch.jit.trace(look, x, check_trace=False)
    look(x.as_subclass(Special))
    assert seen == [True] * 6
    assert is_traced(x, None, x.as_subclass(Special))
    assert not is_traced(x, None, nn.Parameter(x))
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda one: one + 1 if is_traced(one) else one - 1, backend=record)(x)
    assert "sub" not in graphs[0].code
    assert "+ 1" in graphs[0].code


class Special(Tensor):
    """A tensor whose operations others may follow."""


def test_a_gradient_of_a_gradient_is_noticed():
    """Backward runs kernels alone unless its own graph is to be created."""
    seen = []
    watch = Kernels(
        lambda x: x * 2,
        lambda ctx, inputs, output: None,
        lambda ctx, grad: (seen.append(is_differentiated(grad)) or grad * 2,),
    )
    x = torch.ones(2, requires_grad=True)
    call(watch, x).sum().backward()
    torch.autograd.grad(call(watch, x).sum(), x, create_graph=True)
    assert seen == [False, True]


def test_an_error_of_a_kernel_reaches_the_caller():
    """In forward and in backward."""

    def fail(*_):
        raise ZeroDivisionError("in a kernel")

    x = torch.ones(1, requires_grad=True)
    with pytest.raises(ZeroDivisionError, match="in a kernel"):
        call(Kernels(fail, keep, fail), x)
    y = call(Kernels(lambda one: one * 1, lambda *_: None, fail), x)
    with pytest.raises(ZeroDivisionError, match="in a kernel"):
        y.sum().backward()

"""Native operators: each is a pure function of tensors, and a listener of its thread may run it in another place."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from viviane.ops.dot_interaction import cpu as dots
from viviane.ops.dot_interaction.reference import num_pairs
from viviane.ops.native.kernels import listening_to_kernels, native_operator
from viviane.ops.pair_sums import cpu as pair_sums


class Listener:
    """Counts kernels, and keeps operators with their arguments."""

    def __init__(self):
        self.num_kernels, self.operators = 0, []

    def before_kernel(self):
        self.num_kernels += 1

    def run_operator(self, operator, args):
        self.operators.append((operator, args))
        return operator(*args)


def of_sums(size, s, dim, draw):
    return (draw(size, s, dim),)


def of_gradient_of_sums(size, s, dim, draw):
    return draw(size, s, dim), draw(size, dim), draw(size, dim)


def of_dots(size, s, dim, draw):
    return draw(size, dim), draw(size, s, dim), True, False


def of_dots_alone(size, s, dim, draw):
    return None, draw(size, s, dim), False, True


def of_gradients_of_dots(size, s, dim, draw):
    return draw(size, dim), draw(size, s, dim), draw(size, dim + num_pairs(s + 1)), False, False


def of_gradients_of_dots_alone(size, s, dim, draw):
    return None, draw(size, s, dim), draw(size, num_pairs(s, itself=True) + 1), True, True


OPERATORS = [
    (pair_sums.sums_of_pairs, of_sums),
    (pair_sums.gradient_of_pairs, of_gradient_of_sums),
    (dots.dots_of_pairs, of_dots),
    (dots.dots_of_pairs, of_dots_alone),
    (dots.gradients_of_dots, of_gradients_of_dots),
    (dots.gradients_of_dots, of_gradients_of_dots_alone),
]


def tensors_of(values):
    return [one for one in (values if isinstance(values, tuple) else (values,)) if one is not None]


def memory_of(tensors):
    return {one.untyped_storage().data_ptr() for one in tensors if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize(("operator", "arguments"), OPERATORS, ids=[made.__name__ for _, made in OPERATORS])
@given(size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_a_native_operator_is_a_pure_function_of_its_arguments(operator, arguments, size, seed):
    generator = torch.Generator().manual_seed(seed)
    args = arguments(size, 4, 3, lambda *shape: torch.randn(shape, generator=generator))
    before = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
    first, listener = operator(*args), Listener()
    with listening_to_kernels(listener):
        second = operator(*before)
    assert [(one, len(values)) for one, values in listener.operators] == [(operator.__wrapped__, len(args))]
    assert listener.num_kernels == 1
    for one, other in zip(tensors_of(first), tensors_of(second), strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    for one, own in zip(args, before, strict=True):  # none was written
        assert torch.equal(one, own) if isinstance(one, torch.Tensor) else one is own
    assert not memory_of(args) & memory_of(tensors_of(first))


def test_a_listener_is_told_of_its_own_thread_alone_and_until_the_block_ends():
    double, listener = native_operator(lambda x: 2 * x), Listener()
    with listening_to_kernels(listener), ThreadPoolExecutor(1) as pool:
        assert pool.submit(double, 4).result() == 8
        assert not listener.operators
        assert double(5) == 10
    assert double(6) == 12
    assert [args for _, args in listener.operators] == [(5,)]

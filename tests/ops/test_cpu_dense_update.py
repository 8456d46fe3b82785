"""The dense update's kernel on the CPU, against plain torch."""

import pytest
import torch

from viviane.core.errors import VivianeError
from viviane.ops import dense_update as dense
from viviane.ops.dense_update.reference import move_tensors as plain
from viviane.ops.dispatch import use_implementation
from viviane.ops.rules import DenseNumbers, dense_rules

SHAPES = [(1,), (3,), (33, 7), (0,), (2049,), (300, 128)]
NUMBERS = DenseNumbers(0.05, 0.02, 1e-3, 0.9, 0.99, third=1.5, fourth=1.25).values()


def numbers_of(rule):
    """FTRL takes 1 / lr, lambda1 and lr."""
    return DenseNumbers(20.0, 0.02, 0.3, 0.9, 0.99, third=0.05).values() if rule == "ftrl" else NUMBERS


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def flat(lists):
    return [one for part in lists for one in part]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rule", dense_rules())
def test_every_rule_moves_as_the_reference(rule, inside):
    numbers = torch.tensor(numbers_of(rule), dtype=torch.float64)
    options = {"inside": inside, "decays": True, "scale": torch.tensor(0.5), "gate": None}
    options["workspace"] = dense.Workspace()
    results = []
    for move in (dense.move_tensors, plain):
        params, states = draw(0), [[one.abs() for one in draw(1 + i)] for i, _ in enumerate(dense_rules()[rule].states)]
        for step in range(3):
            move(rule, params, draw(10 + step), states, numbers, **options)
        results.append(flat([params, *states]))
    for one, other in zip(*results, strict=True):
        # Three steps of about ten float32 operations on numbers of about 1.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [name for name, rule in dense_rules().items() if rule.gpu_dense is not None])
def test_every_number_is_moved_once_and_alike_by_any_number_of_threads(rule):
    """Shares end at blocks, whatever the tensors' sizes: numbers of a last, shorter block are computed otherwise."""
    before, sizes = torch.get_num_threads(), (1, 63, 64, 65, 60_001, 130, 70_000, 7)
    numbers = torch.tensor(NUMBERS, dtype=torch.float64)
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            rng = torch.Generator().manual_seed(0)
            params = [torch.randn(size, generator=rng) for size in sizes]
            gradients = [torch.randn(size, generator=rng) for size in sizes]
            states = [[torch.rand(size, generator=rng) for size in sizes] for _ in dense_rules()[rule].states]
            dense.move_tensors(rule, params, gradients, states, numbers, decays=True)
            results.append([*params, *(one for state in states for one in state)])
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], found, strict=True))


def test_results_do_not_depend_on_threads_and_gradients_may_have_any_strides():
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            params, states = [torch.ones(300, 128)], [[torch.zeros(300, 128)], [torch.zeros(300, 128)]]
            gradient = torch.randn(128, 300, generator=torch.Generator().manual_seed(0)).t()
            numbers = torch.tensor(NUMBERS, dtype=torch.float64)
            dense.move_tensors("adam", params, [gradient], states, numbers)
            results.append(params[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.ones(300, 128))


def test_a_closed_gate_moves_nothing():
    params = draw(0)
    numbers, gate = torch.tensor(NUMBERS, dtype=torch.float64), torch.zeros((), dtype=torch.int32)
    dense.move_tensors("sgd", params, draw(1), [], numbers, gate=gate)
    assert all(torch.equal(one, other) for one, other in zip(params, draw(0), strict=True))


def test_reasons_are_named():
    assert dense.reason(draw(0)) is None
    assert dense.reason([torch.ones(2, 3).t()]) == "a parameter is not contiguous"
    with use_implementation("reference"):
        assert dense.reason(draw(0)) == "VIVIANE_OPS: plain torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", dense_rules())
@pytest.mark.parametrize("serving", ["auto", "reference"])
def test_gradients_of_16_bits_move_as_if_they_had_been_cast_and_scaled_before(dtype, rule, serving):
    numbers = torch.tensor(numbers_of(rule), dtype=torch.float64)
    scale, results = torch.tensor(0.37), []
    for direct in (True, False):
        params, states = draw(0), [[one.abs() for one in draw(1 + i)] for i, _ in enumerate(dense_rules()[rule].states)]
        for step in range(3):
            gradients = [one.to(dtype) for one in draw(10 + step)]
            gradients[1][2] = float("inf") if step == 2 else 2.0**-24  # the least number of float16
            given = gradients if direct else [one.float() * scale for one in gradients]
            with use_implementation(serving):
                dense.move_tensors(rule, params, given, states, numbers, decays=True, scale=scale if direct else None)
        results.append(flat([params, *states]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))  # NaN, too, where the infinite one went
    assert not torch.isfinite(results[0][1]).all()
    assert not torch.equal(results[0][2], draw(0)[2])


def test_types_that_no_kernel_reads_are_refused():
    params, numbers = draw(0), torch.tensor(NUMBERS, dtype=torch.float64)
    mixed = draw(1)
    mixed[0] = mixed[0].bfloat16()
    for gradients, words in ((mixed, "bfloat16, torch.float32"), ([one.double() for one in mixed], "float64")):
        with pytest.raises(VivianeError, match=rf"one type[\s\S]*{words}"):
            dense.move_tensors("sgd", params, gradients, [], numbers)
    with pytest.raises(VivianeError, match="parameters and state must be contiguous, float32"):
        dense.move_tensors("sgd", [params[0].bfloat16()], [mixed[0]], [], numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_numbers_are_found_in_every_type(dtype):
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensors, status = [one.to(dtype) for one in draw(0)], torch.tensor([0, -1, 0])
        dense.check_finite(tensors, status)
        assert status[0] == 0
        tensors[4][2048] = bad
        dense.check_finite(tensors, status)
        assert status[0] == 1


@pytest.mark.parametrize("part", ["gradients", "state", "too few gradients"])
def test_sizes_that_differ_from_the_parameters_are_refused(part):
    """The kernel would write beyond the memory of a state that was loaded from another model."""
    params, gradients, states = [torch.ones(9, 3)], [torch.ones(9, 3)], [[torch.ones(9, 3)]]
    numbers = torch.tensor(NUMBERS, dtype=torch.float64)
    dense.move_tensors("adagrad", params, gradients, states, numbers)
    if part == "gradients":
        gradients = [torch.ones(3)]
    elif part == "state":
        states = [[torch.ones(2)]]
    else:
        gradients = []
    with pytest.raises(VivianeError, match="must have the parameters' sizes"):
        dense.move_tensors("adagrad", params, gradients, states, numbers)

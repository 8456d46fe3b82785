"""The dense update's kernel on the CPU, against plain torch."""

import pytest
import torch

from viviane.ops import dense_update as dense
from viviane.ops.dense_update.reference import move_tensors as plain
from viviane.ops.dispatch import use_implementation

SHAPES = [(1,), (3,), (33, 7), (0,), (2049,), (300, 128)]
NUMBERS = [0.05, 0.02, 1e-3, 0.9, 0.99, 1 - 0.9, 1 - 0.99]


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def flat(lists):
    return [one for part in lists for one in part]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rule", dense.STATES)
def test_every_rule_moves_as_the_reference(rule, inside):
    values = [20.0, 0.02, 0.3, *NUMBERS[3:]] if rule == "ftrl" else NUMBERS
    numbers = torch.tensor(values, dtype=torch.float64)
    options = {"inside": inside, "decays": True, "scale": torch.tensor(0.5), "gate": None, "room": dense.Room()}
    results = []
    for move in (dense.move_tensors, plain):
        params, states = draw(0), [[one.abs() for one in draw(1 + i)] for i in range(dense.STATES[rule])]
        for step in range(3):
            move(rule, params, draw(10 + step), states, numbers, **options)
        results.append(flat([params, *states]))
    for one, other in zip(*results, strict=True):
        # Three steps of about ten float32 operations on numbers of about 1.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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

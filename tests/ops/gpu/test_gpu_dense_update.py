"""The dense update on a GPU against plain torch in float64: every rule, gates, scales, odd sizes, bad numbers."""

import numpy as np
import pytest
import torch

from viviane.core.errors import VivianeError
from viviane.ops import dense_update as dense
from viviane.ops.dense_update.reference import move_tensors as plain
from viviane.ops.dispatch import use_implementation
from viviane.ops.rules import DenseNumbers, dense_rules

SHAPES = [(1,), (3,), (33, 7), (0,), (2049,), (100, 41)]


@pytest.fixture(autouse=True)
def _kernels():
    with use_implementation("gpu"):
        yield


def flat(lists):
    return [one for part in lists for one in part]


def draw(device, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in SHAPES]


def numbers_of(device, rule):
    numbers = DenseNumbers(0.05, 0.02, 1e-3, 0.9, 0.99, third=1.5, fourth=1.25)
    if rule == "ftrl":  # 1 / lr, lambda1 and lr
        numbers = DenseNumbers(20.0, 0.02, 0.3, 0.9, 0.99, third=0.05)
    return torch.tensor(numbers.values(), dtype=torch.float64, device=device)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rule", dense_rules())
def test_every_rule_moves_as_the_reference(device, rule, inside):
    params, gradients, numbers = draw(device, 1), draw(device, 2), numbers_of(device, rule)
    states = [[one.abs() for one in draw(device, 3 + i)] for i, _ in enumerate(dense_rules()[rule].states)]
    scale = torch.tensor(0.5, device=device)
    wide = [[one.double().cpu() for one in part] for part in (params, gradients, *states)]
    workspace = dense.Workspace()
    for _ in range(3):
        dense.move_tensors(rule, params, gradients, states, numbers, inside=inside, decays=True, scale=scale,
                           workspace=workspace)  # fmt: skip
        plain(rule, wide[0], wide[1], wide[2:], numbers.cpu(), inside=inside, decays=True, scale=scale.cpu(),
              gate=None, workspace=workspace)  # fmt: skip
    for found, truth in zip([*params, *flat(states)], [*wide[0], *flat(wide[2:])], strict=True):
        # Three steps of some ten operations, each rounded to float32, on numbers of about 1; ftrl multiplies by 20.
        torch.testing.assert_close(found.cpu().double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rule", dense_rules())
def test_a_closed_gate_moves_nothing_even_by_nan(device, rule):
    params, gradients, numbers = draw(device, 1), draw(device, 2), numbers_of(device, rule)
    gradients[2][3, 3] = float("nan")
    states = [[one.abs() for one in draw(device, 3 + i)] for i, _ in enumerate(dense_rules()[rule].states)]
    before = [one.clone() for one in (*params, *flat(states))]
    gate = torch.zeros((), dtype=torch.int32, device=device)
    dense.move_tensors(rule, params, gradients, states, numbers, gate=gate)
    assert all(torch.equal(a, b) for a, b in zip(before, [*params, *flat(states)], strict=True))
    gate.fill_(1)
    gradients[2][3, 3] = 1.0
    dense.move_tensors(rule, params, gradients, states, numbers, gate=gate)
    assert not torch.equal(before[2], params[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [0, 1, 4])
@pytest.mark.parametrize("rule", dense_rules())
def test_gradients_of_16_bits_move_as_if_they_had_been_cast_and_scaled_before(device, rule, dtype, apart):
    """They lie one after another in one tensor, as sums over processes do, from its element `apart` on."""
    numbers, scale = numbers_of(device, rule), torch.tensor(0.37, device=device)
    flat_one = torch.cat([torch.zeros(apart), *(one.view(-1) for one in draw("cpu", 2))]).to(dtype).to(device)
    flat_one[apart] = float("inf")
    flat_one[apart + 1] = 2.0**-24  # the least number of float16
    gate, results = torch.ones((), dtype=torch.int32, device=device), []
    for direct in (True, False):
        params = draw(device, 1)
        sizes = [apart, *(one.numel() for one in params)]
        gradients = [one.view(shape) for one, shape in zip(torch.split(flat_one, sizes)[1:], SHAPES, strict=True)]
        given = gradients if direct else [one.float() * scale for one in gradients]
        states = [[one.abs() for one in draw(device, 3 + i)] for i, _ in enumerate(dense_rules()[rule].states)]
        for is_open in (1, 0, 1):
            gate.fill_(is_open)
            with np.errstate(invalid="ignore"):  # the interpreter computes with the infinite one in NumPy
                dense.move_tensors(
                    rule, params, given, states, numbers, decays=True, scale=scale if direct else None, gate=gate
                )
        results.append([*params, *flat(states)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert not torch.isfinite(results[0][0]).all()
    assert torch.isfinite(results[0][1]).all()
    assert not torch.equal(results[0][1], draw(device, 1)[1])


def fresh_status(device):
    return torch.tensor([0, -1, 0], device=device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 2048, 5000 - 1])
def test_a_bad_number_is_found_wherever_it_is(device, bad, place):
    one = torch.full((5000,), 3e38, device=device)  # whose sum would overflow
    for tensors in ([one], [torch.ones(7, device=device), one, torch.ones(0, device=device)]):
        status = fresh_status(device)
        dense.check_finite(tensors, status)
        assert status[0] == 0
        one[place] = bad
        dense.check_finite(tensors, status)
        assert status[0] == 1
        one[place] = 1.0


def test_a_bad_number_of_16_bits_is_found(device):
    one = torch.ones(100_000, dtype=torch.float16, device=device)
    status = fresh_status(device)
    dense.check_finite([one], status)
    assert status[0] == 0
    one[99_999] = float("inf")
    dense.check_finite([one], status)
    assert status[0] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("apart", [0, 1, 4])
def test_a_bad_number_of_16_bits_is_found_in_many_tensors(device, dtype, bad, apart):
    sizes, status = [1, 5000, 0, 3, 2048], fresh_status(device)
    whole = torch.full((apart + sum(sizes),), 6e4, dtype=dtype, device=device)
    if apart:
        whole[0] = bad  # none of theirs
    tensors = list(torch.split(whole[apart:], sizes))
    dense.check_finite(tensors, status)
    assert status[0] == 0
    for tensor, place in ((0, 0), (1, 2048), (1, 4999), (3, 2), (4, 2047)):
        before = tensors[tensor][place].clone()
        tensors[tensor][place] = bad
        dense.check_finite(tensors, status)
        assert status[0] == 1
        tensors[tensor][place] = before
        status = fresh_status(device)
    with pytest.raises(VivianeError, match="one type"):
        dense.check_finite([*tensors, torch.ones(2, device=device)], status)


def test_the_first_bad_step_is_remembered_and_later_ones_wait(device):
    status, gate = fresh_status(device), torch.zeros((), dtype=torch.int32, device=device)
    losses = [0.5, float("inf"), 0.25]
    gates = []
    for loss in losses:
        dense.update_status(torch.tensor(loss, device=device), status, gate)
        gates.append(int(gate))
    assert gates == [1, 0, 0]
    assert status.tolist() == [1, 1, 3]
    status = fresh_status(device)
    none = torch.tensor([0, 5, 5], device=device)
    dense.mark([], status)
    dense.mark([none], status)
    dense.mark([none] * 70, status)
    dense.update_status(None, status, gate)
    dense.mark([*[none] * 69, torch.tensor([1, 0, 0], device=device)], status)
    dense.update_status(None, status, gate)
    assert (status.tolist(), int(gate)) == ([1, 1, 2], 0)


def judged(device, steps, scale, interval=3, largest=64.0, implementation="gpu"):
    """Judge steps of (loss, overflows, key is bad); after each: scale, good, skipped, gate, status, overflow."""
    status, gate = fresh_status(device), torch.ones((), dtype=torch.int32, device=device)
    overflow = torch.zeros(1, dtype=torch.int64, device=device)
    scaling = torch.tensor([scale, 0.0, 0.0], dtype=torch.float64, device=device)
    found = []
    with use_implementation(implementation):
        for loss, overflows, bad in steps:
            overflow += overflows
            status[0].clamp_(min=bad)
            dense.update_scaled_status(
                torch.tensor(loss, device=device), status, overflow, scaling, gate, interval=interval, largest=largest
            )
            found.append([*scaling.tolist(), int(gate), *status.tolist(), *overflow.tolist()])
    return found


GOOD, OVERFLOW = (0.5, 0, 0), (0.5, 1, 0)


def test_a_scale_is_halved_for_its_own_step_and_doubled_after_good_ones(device):
    found = judged(device, [GOOD, OVERFLOW, (0.5, 4, 0), GOOD, GOOD, GOOD, GOOD, OVERFLOW], 32.0)
    assert [one[:4] for one in found] == [
        [32, 1, 0, 1], [16, 0, 1, 0], [8, 0, 2, 0], [8, 1, 2, 1], [8, 2, 2, 1], [16, 0, 2, 1], [16, 1, 2, 1],
        [8, 0, 3, 0],
    ]  # fmt: skip
    assert [one[4:] for one in found] == [[0, -1, i + 1, 0] for i in range(8)]
    capped = judged(device, [GOOD] * 5, 32.0)
    assert [one[:2] for one in capped] == [[32, 1], [32, 2], [64, 0], [64, 1], [64, 2]]
    assert [one[:2] for one in judged(device, [GOOD] * 4, 64.0)] == [[64, 1], [64, 2], [64, 3], [64, 4]]
    assert judged(device, [GOOD], 16.0, interval=1)[0][:2] == [32, 0]


@pytest.mark.parametrize("bad", [(float("nan"), 0, 0), (float("inf"), 1, 0), (0.5, 0, 1), (0.5, 1, 1)])
def test_what_no_scale_prevents_closes_the_gate_for_good(device, bad):
    found = judged(device, [GOOD, bad, GOOD, OVERFLOW], 32.0)
    assert [one[:4] for one in found] == [[32, 1, 0, 1], [32, 1, 0, 0], [32, 1, 0, 0], [32, 1, 0, 0]]
    assert [one[4:] for one in found] == [[0, -1, 1, 0], [1, 1, 2, 0], [1, 1, 3, 0], [1, 1, 4, 0]]


def test_a_scale_of_one_is_not_halved(device):
    found = judged(device, [OVERFLOW, OVERFLOW], 2.0)
    assert [one[:6] for one in found] == [[1, 0, 1, 0, 0, -1], [1, 0, 1, 0, 1, 1]]


def test_scales_are_those_of_plain_torch(device):
    generator = torch.Generator().manual_seed(3)
    steps = [(0.5, int(torch.rand((), generator=generator) < 0.3), 0) for _ in range(60)]
    steps += [(0.5, 0, 1), GOOD]
    found = [judged(device, steps, 2.0**30, largest=2.0**32, implementation=one) for one in ("gpu", "reference")]
    assert found[0] == found[1]
    assert len({one[0] for one in found[0]}) > 3


def test_columns_of_a_wider_matrix_are_looked_at_alone(device):
    wide = torch.ones(700, 33, device=device)
    wide[:, :5], wide[:, 20:] = float("nan"), float("inf")
    status = fresh_status(device)
    dense.check_finite([wide[:, 5:20]], status)
    assert status[0] == 0
    for row, column in ((0, 5), (699, 19), (350, 11)):
        status = fresh_status(device)
        wide[row, column] = float("inf")
        dense.check_finite([wide[:, 5:20]], status)
        assert status[0] == 1
        wide[row, column] = 1.0

"""The numbers that a recorded step reads: what they are, and that dense weights move by them as by the formulas."""

import pytest
import torch

from viviane.config import SGD, AdaGrad, Adam, Ftrl, RMSProp
from viviane.ops.dense_update import update_status
from viviane.ops.rules import NUM_DENSE_NUMBERS
from viviane.optim import build_dense_optimizer
from viviane.optim.dense import DenseMover
from viviane.training.graph.captured_step import StepStatus
from viviane.training.graph.controls import Controls, step_values

RULES = [
    SGD(weight_decay=0.01),
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True, weight_decay=0.01),
    AdaGrad(initial_accumulator=0.1),
    AdaGrad(epsilon_inside_root=True),
    RMSProp(epsilon=1e-3),
    Adam(weight_decay=0.01),
    Adam(epsilon_inside_root=True),
    Ftrl(beta=1.0, lambda1=0.05, lambda2=0.1),
]
SHAPES = [(3,), (7, 5), (1,)]


def moved(rule, mover, steps=5):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = build_dense_optimizer(rule, params, lr=0.1)
    optimizer.mover = mover
    for step in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.set_lr(0.1 / (step + 1))
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == steps
    return [param.detach() for param in params], optimizer


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.type)
def test_a_mover_moves_as_the_formulas(rule):
    plain, _ = moved(rule, None)
    by_mover, _ = moved(rule, DenseMover())
    for one, other in zip(plain, by_mover, strict=True):
        # Five steps of about ten float32 operations on numbers of about 1; ftrl divides by rates of 0.02 and more.
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert not torch.equal(plain[1], moved(rule, None, steps=4)[0][1])


@pytest.mark.parametrize("scale", [0.375, torch.tensor(0.37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mover", [None, DenseMover()])
def test_gradients_are_multiplied_before_all_else_and_may_lie_beside(mover, dtype, scale):
    results = []
    for direct in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        optimizer = build_dense_optimizer(Adam(weight_decay=0.01), params, lr=0.1)
        optimizer.mover = mover
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES[:2]]
        before = [one.clone() for one in gradients]
        if direct:
            optimizer.beside = dict(zip(params, gradients, strict=False))
            optimizer.step(scale=scale)
        else:
            for param, gradient in zip(params, gradients, strict=False):
                param.grad = gradient.float() * scale
            optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(gradients, before, strict=True))
        assert len(optimizer.state) == 2
        results.append([param.detach() for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_controls_hold_each_group_where_its_launch_reads():
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [one]}, {"params": [other], "lr": 0.5, "weight_decay": 0.25}]
    optimizer = build_dense_optimizer(Adam(beta1=0.5, beta2=0.75, epsilon=1e-3), groups, lr=0.1)
    for group in optimizer.param_groups:
        group["step"] = 1
    optimizer.set_lr(0.2, factor=2.0)
    controls = Controls(torch.device("cpu"), 2)
    first, second = controls.group(0), controls.group(1)
    packed = torch.tensor(controls.pack([step_values(0.2, 2.0, optimizer)]), dtype=torch.float64)
    assert len(packed) == controls.width
    controls.take(packed)
    assert (controls.lr.item(), controls.factor.item()) == (0.2, 2.0)
    # Adam's correction of the first step: sqrt(1 - 0.75) / (1 - 0.5) = 1.
    assert first.tolist() == pytest.approx([0.2, 0.0, 1e-3, 0.5, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert second.tolist() == pytest.approx([1.0, 0.25, 1e-3, 0.5, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert len(first) == NUM_DENSE_NUMBERS


def test_the_device_takes_the_numbers_of_the_steps_that_were_not_skipped():
    controls = Controls(torch.device("cpu"), 0, num_means=1, num_rows=3)

    def take(rows, known, skipped):
        packed = torch.tensor(controls.pack(rows, known), dtype=torch.float64)
        assert len(packed) == controls.width
        controls.take(packed, torch.tensor(float(skipped), dtype=torch.float64))

    for known, skipped, wanted in ((0, 0, 10.0), (0, 2, 12.0), (4, 5, 11.0)):
        take([[0.1, 1.0, 10.0], [0.1, 1.0, 11.0], [0.1, 1.0, 12.0]], known, skipped)
        assert (controls.lr.item(), controls.factor.item(), controls.means.tolist()) == (0.1, 1.0, [wanted])
    take([[0.2, 1.0, 3.0]], 1, 1)  # nothing is in progress
    assert controls.means.tolist() == [3.0]


def test_a_verdict_of_a_later_step_does_not_blame_an_earlier_one():
    step_status = StepStatus(torch.device("cpu"), Controls(torch.device("cpu"), 0), 5)
    numbers, losses = [], [torch.zeros(()) for _ in range(4)]
    for loss, given in zip(losses, (0.5, 0.25, float("nan"), 0.125), strict=True):
        update_status(torch.tensor(given), step_status.status, step_status.gate)
        step_status.write_back(torch.tensor([loss.data_ptr()]), torch.tensor(given))
        numbers.append(step_status.number)
        step_status.end(None)
    assert numbers == [0, 1, 2, 3]
    assert [losses[i].item() for i in (0, 1, 3)] == [0.5, 0.25, 0.125]
    assert [step_status.is_bad(number) for number in numbers] == [False, False, True, True]
    assert int(step_status.gate) == 0
    step_status.reset()
    assert not step_status.is_bad(0)
    assert step_status.number == 0

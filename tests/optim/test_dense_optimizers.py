"""Dense optimizers: hand-computed steps, torch.optim where formulas coincide, state round trip."""

import math

import pytest
import torch

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import ConfigError
from viviane.optim import build_dense_optimizer


def _run(settings, gradients, lr=0.1, start=1.0):
    weight = torch.nn.Parameter(torch.tensor([start]))
    optimizer = build_dense_optimizer(settings, [weight], lr)
    for g in gradients:
        weight.grad = torch.tensor([g])
        optimizer.step()
    return weight.item()


def test_steps_by_hand():
    assert _run(SGD(weight_decay=0.5), [0.5, 0.0]) == pytest.approx(0.9 - 0.1 * 0.45, rel=1e-6)
    # s: 0.25, 0.5
    adagrad = 1 - 0.1 * 0.5 / (0.5 + 0.01) - 0.1 * 0.5 / (math.sqrt(0.5) + 0.01)
    assert _run(AdaGrad(epsilon=0.01), [0.5, 0.5]) == pytest.approx(adagrad, rel=1e-6)
    # m = 1, v = 1, a = 0.1 * 0.5 / 0.5;  then m = 1, v = 1.0, a = 0.1 * sqrt(0.4375) / 0.75
    adam = 1 - 0.1 / 1.01
    assert _run(Adam(beta1=0.5, beta2=0.75, epsilon=0.01), [2.0]) == pytest.approx(adam, rel=1e-6)
    adam -= 0.1 * math.sqrt(0.4375) / 0.75 / 1.01
    assert _run(Adam(beta1=0.5, beta2=0.75, epsilon=0.01), [2.0, 1.0]) == pytest.approx(adam, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "peer"),
    [
        (SGD(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
        (AdaGrad(epsilon=1e-6), lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6)),
        # torch puts epsilon beside the corrected root: the same within epsilon / sqrt(v).
        (Adam(epsilon=1e-12), lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-12)),
    ],
)
def test_equals_torch_where_formulas_coincide(settings, peer):
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(4))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    optimizers = build_dense_optimizer(settings, mine, 0.05), peer(theirs)
    for _ in range(5):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        # The same formula in another order of operations, five steps of numbers near 1.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [SGD(), AdaGrad(initial_accumulator=0.5), Adam()])
def test_state_round_trip_continues_bit_for_bit(settings):
    def run(steps, optimizer, weight, first=0):
        for i in range(first, steps):
            weight.grad = torch.tensor([0.3 * i - 1, 0.7])
            optimizer.step()

    whole = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    run(6, build_dense_optimizer(settings, [whole], 0.1), whole)
    half = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    first = build_dense_optimizer(settings, [half], 0.1)
    run(3, first, half)
    second = build_dense_optimizer(settings, [half], 0.1)
    second.load_state_dict(first.state_dict())
    run(6, second, half, first=3)
    assert torch.equal(whole, half)


def test_learning_rates_follow_the_schedule_and_own_rates_its_factor():
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    optimizer = build_dense_optimizer(SGD(), [{"params": [a]}, {"params": [b], "lr": 0.5}], 0.1)
    optimizer.set_lr(0.02, factor=0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.1]
    own = build_dense_optimizer(SGD(lr=3.0), [c], 0.1)
    own.set_lr(0.02, factor=0.2)
    assert own.param_groups[0]["lr"] == pytest.approx(0.6)


def test_group_overrides_weight_decay_and_missing_gradients_are_skipped():
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    groups = [{"params": [a]}, {"params": [b, c], "weight_decay": 0.0}]
    optimizer = build_dense_optimizer(SGD(weight_decay=1.0), groups, 0.5)
    a.grad, b.grad = torch.zeros(1), torch.zeros(1)
    optimizer.step()
    assert (a.item(), b.item(), c.item()) == (0.5, 1.0, 1.0)


def test_step_counts_only_when_something_moves():
    a = torch.nn.Parameter(torch.ones(1))
    optimizer = build_dense_optimizer(Adam(), [a], 0.1)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0


def test_refusals():
    with pytest.raises(ConfigError, match="learning rate must be positive"):
        build_dense_optimizer(SGD(), [torch.nn.Parameter(torch.ones(1))], 0.0)


def test_closure():
    a = torch.nn.Parameter(torch.ones(1))
    optimizer = build_dense_optimizer(SGD(), [a], 0.5)

    def closure():
        optimizer.zero_grad()
        loss = (a * a).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert a.item() == 0.0


@pytest.mark.parametrize("autograd_records", [False, True])
def test_update_does_what_step_does_and_calls_its_hooks(autograd_records):
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    plain, hooked = (build_dense_optimizer(Adam(), [weight], 0.1) for weight in weights)
    calls = []
    hooked.register_step_pre_hook(lambda *_: calls.append("before"))
    hooked.register_step_post_hook(lambda *_: calls.append("after"))
    for weight, optimizer in zip(weights, (plain, hooked), strict=True):
        weight.grad = torch.tensor([1.0, -2.0, 0.5])
        with torch.set_grad_enabled(autograd_records):
            optimizer.update(0.5)
    assert calls == ["before", "after"]
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.ones(3))
    assert plain.param_groups[0]["step"] == hooked.param_groups[0]["step"] == 1


def test_a_profiler_sees_an_update_as_a_step():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = build_dense_optimizer(SGD(), [weight], 0.1)
    weight.grad = torch.ones(3)
    with torch.autograd.profiler.profile() as profile:
        optimizer.update()
    assert any(event.name.startswith("Optimizer.step#") for event in profile.function_events)

"""The dynamic loss scale of fp16 in recorded steps: the same scales, skips, counts and bits as in eager steps."""

import sys
from pathlib import Path

import group_model
import pytest
import test_fixed_sizes_of_fit as fixed
import torch
from click_model import assert_same_bits
from replayed_on_cpu import GraphCapture, let_replay, replays
from test_captured_step import ON_GPU, bits, differing, fixed_batch, gpu, train, train_and_settle
from test_captured_step import trainer_of as trainer_on_gpu
from test_replayed_step import all_of, trainer_of

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.config import Adam
from viviane.core.errors import KeyRangeError, NumericsError
from viviane.parallel import Group
from viviane.training import trainer_base as trainers
from viviane.training.graph import captured
from viviane.training.graph.capture_rules import ineligible_reasons
from viviane.training.step import loss_scale

__all__ = ["replays"]
SETTINGS = [{}, {"clip_grad_norm": 0.05}, {"ema_decay": 0.9}, {"ema_decay": 0.5, "clip_grad_norm": 0.05}]


@pytest.fixture
def restless(monkeypatch):
    """Let the scale grow after three good steps: then some step overflows again and again."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)


def of(make, graph, **settings):
    trainer = make(graph, precision="fp16", **settings)
    trainer.stepper.loss_scale.value = 2.0**24
    return trainer


def scaling(trainer):
    """The host's scale, its good steps, the skipped ones, and the steps that dense weights count."""
    trainer.settle()
    scale = trainer.stepper.loss_scale
    return [*scale.state(), scale.num_skipped, trainer.stepper.optimizer.param_groups[0]["step"], trainer.step]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_scales_skips_and_bits_are_those_of_eager_steps(replays, restless, settings):
    eager, replayed = of(trainer_of, False, **settings), of(trainer_of, True, **settings)
    found = []
    for trainer in (eager, replayed):
        losses, places, seen = [], [], []
        for seed in range(45):
            losses.append(float(trainer.train_step(fixed_batch(32, seed))))
            if seed % 15 == 14:
                places.append(scaling(trainer))
                seen.append(all_of(trainer))
        found.append((losses, places, seen))
    assert found[0][:2] == found[1][:2]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert_same_bits(one, other)
    value, _, skipped, counted, steps = found[0][1][-1]
    assert steps == 45
    assert counted == steps - skipped
    assert skipped > 24 - torch.tensor(value).log2()  # it grew in between
    assert replayed.stepper.captured.num_replays >= 38  # a running mean begins with a step from Python that moves


def test_skips_that_the_host_has_not_heard_of_do_not_count(replays, restless):
    """Adam's correction depends most on the count in the first steps, and these are skipped one after another."""
    eager, replayed = of(trainer_of, False), of(trainer_of, True)
    for trainer in (eager, replayed):  # one after the other: dropout draws from one generator
        train(trainer, range(11))
    waiting = len(replayed.stepper.captured._in_flight)
    assert waiting == replayed.stepper.captured.num_replays == 5  # no step waited for its status
    assert scaling(eager) == scaling(replayed)
    assert differing(eager, replayed) == []


def test_a_step_that_overflows_is_not_the_one_after_which_steps_are_recorded(replays):
    """Optimizer state and counts of tables begin with the first step that moves weights, and not in a graph."""
    trainer = of(trainer_of, True)
    steps = trainer.stepper.captured
    for seed in range(12):
        without = not trainer.stepper.optimizer.state
        trainer.train_step(fixed_batch(32, seed))
        assert not (without and steps.num_captured)
    assert scaling(trainer)[2] > 2
    assert steps.num_replays > 4


def test_eager_steps_between_replays_go_on_with_their_scale(replays, restless, tmp_path):
    eager, replayed = of(trainer_of, False), of(trainer_of, True)
    for trainer in (eager, replayed):
        for seed in range(40):
            trainer.train_step(fixed_batch(7 if seed % 9 == 8 else 32, seed))  # a shape that comes seldom is eager
    assert scaling(eager) == scaling(replayed)
    assert differing(eager, replayed) == []
    for trainer, name in ((eager, "eager"), (replayed, "replayed")):
        trainer.save_checkpoint(tmp_path / name)
        trainer.stepper.loss_scale.value = 2.0**24  # what is loaded takes its place
    resumed = []
    for name in ("replayed", "eager"):  # each resumes from the other's checkpoint
        trainer = of(trainer_of, name == "eager")
        trainer.load_checkpoint(tmp_path / name)
        train(trainer, range(40, 60))
        resumed.append((scaling(trainer), bits(trainer)))
    assert resumed[0][0][:2] == resumed[1][0][:2]
    assert_same_bits(resumed[0][1], resumed[1][1])


BAD = [
    ({"price": [0.0] * 5 + [float("nan")] + [0.0] * 26}, NumericsError, "dense column 'price', row 5"),
    # On a CPU a lookup raises where it meets the key, a replay or not: nothing is left to the step status.
    pytest.param({"user": [1] * 31 + [50]}, KeyRangeError, "user", marks=gpu),
]


@pytest.mark.parametrize("later", [0, 1, 6])
@pytest.mark.parametrize(("changed", "error", "words"), BAD)
def test_bad_numbers_and_bad_keys_are_errors_still(request, restless, later, changed, error, words):
    make = (lambda graph, **all: trainer_on_gpu(graph, Adam(), **all)) if ON_GPU else trainer_of
    if not ON_GPU:
        request.getfixturevalue("replays")
    eager, replayed = of(make, False, ema_decay=0.9), of(make, True, ema_decay=0.9)
    for trainer in (eager, replayed):
        train(trainer, range(12))
    place = scaling(eager)
    assert scaling(replayed) == place
    batches = [fixed_batch(32, seed) for seed in range(later)]
    with pytest.raises(error, match=words):
        train_and_settle(replayed, [fixed_batch(32, 99, **changed), *batches])
    assert scaling(replayed) == place
    found = []
    for trainer in (eager, replayed):
        torch.manual_seed(1)
        train(trainer, range(12, 30))
        found.append((scaling(trainer), {name: one.cpu() for name, one in all_of(trainer).items()}))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


def test_an_overflow_that_no_scale_prevents_is_an_error(replays):
    trainer = of(trainer_of, True)
    trainer.stepper.loss_scale.value = 4.0
    train(trainer, range(2))
    before = bits(trainer)
    infinite = next(trainer.module.net.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(NumericsError, match=r"loss scale of 1\b[\s\S]*step 5[\s\S]*lower lr"):
        train_and_settle(trainer, [fixed_batch(32, seed) for seed in range(8)])
    assert scaling(trainer) == [1.0, 0, 2, 2, 4]
    assert all(torch.equal(before[name], one) for name, one in bits(trainer).items())
    infinite.remove()
    train(trainer, range(3))
    assert scaling(trainer) == [1.0, 3, 2, 5, 7]


def test_only_an_unguarded_scale_keeps_steps_from_being_recorded(replays):
    for settings, words in (({}, None), ({"loss_scale": 8.0}, None), ({"nan_guard": False}, "without nan_guard")):
        step = trainer_of(False, precision="fp16", **settings).stepper
        found = [one for one in ineligible_reasons(step) if "fp16" in one]
        assert (words in found[0]) if words else not found


@gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_graph_gives_scales_skips_and_bits_of_eager_steps(restless, settings):
    eager, recorded = (of(lambda graph, **all: trainer_on_gpu(graph, Adam(), **all), graph, **settings)
                       for graph in (False, True))  # fmt: skip
    found = []
    for trainer in (eager, recorded):  # one after the other: dropout draws from one generator
        losses = train(trainer, range(45))
        found.append((losses, scaling(trainer)))
    assert found[0] == found[1]
    assert differing(eager, recorded) == []
    assert recorded.stepper.loss_scale.num_skipped > 4
    assert recorded.stepper.captured.num_replays >= 38


def in_a_group():
    group, found = Group.world(), []
    captured.GraphCapture, captured.ineligible_reason = GraphCapture, lambda step: None
    trainers.replays_of = captured.CapturedSteps
    loss_scale.INTERVAL = 3
    for graph in (False, True):
        given = group_model.settings(precision="fp16", device="cpu", cuda_graph=graph, clip_grad_norm=0.3)
        trainer = let_replay(fixed.make_trainer(group, given, fixed.schema_of(fixed.HOTNESS)))
        trainer.fix_sizes(8 * group.size)
        trainer.stepper.loss_scale.value = 2.0**24
        losses = [float(trainer.train_step(fixed.own_batch(group, step))) for step in range(24)]
        found.append(([losses, scaling(trainer)], fixed.tensors_of(trainer)))
    assert trainer.stepper.captured.num_replays > 15
    assert found[0][0] == found[1][0]
    assert trainer.stepper.loss_scale.num_skipped > 2
    assert all(torch.equal(found[0][1][name], one) for name, one in found[1][1].items())
    every = group.gather_data(found[1][0])
    assert every[0] == every[1]


def test_processes_replay_the_same_scales_and_skips():
    processes.run(2, in_a_group)

"""Sums of 16 bits that are read where they arrived: the same bits as those that are cast into float32 before."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes
import replayed_on_cpu
import test_fixed_sizes_of_fit as fixed
from group_model import SCHEMA, Clicks, columns, settings, tensors_of

from viviane.batch import Batch
from viviane.config import SGD, Adam, Ftrl
from viviane.core.errors import NumericsError
from viviane.optim.dense import DenseGradients
from viviane.parallel import Group
from viviane.training import Trainer
from viviane.training import trainer_base as trainers
from viviane.training.graph import captured
from viviane.training.step.dense_exchange import DenseExchange

CASES = [
    ({}, Adam()),
    ({"clip_grad_norm": None}, SGD(momentum=0.9, weight_decay=0.01)),
    ({"clip_grad_norm": 0.05, "ema_decay": 0.9}, Adam(weight_decay=0.01)),
    ({"clip_grad_norm": None, "precision": "fp16", "loss_scale": 48.0}, Adam()),
    ({"clip_grad_norm": 0.05, "precision": "fp16"}, Ftrl(beta=1.0, lambda1=1e-3)),
]
# The short run takes each wire, the update without a mover, clipping, the mean, a given and a dynamic loss scale once.
FEW = {
    "trained": [("bfloat16", True, [CASES[2]]), ("bfloat16", False, [CASES[1]]), ("float16", True, [CASES[4]])],
    "replayed": [("float32", [CASES[2]]), ("bfloat16", [CASES[1]]), ("float16", [CASES[3]])],
}
ALL = {
    "trained": [("bfloat16", True, CASES), ("bfloat16", False, CASES[:2]), ("float16", True, CASES[2:])],
    "replayed": [("float32", CASES[:4]), ("bfloat16", CASES[:2]), ("float16", CASES[2:4])],
}
WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def trainer_of(group, rule, **changes):
    quiet = {"progress": False, "tensorboard": False}
    return Trainer(Clicks(group), SCHEMA, settings(**changes), rule, group=group, **quiet)


def cast_first(trainer):
    """Let a trainer's sums be cast and scaled before anything reads them."""
    step, gradients = trainer.stepper, []
    step.exchange = DenseExchange(list(step.parameters.values()), step.group, step.exchange.wire_dtype)
    move = step.optimizer.step

    def scaled(*, scale):
        assert not step.gradients.wire_gradients
        gradients.extend(one.dtype for one in step.gradients.all())
        torch._foreach_mul_(step.gradients.all(), scale)
        move()

    step.optimizer.step = scaled
    return trainer, gradients


def trained_alike(group, runs):
    for wire, has_mover, cases in runs:
        for changes, rule in cases:
            direct = trainer_of(group, rule, dense_wire_dtype=wire, **changes)
            before, types = cast_first(trainer_of(group, rule, dense_wire_dtype=wire, **changes))
            full = trainer_of(group, rule, **changes)
            for step in range(4):
                batch = Batch.from_columns(SCHEMA, columns(8 - 5 * (step % 2), 10 * step + group.rank))
                losses = []
                for trainer in (direct, before, full):
                    if not has_mover:
                        trainer.stepper.optimizer.mover = None
                    losses.append(trainer.train_step(batch))
                assert torch.equal(losses[0], losses[1]), (wire, changes)
            assert set(types) == {torch.float32}
            ends = [tensors_of(one) for one in (direct, before, full)]
            assert all(torch.equal(one, ends[1][name]) for name, one in ends[0].items()), (wire, changes, has_mover)
            assert not all(torch.equal(one, ends[2][name]) for name, one in ends[0].items())
            assert not direct.stepper.gradients.named()


def given_beside(group):
    """What an exchange puts beside `grad`, and what it leaves: no float32 copy is kept, unused layers get nothing."""
    for dtype in (*WIRES.values(), None):
        torch.manual_seed(0)
        used, unused = torch.nn.Linear(5, 3), torch.nn.Linear(2, 2)
        parameters = [*used.parameters(), *unused.parameters()]
        gradients = DenseGradients({str(i): one for i, one in enumerate(parameters)})
        exchanges = [
            DenseExchange(parameters, group, dtype, gradients.wire_gradients),
            DenseExchange(parameters, group, dtype),
        ]
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(group.rank))
        for _ in range(2):
            sums = []
            for exchange in exchanges:
                loss = used(x).square().sum()
                exchange.begin(loss)
                loss.backward()
                exchange.finish()
                sums.append([one.clone() for one in gradients.all()])
                if dtype is not None and exchange is exchanges[0]:
                    assert all(one.grad is None for one in parameters)
                    assert {one.dtype for one in sums[0]} == {dtype}
                    exchange.begin(used(x).sum())
                    assert not gradients.wire_gradients  # of a pass that nobody ended
                    exchange.drop()
                gradients.drop()
            assert len(sums[0]) == 2
            assert all(torch.equal(one.float(), other) for one, other in zip(*sums, strict=True))
        assert all((one.wide is None) == (dtype is None or not one.parameters) for one in exchanges[1].buckets)
        assert all(one.wide is None for one in exchanges[0].buckets)


def layers_that_come_and_go(group):
    """A layer that only some processes use in a step, or none, adds nothing of an earlier step, or of a failed one."""
    for dtype in (None, torch.bfloat16):
        for has_wire_gradients in (False, True):
            torch.manual_seed(0)
            layers = [torch.nn.Linear(3, 2) for _ in range(2)]
            parameters = [one for layer in layers for one in layer.parameters()]
            gradients = DenseGradients({str(i): one for i, one in enumerate(parameters)})
            exchange = DenseExchange(parameters, group, dtype, gradients.wire_gradients if has_wire_gradients else None)
            for step, users in enumerate([(0, 1), (1,), (), (0,), "failed", (1,), (), (0, 1)]):
                is_used = users != "failed" and group.rank in users
                x = torch.full((1, 3), float(1 + step + 10 * group.rank))
                loss = layers[0](x).sum() + (layers[1](x).sum() if is_used else 0.0)
                exchange.begin(loss)
                loss.backward()
                if users == "failed":
                    if dtype is not None:  # the loss is on its way, in a bucket of its own
                        exchange.finish()
                    exchange.drop()
                    gradients.drop()
                    continue
                exchange.finish()
                for layer, by in zip(layers, (range(group.size), users), strict=True):
                    weight, bias = layer.weight, layer.bias
                    given = [gradients.wire_gradients.get(one, one.grad) for one in (weight, bias)]
                    if not by:
                        assert given == [None, None], (dtype, step)
                        continue
                    # Whole numbers below 256: exact in bfloat16.
                    assert (given[0] == sum(1 + step + 10 * rank for rank in by)).all(), (dtype, step)
                    assert (given[1] == len(by)).all(), (dtype, step)
                gradients.drop()


def bad_gradients_are_named(group):
    """A gradient that is infinite on the wire alone: no weight moves, and all processes name it."""
    for wire, is_bad in (("float16", True), ("bfloat16", False)):
        trainer = trainer_of(group, Adam(), dense_wire_dtype=wire)
        last = trainer.module.net[4].bias
        handle = last.register_hook(lambda gradient: gradient * 0 + 1e6)  # float16 ends at 65,504
        before = tensors_of(trainer)
        batch = Batch.from_columns(SCHEMA, columns(8, group.rank))
        if is_bad:
            with pytest.raises(
                NumericsError, match=r"gradients are NaN or infinite: those of parameter[\s\S]*'net.4.bias'"
            ):
                trainer.train_step(batch)
            handle.remove()
            assert all(torch.equal(one, before[name]) for name, one in tensors_of(trainer).items())
            assert not trainer.stepper.gradients.named()
        trainer.train_step(batch)
        assert not torch.equal(tensors_of(trainer)["net.4.bias"], before["net.4.bias"])


def replayed_alike(group, runs):
    """Simulated replays against eager steps."""
    captured.GraphCapture = type("OwnRecorder", (replayed_on_cpu.GraphCapture,), {})
    captured.ineligible_reason = lambda step: None if step.solver.cuda_graph else "no graph is wanted"
    trainers.replays_of = captured.CapturedSteps
    for wire, cases in runs:
        for changes, _ in cases:
            ends = []
            for graph in (True, False):
                solver = settings(**changes, dense_wire_dtype=wire, cuda_graph=graph)
                trainer = fixed.make_trainer(group, solver, fixed.schema_of(fixed.HOTNESS))
                replayed_on_cpu.let_replay(trainer)
                trainer.fix_sizes(8 * group.size)
                losses = [trainer.train_step(fixed.own_batch(group, step)) for step in range(6)]
                trainer.settle()
                assert trainer.stepper.captured.num_replays == (5 if graph else 0)
                ends.append([*losses, *tensors_of(trainer).values()])
            assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True)), (wire, changes)


def everything(runs):
    group = Group.world()
    given_beside(group)
    layers_that_come_and_go(group)
    trained_alike(group, runs["trained"])
    bad_gradients_are_named(group)
    replayed_alike(group, runs["replayed"])


@pytest.mark.parametrize("runs", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_two_processes(runs):
    processes.run(2, everything, runs)

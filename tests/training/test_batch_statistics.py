"""Layers that normalise over the batch do so over the global batch of several processes."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.nn import PReLU_Dice
from viviane.nn.norm import BatchNorm
from viviane.parallel import Group
from viviane.training.step.batch_norm import join_batch_statistics

ROWS = torch.randn(9, 3, generator=torch.Generator().manual_seed(1)) * 2 + 1
PARTS = {"uneven": [slice(0, 2), slice(2, 9)], "one has none": [slice(0, 0), slice(0, 9)]}
LAYERS = {
    "dice": lambda: PReLU_Dice([(3,)], elu_alpha=0.3, factor=0.1),
    "batch norm": lambda: BatchNorm([(3,)], factor=0.1),
}


def results(module, rows):
    """Two training steps' outputs, gradients of the rows, and what evaluation then gives."""
    found = []
    for scale in (1.0, 0.5):
        x = (rows * scale).requires_grad_()
        y = module(x)
        (y**3 * torch.arange(1.0, 4)).sum().backward()  # of squares of normalised rows the sum is constant
        found += [y.detach(), x.grad]
    module.eval()
    return [*found, module(ROWS[:2]).detach()]


def are_those_of_one_process(name, parts):
    group = Group.world()
    own = PARTS[parts][group.rank]
    whole = results(torch.nn.Sequential(LAYERS[name]()), ROWS)
    joined = torch.nn.Sequential(LAYERS[name]())
    join_batch_statistics(joined, group)
    split = results(joined, ROWS[own])
    for i, (one, other) in enumerate(zip(whole[:-1], split[:-1], strict=True)):
        assert torch.allclose(one[own], other, rtol=1e-5, atol=1e-6), (
            name,
            parts,
            i,
        )  # sums are added in another order
    assert torch.allclose(whole[-1], split[-1], rtol=1e-5, atol=1e-6)
    for buffer in joined.buffers():
        assert all(torch.equal(one, buffer.flatten()) for one in group.gather(buffer.flatten()))


def each_of(cases):
    for name, parts in cases:
        are_those_of_one_process(name, parts)


def test_two_processes_normalise_as_one_does():
    processes.run(2, each_of, [(name, parts) for name in LAYERS for parts in PARTS])


@pytest.mark.parametrize("factor", [None, 0.1])
def test_hugectr_s_rule_keeps_to_the_batch_of_a_process(monkeypatch, factor):
    group = Group()
    monkeypatch.setattr(group, "size", 2)
    layer = torch.nn.Sequential(PReLU_Dice([(3,)], factor=factor))
    join_batch_statistics(layer, group)
    assert (layer[0].statistics is None) == (factor is None)

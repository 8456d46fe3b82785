"""Buffers of single processes: a checkpoint has those of every rank, and the agreement on weights leaves them out."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.core.errors import CheckpointError
from viviane.nn import LogFrequency
from viviane.parallel import Group
from viviane.training.checkpoint.process_buffers import gather_process_buffers, restore_process_buffers
from viviane.training.step.step_sync import agree_on_weights


def counted(batches):
    module = torch.nn.ModuleDict({"q": LogFrequency([(1,)], num_buckets=4)})
    for batch in batches:
        module["q"](torch.tensor(batch)[:, None])
    return module


def restores_those_of_each_rank():
    group = Group.world()
    module = counted([[1, 2], [1, 3 - group.rank]])
    agree_on_weights(module, group)
    saved = gather_process_buffers(module, group)
    names = {f"buffers/rank1/q.{name}" for name in LogFrequency.process_buffers}
    assert set(saved) == names
    other = counted([])
    if group.rank == 0:
        other.load_state_dict(module.state_dict())  # as from the weights of the checkpoint
    restore_process_buffers(other, saved, group)
    for name, buffer in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], buffer), (group.rank, name)


def test_each_rank_gets_its_own_buffers_back():
    processes.run(2, restores_those_of_each_rank)


def test_one_process_has_none_besides_its_weights():
    assert gather_process_buffers(counted([[1]]), Group()) == {}


def test_a_buffer_of_another_shape_is_refused(monkeypatch):
    group = Group()
    monkeypatch.setattr(group, "rank", 1)
    with pytest.raises(CheckpointError, match=r"another one than the module's[\s\S]*rank 1, q.steps"):
        restore_process_buffers(counted([[1]]), {"buffers/rank1/q.steps": torch.zeros(2)}, group)

"""Copies of a trainer: they go on with the same bits, and apart from their original."""

import copy
import pickle

import pytest
import torch

import viviane as vv
from viviane.batch import Batch
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "y"}], dense=[{"name": "x"}],
    categorical=[{"name": "c", "num_ids": 9}, {"name": "d", "num_ids": 30, "kind": "multi_hot"}],
)  # fmt: skip


def batch(seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    bags = [torch.randint(0, 30, (n % 3,), generator=rng).tolist() for n in range(16)]
    ids = torch.randint(0, 9, (16,), generator=rng)
    labels = torch.randint(0, 2, (16,), generator=rng).float()
    return Batch.from_columns(SCHEMA, {"y": labels, "x": torch.randn(16, generator=rng), "c": ids, "d": bags})


def trained(optimizer, steps: int) -> vv.Model:
    model = vv.Model(vv.Solver(device="cpu", batch_size=16, seed=1), SCHEMA)
    model.add(vv.zoo.DCN(dim=4, deep_mlp=[8]))
    model.compile(optimizer)
    for seed in range(steps):
        model.trainer.train_step(batch(seed))
    return model


def state(model: vv.Model) -> list[torch.Tensor]:
    return [one.clone() for one in model.module.state_dict().values()]


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("steps", [0, 2, 9])  # before the first step, eager steps, and recorded ones
@pytest.mark.parametrize("optimizer", [vv.SGD(lr=0.1, momentum=0.9), vv.Adam(lr=0.01), vv.AdaGrad(lr=0.1)], ids=str)
def test_a_copy_goes_on_with_the_same_bits_and_apart(optimizer, steps, make_copy) -> None:
    model = trained(optimizer, steps)
    before = state(model)
    other = make_copy(model)
    found = [float(other.trainer.train_step(batch(seed))) for seed in range(steps, steps + 8)]
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
    wanted = [float(model.trainer.train_step(batch(seed))) for seed in range(steps, steps + 8)]
    assert found == wanted
    assert all(torch.equal(a, b) for a, b in zip(state(model), state(other), strict=True))

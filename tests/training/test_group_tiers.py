"""Several processes whose tables are in tiers train the bits of processes whose tables are whole in memory."""

import sys
from functools import partial
from pathlib import Path

import group_model
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes
import test_tables_in_tiers as alone

from viviane.data import Dataset, write_dataset
from viviane.embedding import CachedStorage, CacheSettings
from viviane.embedding.module_parts import collections_of
from viviane.parallel import Group, make_tables

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")),
]
ROW = 4 * 4 * 3 + 22  # Adam
CACHE = CacheSettings(tables={"user": 20 * ROW, "item": 30 * (ROW - 16)})  # AdaGrad has one moment less


def storages(module):
    return [one for emb in collections_of(module).values() for one in emb.all_storages()]


def trained(folder, device, cache):
    """Train the plan of tables by rows and of whole tables; return all tensors and the storages."""
    group_model.make_tables = partial(make_tables, cache=cache)
    solver = group_model.settings(device=device, clip_grad_norm=None, epochs=2, cuda_graph=False)
    trainer = group_model.make_trainer(Group.world(), solver)
    trainer.fit(Dataset(folder / "train"), Dataset(folder / "valid"))
    return group_model.tensors_of(trainer), storages(trainer.module)


def by_the_automatic_plan(folder, device, **solver):
    settings = {"clip_grad_norm": None, "max_steps": 24, "checkpoint_every": None, "cuda_graph": False}
    model = alone.make_model(device=device, **settings, **solver)
    model.fit(Dataset(folder / "other"))
    contents = {name: emb.export_table(name) for emb in collections_of(model.module).values() for name in emb.tables}
    return contents, storages(model.module)


def same_bits(folder, device):
    whole, _ = trained(folder, device, None)
    tiers, cached = trained(folder, device, CACHE)
    assert any(isinstance(one, CachedStorage) and one.plans_on_host == (device == "cpu") for one in cached)
    assert [name for name, one in whole.items() if not torch.equal(one, tiers[name])] == []
    contents, _ = by_the_automatic_plan(folder, device)
    others, cached = by_the_automatic_plan(folder, device, embedding_memory=alone.MEMORY)
    assert any(isinstance(one, CachedStorage) for one in cached)
    for name, one in contents.items():
        assert torch.equal(one.weight, others[name].weight), name
        assert one.state.keys() == others[name].state.keys()
        assert all(torch.equal(part, others[name].state[key]) for key, part in one.state.items()), name


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_train_the_bits_of_tables_in_memory(device, tmp_path):
    group_model.make_data(tmp_path)
    write_dataset(tmp_path / "other", alone.SCHEMA, [alone.make_rows(1024, 0)], rows_per_group=128)
    processes.run(2, same_bits, tmp_path, device, backend="nccl" if device == "cuda" else "gloo")

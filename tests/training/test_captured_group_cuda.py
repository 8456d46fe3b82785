"""Recorded steps of several processes over NCCL: equal to steps from Python to the bit, and to one process.

Each function runs in every process; a GPU for each.
"""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
import test_fixed_sizes_of_fit as fixed
import torch
from group_model import settings

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

import viviane as vv
from viviane.batch import Batch
from viviane.config import AdaGrad
from viviane.core.errors import ConfigError, KeyRangeError, NumericsError, ProcessError
from viviane.parallel import Group

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SIZES = [2, pytest.param(4, marks=pytest.mark.skipif(GPUS < 4, reason="needs four GPUs"))]
HOTNESS = fixed.HOTNESS

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def on_gpu(**changes):
    """Settings of a step that a graph can hold."""
    return settings(**{"device": "cuda", "clip_grad_norm": None, "epochs": 2, **changes})


PRECISIONS = [
    {"precision": "bf16", "wire_dtype": "bfloat16", "dense_wire_dtype": "bfloat16"},
    {"precision": "fp32"},
    {"precision": "bf16"},
    {"precision": "fp32", "clip_grad_norm": 0.3, "ema_decay": 0.9},
    {"precision": "fp32", "dense_wire_dtype": "bfloat16", "clip_grad_norm": 0.3},
]


def recorded_equals_eager(folder):
    group = Group.world()
    for changes in PRECISIONS:
        same = {"eval_every": 7, **changes}
        note, options = fixed.Watch(), {"dropout": 0.3, "log_every": 5}
        through = on_gpu(**same, cuda_graph=True, peer_memory=True)  # "auto" leaves so little to NCCL
        recorded = fixed.fit(folder, group, "said", through, note, **options)
        eager = fixed.fit(folder, group, "said", on_gpu(**same, cuda_graph=False), **options)
        assert note.fixed == ([True] * 16 + [False]) * 2
        # The first step from Python, then the two short ones.
        assert recorded.cuda_graph == "replayed: 1 shape(s) captured, 31 steps replayed"
        assert eager.cuda_graph == "eager: solver.cuda_graph is False"
        assert fixed.differing(recorded, eager) == [], changes
        over_nccl = fixed.fit(folder, group, "said", on_gpu(**same, cuda_graph=True, peer_memory=False), **options)
        assert fixed.differing(recorded, over_nccl) == [], changes
        assert [goes_through_peers(one) for one in (recorded, over_nccl, eager)] == [True, False, False]
        losses = [[row["loss"] for row in one.history.rows] for one in (recorded, eager)]
        assert losses[0] == losses[1]
    two_storages(folder)
    plain = on_gpu(eval_every=7, cuda_graph=False)
    truth = fixed.fit(folder, Group(), "said", plain)
    recorded = fixed.fit(folder, group, "said", on_gpu(eval_every=7, cuda_graph=True))
    fixed.close(fixed.tensors_of(recorded), fixed.tensors_of(truth))


def two_storages(folder):
    """Tables of two widths in a process: rows of one are sorted beside lookups, those of the other in backward."""
    before = fixed.group_model.PLAN
    fixed.group_model.PLAN = {"user": "column", "item": "table"}
    try:
        for changes in PRECISIONS[:2]:
            group, given = Group.world(), {"eval_every": 7, "cuda_graph": True, "peer_memory": True, **changes}
            recorded, eager = (
                fixed.fit(folder, group, "said", on_gpu(**{**given, **other})) for other in ({}, {"cuda_graph": False})
            )
            assert goes_through_peers(recorded)
            assert len(recorded.module.tables.own.all_storages()) == (2 if group.rank == 0 else 1)
            assert fixed.differing(recorded, eager) == [], changes
    finally:
        fixed.group_model.PLAN = before


def goes_through_peers(trainer):
    """Whether a lookup was recorded that writes into the memory of the other GPUs."""
    [emb] = trainer.stepper.collections.values()
    return any(route.peers is not None and route.peers.is_taken for route in emb.exchanges.static.values())


def requests_and_resumes(folder, run):
    fixed.settings = lambda **changes: on_gpu(**{"cuda_graph": True, **changes})
    fixed.stopped_and_resumed(Group.world(), folder, run)


def bad_batches(folder):
    """An error that one rank finds in a replay skips the step on all; each rank names it, and training continues."""
    group = Group.world()
    last = group.size - 1
    trainer = fixed.make_trainer(group, on_gpu(cuda_graph=True), fixed.schema_of(HOTNESS))
    trainer.fix_sizes(8 * group.size)
    for step in range(6):
        trainer.train_step(fixed.own_batch(group, step))
    trainer.settle()
    assert trainer.stepper.captured.num_replays == 5
    bad = [fixed.even(8, group.rank) for _ in range(2)]
    if group.rank == last:
        bad[0]["price"][5, 1] = np.nan
        bad[1]["user"][3] = 60
    kinds = (NumericsError, KeyRangeError if group.rank == last else ProcessError)
    words = (rf"rank {last}: the loss is nan: dense column 'price', row 5", r"key out of range[\s\S]*'user'[\s\S]*60")
    for columns, kind, match in zip(bad, kinds, words, strict=True):
        before = fixed.tensors_of(trainer)
        batches = [Batch.from_columns(fixed.schema_of(HOTNESS), columns)]
        batches += [fixed.own_batch(group, step) for step in range(10)]  # the host hears of it some steps later
        with pytest.raises(kind, match=match):
            _train(trainer, batches)
        after = fixed.tensors_of(trainer)
        assert all(torch.equal(after[name], part) for name, part in before.items())
        assert trainer.step == 6
    trainer.train_step(fixed.own_batch(group, 7))
    trainer.settle()
    assert trainer.step == 7
    changed = fixed.tensors_of(trainer)
    assert not all(torch.equal(changed[name], part) for name, part in before.items())


def overflows_are_those_of_all(folder):
    """A dynamic loss scale is halved in all processes alike, by replays as by steps from Python."""
    group, found = Group.world(), []
    for graph in (True, False):
        given = on_gpu(cuda_graph=graph, precision="fp16", clip_grad_norm=0.3)
        trainer = fixed.make_trainer(group, given, fixed.schema_of(HOTNESS))
        trainer.fix_sizes(8 * group.size)
        scale = trainer.stepper.loss_scale
        scale.value = 2.0**24
        losses = [float(trainer.train_step(fixed.own_batch(group, step))) for step in range(30)]
        trainer.settle()
        counted = trainer.stepper.optimizer.param_groups[0]["step"]
        found.append([losses, scale.state(), scale.num_skipped, counted])
        tensors = fixed.tensors_of(trainer)
        if graph:
            recorded = tensors
            assert trainer.stepper.captured.num_replays > 15  # none before one has moved
    assert found[0] == found[1]
    assert all(torch.equal(one, tensors[name]) for name, one in recorded.items())
    assert scale.num_skipped > 0
    every = group.gather_data(found[0][1:])
    assert all(one == every[0] for one in every)


def _train(trainer, batches):
    for batch in batches:
        trainer.train_step(batch)


def fused_layers(group):
    """Layers that tell of their gradients early, tables of every sharding, and vectors pooled over rows of others."""
    rows, hotness = [4000, 3000, 50, 70, 900], [40, 7, 1, 3, 1]
    plan = {"c0": "row", "c1": "column", "c2": "replicated", "c3": "replicated", "c4": "table"}
    kinds = [{"kind": "multi_hot", "hotness": hot} if hot > 1 else {} for hot in hotness]
    columns = [{"name": f"c{i}", "num_ids": one, **kinds[i]} for i, one in enumerate(rows)]
    dense = [{"name": f"x{i}"} for i in range(13)]
    schema = vv.Schema(labels=[{"name": "y"}], dense=dense, categorical=columns)
    share, rng, batches = 256, np.random.default_rng(group.rank), []
    for _ in range(4):
        given = {f"x{i}": rng.normal(size=share).astype(np.float32) for i in range(13)}
        given["y"] = rng.integers(0, 2, share).astype(np.float32)
        for i, (one, hot) in enumerate(zip(rows, hotness, strict=True)):
            ids = rng.integers(0, one, share * hot)
            given[f"c{i}"] = ids if hot == 1 else list(ids.reshape(share, hot))
        batches.append(Batch.from_columns(schema, given))
    found = []
    for wire in ("bfloat16", "float32"):
        for changes in ({"cuda_graph": True, "peer_memory": True}, {"cuda_graph": False}, {"peer_memory": False}):
            solver = {"batch_size": share * group.size, "lr": 0.01, "device": "cuda", "precision": "bf16", "seed": 3}
            wires = {"wire_dtype": wire, "dense_wire_dtype": wire}
            model = vv.Model(vv.Solver.from_dict({**solver, **wires, "plan": plan, **changes}), schema)
            model.add(vv.Input(label="label", dense="dense", sparse="cats"))
            model.add(vv.DenseLayer("bottom", "MLP", bottom="dense", num_outputs=[64, 32]))
            model.add(vv.SparseEmbedding("emb", bottom="cats", dim=32))
            model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
            model.add(vv.DenseLayer("x0", "Concat", bottom=["bottom", "flat"]))
            model.add(vv.DenseLayer("cross", "MultiCross", bottom="x0", num_layers=3, projection_dim=64))
            top = {"num_outputs": [4096, 1024, 1], "activations": ["relu", "relu", "none"]}
            model.add(vv.DenseLayer("top", "MLP", bottom="cross", **top))
            model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["top", "label"]))
            model.compile(optimizer=AdaGrad(), embedding_optimizer=AdaGrad())
            trainer = model.trainer
            trainer.fix_sizes(share * group.size)
            losses = [float(trainer.train_step(batches[i % 4])) for i in range(12)]
            trainer.settle()
            step = trainer.stepper
            assert len([one for one in step.exchange.buckets if one.parameters]) > 1
            assert len(step.exchange._proven) >= 3 * 2 + 2  # the cross layers' matrices, and the large ones of the top
            weights = {name: one.detach().clone() for name, one in step.parameters.items()}
            for emb in step.collections.values():
                weights |= {f"table {name}": emb.export_table(name).weight.cpu() for name in emb.tables}
            found.append((losses, weights, trainer.cuda_graph))
            del model, trainer, step, emb
            gc.collect()
        graph, eager, over_nccl = found[-3:]
        assert graph[2].startswith("replayed"), graph[2]
        assert eager[2].startswith("eager"), eager[2]
        for other in (eager, over_nccl):
            assert graph[0] == other[0]
            differ = [name for name, one in graph[1].items() if not torch.equal(one, other[1][name])]
            assert not differ, (wire, differ)


def what_prevents_it(folder):
    group = Group.world()
    free = fixed.fit(folder, group, "unsaid", on_gpu(epochs=1))
    assert "custom module" in free.cuda_graph  # the tests' module, without cuda_graph=True
    with pytest.raises(ConfigError, match=r"solver.cuda_graph[\s\S]*bags of 'seen'"):
        fixed.fit(folder, group, "unsaid", on_gpu(cuda_graph=True))
    trainer = fixed.make_trainer(group, on_gpu(cuda_graph=True), fixed.schema_of(HOTNESS))
    with pytest.raises(ConfigError, match=r"trainer.fix_sizes was not called"):
        trainer.train_step(fixed.own_batch(group, 0))


def everything(folder, run):
    fused_layers(Group.world())
    recorded_equals_eager(folder)
    bad_batches(folder)
    overflows_are_those_of_all(folder)
    what_prevents_it(folder)
    requests_and_resumes(folder, run)


@pytest.mark.parametrize("size", SIZES)
def test_recorded_steps_of_a_group(size, tmp_path):
    fixed.make_data(tmp_path)
    processes.run(size, everything, tmp_path, tmp_path / "run", backend="nccl")

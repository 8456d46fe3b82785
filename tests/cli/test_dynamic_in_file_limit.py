"""A dynamic table larger than the memory that the operating system allows: train, stop, resume, evaluate."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import viviane as vv
from viviane.data import write_dataset

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from memory_limit import can_limit, run_limited

ROWS, DIM, LIMIT = 900_000, 128, 1 << 30
TABLE_BYTES = ROWS * DIM * 4 * 3  # Adam


def config(folder, memory):
    dynamic = {} if memory is None else {"dynamic": {"memory": memory}}
    nodes = [
        {"node": "Input", "label": "click", "sparse": "cats"},
        {"node": "SparseEmbedding", "name": "emb", "bottom": "cats", "dim": DIM, **dynamic},
        {"node": "DenseLayer", "type": "Reshape", "name": "flat", "bottom": ["emb"], "params": {"leading_dim": DIM}},
        {"node": "DenseLayer", "type": "MLP", "name": "score", "bottom": ["flat"], "params": {"num_outputs": [1]}},
        {"node": "DenseLayer", "type": "BinaryCrossEntropyLoss", "name": "loss", "bottom": ["score", "click"]},
    ]
    return {
        "data": {"train": str(folder / "data")},
        "solver": {"device": "cpu", "batch_size": 8192, "embedding_folder": str(folder), "async_checkpoint": False},
        "model": {"nodes": nodes},
        "optimizer": {"type": "adam"},
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_limit(), reason="this process may not make control groups")
def test_a_table_larger_than_memory_trains_to_the_same_bits(tmp_path):
    assert TABLE_BYTES > 1.25 * LIMIT
    schema = vv.Schema(labels=[{"name": "click"}], categorical=[{"name": "user", "num_ids": None}])
    random = np.random.default_rng(0)
    users = random.permutation(ROWS).astype(np.int64) * 10**12 - 10**17
    again = random.choice(users[: ROWS // 2], ROWS // 10)
    users = np.concatenate([users, again])
    write_dataset(tmp_path / "data", schema, [{"click": (users % 2).astype(np.float32), "user": users}])
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    viviane = [sys.executable, "-m", "viviane"]
    for name, memory in (("file", "file"), ("memory", None)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config(tmp_path, memory)))
        limit = LIMIT if memory else 16 << 30
        train = [*viviane, "train", str(tmp_path / f"{name}.json"), "--run-folder", str(tmp_path / name)]
        for words in (
            [*train, "--set", "solver.max_steps=60"],
            [*train, "--resume", "--set", "solver.epochs=1"],
            [*viviane, "evaluate", str(tmp_path / name / "model"), str(tmp_path / "data")],
        ):
            done = run_limited(words, limit, env=env, timeout_s=900)
            assert done.code == 0, done.output[-3000:]
    ours, theirs = (max((tmp_path / name / "checkpoints").glob("step-*")) for name in ("file", "memory"))
    files = sorted(one.name for one in (theirs / "tables").iterdir())
    assert files == sorted(one.name for one in (ours / "tables").iterdir())
    for file in files:
        mine, other = load_file(ours / "tables" / file), load_file(theirs / "tables" / file)
        assert mine.keys() == other.keys()
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []

"""Training over several processes or GPUs against one: equality of results, and rows a second.

    torchrun --nproc-per-node 2 benchmarks/many_processes.py check            the checks of tests/training/test_group.py
    torchrun --nproc-per-node 2 benchmarks/many_processes.py recorded         those of test_captured_group_cuda.py; GPUs
    torchrun --nproc-per-node 2 benchmarks/many_processes.py speed [ROWS]     rows a second; ROWS of each of 26 tables
    python benchmarks/many_processes.py speed                                 the same in one process

On GPUs where torch sees any, with NCCL; on a CPU otherwise. Exit code 0 and one JSON line from rank 0. `speed` times
a step whose sizes are exchanged, one whose sizes were said, and on GPUs
one that is recorded, in fp32 and in bf16.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from viviane.batch import Batch
from viviane.config import AdaGrad, Solver
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.parallel import join_processes
from viviane.schema import Schema

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("training", "parallel")]

_ROWS, _TABLES, _DIM = 16_384, 26, 32
_TABLE_ROWS = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
_STEPS, _WARM_UP = 50, 10


def check(device: str) -> dict[str, object]:
    """Run the tests' checks of equality on this device; raises where one fails."""
    import group_model
    import test_group

    group = join_processes(device)
    folder = Path(group.from_first(tempfile.mkdtemp))
    group.from_first(lambda: group_model.make_data(folder))
    original = group_model.settings

    def settings(**changes: object) -> Solver:
        return original(**{"device": device, **changes})

    group_model.settings = test_group.settings = settings
    test_group.train_alike(folder, group)
    test_group.metrics_alike(folder, group)
    test_group.auc_alike(group)
    test_group.frozen_parts(group)
    test_group.fixed_rows_alike(group)
    if device == "cpu":  # the words of the guard differ on a GPU, which looks at the input after backward
        test_group.one_nan_stops_all(group)
    test_group.resumed_bit_by_bit(folder, group, folder / "run")
    return {"check": "passed", "processes": group.size, "device": device}


def recorded(device: str) -> dict[str, object]:
    """Run the checks of recorded steps; raises where one fails."""
    import test_captured_group_cuda
    import test_fixed_sizes_of_fit

    group = join_processes(device)
    folder = Path(group.from_first(tempfile.mkdtemp))
    group.from_first(lambda: test_fixed_sizes_of_fit.make_data(folder))
    start = time.perf_counter()
    test_captured_group_cuda.everything(folder, folder / "run")
    return {"recorded": "passed", "processes": group.size, "seconds": round(time.perf_counter() - start, 1)}


def speed(device: str) -> dict[str, object]:
    """Time steps on batches that wait in memory, in each way that this machine has."""
    ways: dict[str, dict[str, Any]] = {
        "exchanged": {"cuda_graph": False}, "said": {"cuda_graph": False},
        "deduplicated": {"cuda_graph": False, "deduplicate_ids": True},
    }  # fmt: skip
    if device == "cuda":
        bits16 = {"precision": "bf16", "wire_dtype": "bfloat16"}
        ways |= {"recorded": {}, "recorded bf16": bits16}
        ways["recorded bf16, dense sums too"] = {**bits16, "dense_wire_dtype": "bfloat16"}
    found = {
        name: _speed(device, says=name not in ("exchanged", "deduplicated"), **changes)
        for name, changes in ways.items()
    }
    return {"processes": join_processes(device).size, "device": device, **found}


def _speed(device: str, *, says: bool, **changes: Any) -> dict[str, object]:
    group = join_processes(device)
    columns = [{"name": f"c{i}", "num_ids": _TABLE_ROWS} for i in range(_TABLES)]
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x", "dim": 13}], categorical=columns)
    model = Model(Solver(batch_size=_ROWS, device=device, lr=0.01, **changes), schema)
    model.add(Input(label="label", dense="dense", sparse="cats"))
    model.add(SparseEmbedding("emb", bottom="cats", dim=_DIM))
    model.add(DenseLayer("flat", "Reshape", bottom="emb", leading_dim=_TABLES * _DIM))
    model.add(DenseLayer("all", "Concat", bottom=["flat", "dense"]))
    model.add(DenseLayer("logit", "MLP", bottom="all", num_outputs=[512, 256, 1], act_type="relu"))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile(optimizer=AdaGrad())
    rows = _ROWS // group.size
    rng = torch.Generator().manual_seed(group.rank)
    batches = []
    for _ in range(8):
        ids = (torch.rand(rows, _TABLES, generator=rng) ** 3 * _TABLE_ROWS).to(torch.int32)
        data = {f"c{i}": ids[:, i].numpy() for i in range(_TABLES)}
        data["x"] = torch.randn(rows, 13, generator=rng).numpy()
        data["y"] = torch.randint(0, 2, (rows,), generator=rng).float().numpy()
        batches.append(Batch.from_columns(schema, data).to(model.trainer.device))
    if says:
        model.trainer.fix_sizes(_ROWS)
    for i in range(_WARM_UP + _STEPS):
        if i == _WARM_UP:
            _wait(device)
            start = time.perf_counter()
        model.trainer.train_step(batches[i % len(batches)])
    _wait(device)
    seconds = time.perf_counter() - start
    rate = _STEPS * rows * group.size / seconds
    return {
        "rows_per_s": round(rate), "ms": round(1e3 * seconds / _STEPS, 3), "cuda_graph": model.trainer.cuda_graph,
    }  # fmt: skip


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    result = {"check": check, "recorded": recorded, "speed": speed}[sys.argv[1] if len(sys.argv) > 1 else "check"](kind)
    if join_processes(kind).rank == 0:
        print(json.dumps(result))

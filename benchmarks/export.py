"""Latency of exported models on one CPU thread, beside the module they were made from, in turns: batch in, scores out.

python benchmarks/export.py [--small] [--forms torch-export,onnx,torchscript,aoti]

A DLRM of 26 one-hot columns and 13 dense numbers; every runner gets the same tensors, made before, and no form checks
keys, since the eager module does that itself.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

import viviane as vv
from record import record
from viviane.batch import Batch, Layout
from viviane.training.evaluation import evaluating

ROWS = (1, 64, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--forms", default="torch-export,onnx,torchscript,aoti")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, dim, turns = (100, 8, 3) if arguments.small else (20_000, 64, 15)
    schema = vv.Schema(
        labels=[{"name": "click"}],
        dense=[{"name": f"d{i}"} for i in range(13)],
        categorical=[{"name": f"c{i}", "num_ids": rows} for i in range(26)],
    )
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DLRM(dim=dim, bottom_mlp=[512, 256, dim], top_mlp=[512, 256]))
    model.compile()
    forms = arguments.forms.split(",")
    with tempfile.TemporaryDirectory() as folder:
        vv.export(model, forms, Path(folder) / "e")
        artifacts = {name: vv.export.load(Path(folder) / "e", name, threads=1) for name in forms}
        for size in ROWS:
            measure(model, artifacts, schema, size, rows, turns, {"dim": dim, "rows": rows, "batch": size})


def measure(model, artifacts, schema, size, num_rows, turns, shape) -> None:
    draw = torch.Generator().manual_seed(size)
    ids = torch.randint(3, num_rows, (size, 26), generator=draw)
    dense = torch.randn(size, 13, generator=draw)
    batch = Batch(Layout.of(schema), torch.zeros(size, 0), dense, ids)
    calls: dict[str, Callable[[], object]] = {
        name: lambda one=one: one.run({"dense": dense, "one_hot": ids}) for name, one in artifacts.items()
    }
    module, objective = model.module, model.trainer.objective
    with evaluating(module):
        calls["eager"] = lambda: objective.predictions(module(batch), size)
        times = in_turns(calls, turns, max(2, 60 // size))
    for name in artifacts:
        low, middle, high = times[name]
        record(
            bench="export", case=f"DLRM, {name}, {size} rows, one thread", metric="latency", value=middle, unit="us",
            better="lower", peer="the module in eager mode", peer_value=times["eager"][1], spread=(low, high),
            shape=shape,
        )  # fmt: skip


def in_turns(calls: dict[str, Callable[[], object]], turns: int, repeats: int) -> dict[str, tuple[float, float, float]]:
    """Return the 20th, 50th and 80th percentile of the time of one call, in microseconds; the calls take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            start = perf_counter()
            for _ in range(repeats):
                call()
            if turn:  # the first one warms up
                found[name].append((perf_counter() - start) / repeats * 1e6)
    percentiles = {}
    for name, own in found.items():
        own.sort()
        percentiles[name] = (own[len(own) // 5], own[len(own) // 2], own[len(own) * 4 // 5])
    return percentiles


if __name__ == "__main__":
    main()

"""A training step of each reference model on the CPU, against hand-written PyTorch and DeepCTR-Torch.

All train the same network on the same batches in memory with Adam; the PyTorch peer keeps its tables in one
`nn.Embedding(sparse=True)` per column with `SparseAdam`, or in dense ones with `Adam`, whichever is the faster.
Steps alternate in short rounds, of a quarter of a second where steps are short, and the figure is the median round, in
processor time of the one thread, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import viviane as vv
import zoo_peers
from record import record
from viviane.batch import Batch, Layout

Step = Callable[[], object]
_ROUND_MS = 250


def schema_of(case: zoo_peers.Case, rows: int) -> vv.Schema:
    """One-hot columns of `rows` ids each, or a history with its target."""
    categorical: list[dict[str, Any]] = [{"name": f"c{n}", "num_ids": rows} for n in range(case.columns)]
    if case.history:
        categorical = [
            {"name": "history", "num_ids": rows, "kind": "sequence", "max_length": case.history, "vocabulary": "item"},
            {"name": "item", "num_ids": rows, "vocabulary": "item"},
        ]
    return vv.Schema(
        labels=[{"name": f"y{n}"} for n in range(case.labels)],
        dense=[{"name": f"x{n}"} for n in range(case.dense)],
        categorical=categorical,
    )


def make_batch(case: zoo_peers.Case, schema: vv.Schema, rows: int, size: int, seed: int) -> Batch:
    """Ids by a power law, whole histories."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> torch.Tensor:
        u = torch.rand(count, generator=generator, dtype=torch.float64)
        top = float(rows - 3) ** -0.1
        return ((((top - 1) * u + 1).pow(-10).long() + 2).clamp_(3, rows - 1)).to(torch.int32)

    columns = 1 if case.history else case.columns
    bags = {}
    if case.history:
        offsets = torch.arange(0, (size + 1) * case.history, case.history, dtype=torch.int32)
        bags = {"history": vv.batch.Bag(ids(size * case.history), offsets)}
    return Batch(
        Layout.of(schema),
        labels=(torch.rand(size, case.labels, generator=generator) < 0.25).float(),
        dense=torch.rand(size, case.dense, generator=generator),
        one_hot=torch.stack([ids(size) for _ in range(columns)], 1),
        bags=bags,
    )


def our_steps(case: zoo_peers.Case, schema: vv.Schema, batches: list[Batch]) -> list[Step]:
    model = vv.Model(vv.Solver(lr=1e-3, device="cpu", num_threads=1), schema)
    model.add(case.recipe)
    model.compile(vv.Adam())
    return [lambda one=one: model.trainer.train_step(one) for one in batches]


def milliseconds(steps: list[Step]) -> float:
    start = time.process_time()
    for step in steps:
        step()
    return (time.process_time() - start) / len(steps) * 1e3


def compare(case: zoo_peers.Case, rows: int, size: int, rounds: int) -> None:
    schema = schema_of(case, rows)
    batches = [make_batch(case, schema, rows, size, seed) for seed in range(4)]
    ways: dict[str, list[Step]] = {"viviane": our_steps(case, schema, batches)}
    for sparse in (True, False):
        name = "PyTorch, sparse gradients" if sparse else "PyTorch, dense gradients"
        ways[name] = zoo_peers.plain_steps(case, rows, batches, sparse=sparse)
    deep = zoo_peers.deepctr_steps(case, rows, batches)
    if deep is not None:
        ways["DeepCTR-Torch"] = deep
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, steps in ways.items():
        milliseconds(steps)
        ways[name] = steps * max(1, round(_ROUND_MS / len(steps) / milliseconds(steps)))
    for _ in range(rounds):
        for name, steps in ways.items():
            times[name].append(milliseconds(steps))
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{case.name}: " + ", ".join(f"{name} {value:.2f} ms" for name, value in median.items()), flush=True)
    shape = {"rows": rows, "columns": case.columns, "history": case.history, "batch": size}
    plain = min((name for name in median if name.startswith("PyTorch")), key=lambda name: median[name])
    for peer in (plain, *(["DeepCTR-Torch"] if "DeepCTR-Torch" in median else [])):
        pairs = [b / a for a, b in zip(times["viviane"], times[peer], strict=True)]
        quantiles = statistics.quantiles(pairs, n=5)
        record(
            bench="zoo_cpu", case=f"{case.name}, batch {size}, tables of {rows:,} rows",
            metric=f"times as fast as {peer.split(',')[0]}", value=median[peer] / median["viviane"], unit="x",
            better="higher", goal=2.0 if case.heavy else 1.0, peer=f"{peer}, ms a step", peer_value=median[peer],
            spread=(quantiles[0], quantiles[3]), shape=shape,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small tables, two rounds")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=20_000, help="of each table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in zoo_peers.CASES:
        if options.only in case.name:
            compare(case, *((1_000, 256, 2) if options.small else (options.rows, options.batch, 5)))


if __name__ == "__main__":
    main()

"""Embedding tables: lookup alone, and lookup + backward + update, beside the peers that are installed.

    python benchmarks/embedding.py [--small] [--dims 16,128] [--sizes 2048,16384] [--only ours,fbgemm,...]

26 one-hot tables of Criteo-Kaggle's sizes, capped at a million rows from dim 128 on; ids from a power law of exponent
1.1; a fixed gradient. One object at a time fits into memory, so that the objects of a case run one after another,
several rounds each; on a noisy machine the fastest round is the fair one, and it is the figure for all of them.

    ours         viviane.EmbeddingCollection
    operations   key_rows, gather_rows, update_rows: what the collection is made of
    torch        nn.EmbeddingBag(sparse=True) for each table and a sparse optimizer of torch
    fbgemm       SplitTableBatchedEmbeddingBagsCodegen in host memory (no Adam on the CPU)
    torchrec     FusedEmbeddingBagCollection
    keras        keras.layers.Embedding for each table and a Keras optimizer, on TensorFlow

A peer gets its ids as it wants them, prepared outside the clock.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch

from embedding_peers import PEERS, Case, Steps, power_law_ids
from record import record
from train import CRITEO_KAGGLE

RULES = ("sgd", "adagrad", "row_wise_adagrad", "adam")
LR = 0.01
NUM_BATCHES = 8


def milliseconds(step: Callable[[int], object], rounds: int) -> tuple[float, float, float]:
    """Return the fastest, the median and the 80th percentile round, per batch; the first round warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for i in range(NUM_BATCHES):
            step(i)
        times.append((time.perf_counter() - start) * 1e3 / NUM_BATCHES)
    kept = sorted(times[1:])
    return kept[0], statistics.median(kept), kept[int(0.8 * (len(kept) - 1))]


def measure(name: str, case: Case, rounds: int) -> dict[str, tuple[float, float, float]] | None:
    """Return the times of one object: "lookup" and "update", or None where it is not there."""
    try:
        steps: Steps | None = PEERS[name](case)
    except ImportError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None
    if steps is None:
        print(f"{name} has no {case.rule} on the CPU", flush=True)
        return None
    times = {"update": milliseconds(steps.train, rounds)}
    if case.rule == "sgd":
        times["lookup"] = milliseconds(steps.forward, rounds)
    del steps
    gc.collect()
    return times


def compare(case: Case, names: list[str], rounds: int) -> None:
    found = {name: times for name in names if (times := measure(name, case, rounds)) is not None}
    for kind in ("lookup", "update"):
        cells = {name: times[kind] for name, times in found.items() if kind in times}
        what = "lookup" if kind == "lookup" else f"lookup + backward + {case.rule}"
        print(what, case.size, case.dim, {name: [round(t, 3) for t in times] for name, times in cells.items()})
        peers = {name: times[0] for name, times in cells.items() if name not in ("ours", "operations")}
        best = min(peers, key=lambda name: peers[name], default=None)
        for name in ("ours", "operations"):
            if name in cells:
                low, _, high = cells[name]
                record(
                    bench="embedding", case=f"{what}, {name}", metric="time", value=low, unit="ms", better="lower",
                    goal=None if best is None else peers[best], peer=best,
                    peer_value=None if best is None else peers[best], spread=(low, high),
                    shape={"batch": case.size, "dim": case.dim, "tables": len(case.sizes), "rows": sum(case.sizes),
                           "threads": torch.get_num_threads()},
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tables of at most 20,000 rows, few rounds")
    parser.add_argument("--dims", default="16,128")
    parser.add_argument("--sizes", default="2048,16384")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--only", default=",".join(PEERS), help="the objects to measure")
    options = parser.parse_args()
    for dim in map(int, options.dims.split(",")):
        cap = 20_000 if options.small else 1_000_000 if dim >= 128 else max(CRITEO_KAGGLE)
        tables = [min(rows, cap) for rows in CRITEO_KAGGLE]
        for size in map(int, options.sizes.split(",")):
            for rule in options.rules.split(","):
                ids = power_law_ids(tables, size, NUM_BATCHES)
                gradient = torch.randn(size, len(tables) * dim) * 1e-3
                case = Case(dim, size, rule, LR, tables, ids, gradient)
                compare(case, options.only.split(","), rounds=3 if options.small else 15)


if __name__ == "__main__":
    main()

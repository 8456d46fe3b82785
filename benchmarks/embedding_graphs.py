"""Whole iterations of an embedding collection on a GPU: from Python, and recorded in a CUDA graph.

    python benchmarks/embedding_graphs.py [--small]

An iteration is lookup, backward from a gradient of the output, and step. Recorded ones also copy the next batch's keys
into the static tensor. Times are between events, the host running as it does in training; median of many, over several
batches in turn. The graph's sizes are those of `embedding_gpu.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from embedding_gpu import DIM, NUM_BATCHES, SMALL, Setting, criteo, keep_times, ten_tables
from viviane.batch import Batch, Layout
from viviane.config import SGD, Adam
from viviane.config.optimizers import AnyOptimizer
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig

ROUNDS = 20 if SMALL else 200
WARM_UPS = 5


def collection(setting: Setting, rule: AnyOptimizer) -> EmbeddingCollection:
    tables = [TableConfig(name=f"t{i}", num_rows=rows, dim=DIM) for i, rows in enumerate(setting.rows)]
    features = [FeatureConfig(name=f"f{i}", table=table.name) for i, table in enumerate(tables)]
    return EmbeddingCollection(tables, features, rule, device="cuda")


def table_keys(setting: Setting) -> list[Tensor]:
    bases = torch.tensor(setting.rows, device="cuda").cumsum(0) - torch.tensor(setting.rows, device="cuda")
    return [(batch - bases).to(torch.int32).contiguous() for batch in setting.batches]


def between_events(run: Callable[[int], object]) -> np.ndarray:
    """Return the microseconds of each of many runs that follow one another."""
    for i in range(WARM_UPS):
        run(i % NUM_BATCHES)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    events[0].record()
    for i in range(ROUNDS):
        run(i % NUM_BATCHES)
        events[i + 1].record()
    torch.cuda.synchronize()
    return np.array([a.elapsed_time(b) * 1e3 for a, b in pairwise(events)])


def measure(setting: Setting, name: str, rule: AnyOptimizer, goal: float | None, peer: str | None) -> None:
    emb, batches = collection(setting, rule), table_keys(setting)
    static, gradient = batches[0].clone(), torch.randn(setting.size, setting.width, device="cuda")
    layout = Layout((), (), tuple(emb.features), ())
    none = torch.empty(setting.size, 0, device="cuda")
    lr = torch.full((), 1e-6, dtype=torch.float64, device="cuda")

    def iterate(keys: Tensor, rate: float | Tensor) -> None:
        emb(Batch(layout, none, none, keys)).flat.backward(gradient)
        emb.step(rate)

    def eager(i: int) -> None:
        iterate(batches[i], 1e-6)

    times = between_events(eager)
    keep_times(setting.name, f"iteration from Python, {name}", times, setting.shape)
    iterate(static, lr)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate(static, lr)

    def replay(i: int) -> None:
        static.copy_(batches[i])
        graph.replay()

    times = between_events(replay)
    others = {} if peer is None else {"peer_published": peer}
    keep_times(setting.name, f"iteration in a CUDA graph, {name}", times, setting.shape, goal=goal, **others)
    emb.check()


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    fbgemm = "FBGEMM 1.6.0, H200, another run: {} us, lookup and backward + update"
    measure(ten_tables(1.05), "SGD", SGD(), 215 + 330, fbgemm.format("528 + 549"))
    torch.cuda.empty_cache()
    measure(ten_tables(1.05), "Adam", Adam(), 215 + 580, fbgemm.format("531 + 946"))
    torch.cuda.empty_cache()
    small = criteo(1.1, 2048)
    measure(small, "SGD", SGD(), None, None)
    return 0


if __name__ == "__main__":
    sys.exit(main())

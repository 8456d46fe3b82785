"""A GPU's cache over host memory: whole iterations of tables that are larger than the cache.

    python benchmarks/tiers_gpu.py [--small] [--only dlrm|SGD]

Ten tables x 128 columns, 1,048,570 ids, lookup, backward and update, by the clock in a loop without waiting, once every
row has been written to host memory and the cache holds what it will; the same with all rows in the GPU's memory beside
it. An iteration is run from Python, or its lookup, backward and update are one CUDA graph, as in training: slots are
planned before each replay. With Adam a row brings its state. Ids are numbered by frequency, as the ETL does, or spread
over their table. Of uniform ids nearly all rows are missing. The floor is the time of missing rows at 31 GB/s each way,
which sorted rows reached in an earlier measurement: where rows are long, the cache comes below it.

The training step of one-hot DLRM, captured in a CUDA graph, with 10% of all rows on the GPU, beside the same step with
all of them there; every batch is another one, announced ahead as `fit` does.

Peer figures: FBGEMM 1.6.0, UVM caching, on an H200, measured with the same sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from announcing import AHEAD, Announcements
from embedding_gpu import CAP, CRITEO
from record import record
from tiers import by_frequency, spread
from train_gpu import DIM as DLRM_DIM
from train_gpu import dlrm, draw, schema_of
from viviane.batch import Batch, Layout
from viviane.config import SGD, Adam
from viviane.embedding import CachedStorage, CacheSettings, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.training.graph.static_batch import StaticBatch
from viviane.training.look_ahead import LookAhead
from viviane.training.tier_counts import tier_counts

SMALL = "--small" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLES, DIM, IDS = 10, (16 if SMALL else 128), (500 if SMALL else 104_857)
# How often a row is used counts half after 512 batches: fewer batches before the time counts are no steady state.
WARM, REPEATS, ROUNDS = (3, 4, 2) if SMALL else (1500, 40, 5)
DLRM_ROWS, DLRM_LAW = (512 if SMALL else 65_536), 1.1
DLRM_WARM, DLRM_STEPS, DLRM_ROUND = (8, 8, 4) if SMALL else (200, 140, 20)
PART_ROWS = 65_536
LINK = 31e9
FBGEMM = "FBGEMM 1.6.0 UVM caching, H200: {} ms"


def collection(rows: int, optimizer: Any, share: float | None) -> EmbeddingCollection:
    """Return ten tables, with a cache for a share of their rows."""
    tables = [TableConfig(name=f"t{i}", num_rows=rows, dim=DIM) for i in range(TABLES)]
    features = [FeatureConfig(name=f"f{i}", table=f"t{i}") for i in range(TABLES)]
    cache = None
    if share is not None:
        whole = EmbeddingCollection(
            [tables[0].model_copy(update={"num_rows": 1})], features[:1], optimizer, device=DEVICE
        )
        row_bytes = sum(part.numel() * 4 for name, part in whole.state_dict().items() if not name.endswith("step"))
        cache = CacheSettings(tables={one.name: int(rows * share) * (row_bytes + 22) for one in tables})
    return EmbeddingCollection(tables, features, optimizer, device=DEVICE, cache=cache)


def iterations(emb: EmbeddingCollection, draw: Callable[[], torch.Tensor], count: int) -> float:
    """Train on batches that are announced ahead, and return the seconds of one.

    The first batches are announced before the time counts: each iteration announces one.
    """
    host = [draw() for _ in range(count + AHEAD)]
    batches = [{f"f{i}": keys[i] for i in range(TABLES)} for keys in host]
    there = [{name: keys.to(DEVICE) for name, keys in batch.items()} for batch in batches]
    gradient = torch.full((IDS, TABLES * DIM), 1e-3, device=DEVICE)
    queue = Announcements(lambda i: emb.looks_ahead and emb.resolve_ahead(there[i], batches[i]))
    queue.up_to(AHEAD)
    _wait()
    start = time.perf_counter()
    for i in range(count):
        queue.up_to(i + 1 + AHEAD)
        emb(there[i]).flat.backward(gradient)
        emb.step(lr=0.01)
        emb.forget_ahead(there[i])
        queue.trained(i)
    _wait()
    seconds = time.perf_counter() - start
    emb.end_ahead()
    return seconds / count


class CapturedIteration:
    """Lookup, backward and update in a CUDA graph, which is replayed for one batch after another as `fit` does.

    Args:
        emb: the tables; every batch that they are called with has the shape of `like`.
        like: an example.
    """

    def __init__(self, emb: EmbeddingCollection, like: Batch) -> None:
        self._static = StaticBatch(like, [emb])
        gradient = torch.full((like.size, TABLES * DIM), 1e-3, device=DEVICE)
        rate = torch.full((), 0.01, dtype=torch.float64, device=DEVICE)
        self._graph = torch.cuda.CUDAGraph()
        self._words = torch.zeros(self._static.width, dtype=torch.int64, device=DEVICE)
        self._kept = gradient, rate  # the graph reads their memory

        def run() -> None:
            with self._static.looked_up():
                emb(self._static.batch).flat.backward(gradient)
                emb.step(rate)

        run()
        with torch.cuda.graph(self._graph):
            self._static.fill(self._words)
            run()

    def __call__(self, batch: Batch) -> None:
        sources = self._static.sources(batch)
        words = torch.tensor(self._static.words(sources), dtype=torch.int64).pin_memory()
        self._words.copy_(words, non_blocking=True)
        self._graph.replay()
        sources.release()


def replays(emb: EmbeddingCollection, draw: Callable[[], torch.Tensor], count: int, run: CapturedIteration) -> float:
    """Do what `iterations` does with replays of a CUDA graph."""
    batches = [batch_of(emb, draw()) for _ in range(count + AHEAD)]
    queue = Announcements(lambda i: emb.resolve_ahead(batches[i]))
    queue.up_to(AHEAD)
    _wait()
    start = time.perf_counter()
    for i in range(count):
        queue.up_to(i + 1 + AHEAD)
        run(batches[i])
        emb.forget_ahead(batches[i])
        queue.trained(i)
    _wait()
    seconds = time.perf_counter() - start
    emb.end_ahead()
    emb.check()
    return seconds / count


def batch_of(emb: EmbeddingCollection, keys: torch.Tensor) -> Batch:
    """Return keys (TABLES, IDS) as a batch on the device."""
    none = torch.empty(IDS, 0, device=DEVICE)
    return Batch(Layout((), (), tuple(emb.features), ()), none, none, keys.T.contiguous().to(DEVICE))


def fill(emb: EmbeddingCollection) -> None:
    """Write all rows to host memory, as they are after an epoch: first values and first pages are no steady state."""
    for storage in emb.all_storages():
        assert isinstance(storage, CachedStorage)
        if not storage.plans_on_host:  # all of its rows are in host memory from the beginning
            continue
        for name, layout in storage.layouts.items():
            rows = storage.num_rows(name)
            for first in range(0, rows, PART_ROWS):
                storage.write_rows(name, first, layout.zeros(min(PART_ROWS, rows - first)))


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def missing_bytes(emb: EmbeddingCollection) -> int:
    """Return the bytes that tiers have given so far."""
    storages = [one for one in emb.all_storages() if isinstance(one, CachedStorage)]
    return sum(counts.bytes_read for one in storages for name, counts in one.tier_stats().items() if name != "memory")


def measure(case: str, rows: int, optimizer: Any, law: str, goal: float | None, peer: float | None) -> None:
    """Record an iteration with a cache of 10% of the rows, and its ratio to one with all rows on the device."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw() -> torch.Tensor:
        uniform = torch.rand(TABLES, IDS, dtype=torch.float64, device=DEVICE, generator=generator)
        if law == "uniform":
            return (uniform * rows).to(torch.int32).cpu()
        ids = by_frequency(uniform, rows).to(torch.int64)
        return (spread(ids, rows) if law.endswith("spread") else ids).to(torch.int32).cpu()

    shape = {"tables": TABLES, "rows": rows, "dim": DIM, "ids": TABLES * IDS, "cache": 0.1, "law": law}
    emb = collection(rows, optimizer, 0.1)
    fill(emb)
    for _ in range(WARM // 20 + 1):  # a part at a time: drawn batches take memory
        iterations(emb, draw, min(WARM, 20))
    before = missing_bytes(emb)
    rounds = [iterations(emb, draw, REPEATS) * 1e3 for _ in range(ROUNDS)]
    floor = (missing_bytes(emb) - before) / (ROUNDS * (REPEATS + AHEAD)) / LINK
    captured = None
    if DEVICE == "cuda":
        run = CapturedIteration(emb, batch_of(emb, draw()))
        captured = [replays(emb, draw, REPEATS, run) * 1e3 for _ in range(ROUNDS + 1)][1:]
        del run
    del emb
    whole = collection(rows, optimizer, None)
    iterations(whole, draw, 3)
    alone = float(np.median([iterations(whole, draw, REPEATS) * 1e3 for _ in range(ROUNDS)]))
    low, cached, high = (round(float(value), 3) for value in np.percentile(rounds, [20, 50, 80]))
    record(
        bench="tiers_gpu", case=case, metric="iteration", value=cached, unit="ms", spread=(low, high), better="lower",
        goal=goal, floor=round(floor * 1e3, 3), shape=shape,
        peer_published=None if peer is None else FBGEMM.format(peer),
    )  # fmt: skip
    if captured is not None:
        low, replayed, high = (round(float(value), 3) for value in np.percentile(captured, [20, 50, 80]))
        record(
            bench="tiers_gpu", case=case, metric="iteration in a CUDA graph", value=replayed, unit="ms",
            spread=(low, high), better="lower", goal=goal, floor=round(floor * 1e3, 3), shape=shape,
            peer_published=None if peer is None else FBGEMM.format(peer),
        )  # fmt: skip
    record(
        bench="tiers_gpu", case=case, metric="speed, of all rows on the device", value=round(alone / cached, 3),
        unit="x", better="higher", shape=shape,
    )  # fmt: skip


def dlrm_step(share: float | None) -> NDArray[np.float64]:
    """Train DLRM with a share of its rows on the GPU, on batches announced ahead; return milliseconds by round."""
    rows = [min(one, CAP) for one in CRITEO]
    schema = schema_of(rows, [1] * len(rows))
    memory = {} if share is None else {"embedding_memory": int(share * sum(rows)) * (4 * DLRM_DIM + 22)}
    trainer = dlrm(schema, **memory).trainer
    ahead = LookAhead(trainer.module)
    assert ahead.is_needed == (share is not None)
    batches = [draw(schema, [1] * len(rows), DLRM_ROWS, DLRM_LAW, i) for i in range(DLRM_WARM + DLRM_STEPS)]
    queue = Announcements(lambda i: ahead.is_needed and ahead.announce(batches[i]))
    marks = []
    for i, batch in enumerate(batches):
        queue.up_to(min(i + 1 + AHEAD, len(batches)))
        trainer.train_step(batch)
        ahead.forget(batch)
        queue.trained(i)
        if i >= DLRM_WARM - 1 and (i - DLRM_WARM + 1) % DLRM_ROUND == 0:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    trainer.settle()
    _wait()
    print("   ", trainer.cuda_graph, tier_counts(trainer.module).get("tiers"))
    return np.array([one.elapsed_time(other) for one, other in pairwise(marks)]) / DLRM_ROUND


def measure_dlrm() -> None:
    """Record DLRM's step with 10% of the rows on the GPU, and its speed beside that with all of them."""
    whole, rounds = float(np.median(dlrm_step(None))), dlrm_step(0.1)
    low, cached, high = (float(value) for value in np.percentile(rounds, [20, 50, 80]))
    shape = {"batch": DLRM_ROWS, "rows": sum(min(one, CAP) for one in CRITEO), "dim": DLRM_DIM, "cache": 0.1}
    case = f"one-hot DLRM, SGD, bf16, power law {DLRM_LAW}"
    record(bench="tiers_gpu", case=case, metric="step in a CUDA graph", value=cached, unit="ms", spread=(low, high),
           better="lower", peer="all rows on the device", peer_value=whole, shape=shape)  # fmt: skip
    record(bench="tiers_gpu", case=case, metric="speed, of all rows on the device", value=round(whole / cached, 3),
           unit="x", better="higher", goal=0.9, shape=shape)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a GPU's cache over host memory.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that it runs, keeps no figures")
    parser.add_argument(
        "--only", default="", choices=["", "dlrm", "SGD"], help="only the training step of DLRM, or SGD"
    )
    arguments = parser.parse_args()
    if DEVICE == "cpu" and not arguments.small:
        print("no GPU here: nothing measured")
        return 0
    large, medium = (20_000, 10_000) if arguments.small else (6_000_000, 2_000_000)
    if arguments.only in ("", "dlrm") and DEVICE == "cuda":
        measure_dlrm()
    if arguments.only == "dlrm":
        return 0
    measure("SGD", large, SGD(), "power law 1.05", 2.2, 8.6)
    if arguments.only == "SGD":
        return 0
    measure("Adam", medium, Adam(), "power law 1.05", 7.0, 21.4)
    measure("SGD, spread ids", large, SGD(), "power law 1.05, spread", None, None)
    measure("Adam, spread ids", medium, Adam(), "power law 1.05, spread", None, None)
    measure("SGD, uniform ids", large, SGD(), "uniform", None, None)
    return 0


if __name__ == "__main__":
    sys.exit(main())

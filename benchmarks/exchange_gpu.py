"""Embedding tables over several GPUs: the exchange, whole iterations, and whole training steps, in CUDA graphs.

    torchrun --nproc-per-node 4 benchmarks/exchange_gpu.py [--small] [--profile FILE]
    python benchmarks/exchange_gpu.py                                    on one GPU

Batches wait on the device; keys are copied into the graph's before each replay. "collectives alone" are the same
exchanges of the same sizes, with nothing between them; its floor is bytes by the all-to-all bandwidth measured in the
same run. Whole steps have the dense part of `dense_gpu.py` behind the lookup, and plain SGD for it. Rank 0 records.

--profile writes rank 0's kernels of one replay of each case, with their microseconds, one JSON object a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dense_gpu import Dense
from embedding_gpu import CAP, CRITEO, DIM, MLPERF_HOTNESS, MLPERF_ROWS, SMALL, law
from record import record
from viviane.batch import Bag, Batch, Layout
from viviane.config import SGD, AdaGrad
from viviane.config.optimizers import AnyOptimizer
from viviane.embedding import FeatureConfig, TableConfig
from viviane.nn import binary_cross_entropy
from viviane.parallel import Group, ShardedCollection, ShardingPlan, TablePlan, join_processes
from viviane.training.step.dense_exchange import DenseExchange

NUM_BATCHES = 2 if SMALL else 4
REPEATS = 8 if SMALL else 40
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def sizes_of(rows: Sequence[int]) -> list[int]:
    return [min(one, CAP) for one in rows]


def make_plan(rows: Sequence[int], hotness: Sequence[int], n: int, replicated: int) -> ShardingPlan:
    """Replicate tables of up to so many rows, cut columns of those that one process has no time for, spread by ids."""
    load = [0.0] * n
    share = sum(count for one, count in zip(rows, hotness, strict=True) if one > replicated) / n
    plans: dict[int, TablePlan] = {}
    for i in sorted(range(len(rows)), key=lambda i: (-hotness[i], -rows[i])):
        if rows[i] <= replicated:
            plans[i] = TablePlan(table=f"t{i}", kind="replicated")
            continue
        parts = min(n, max(1, round(hotness[i] / share))) if hotness[i] > 1 else 1
        ranks = sorted(range(n), key=lambda r: load[r])[:parts]
        for rank in ranks:
            load[rank] += hotness[i] / parts
        plans[i] = TablePlan(table=f"t{i}", kind="column" if parts > 1 else "table", ranks=ranks)
    return ShardingPlan(world_size=n, tables=[plans[i] for i in range(len(rows))])


class Case:
    """One set of tables over the group, its batches, and what is timed of it.

    Args:
        name: of the figures.
        rows, hotness: of each table.
        size: rows of the global batch.
        exponent: of the power law of ids; 0: uniform.
        rule: of the tables.
        replicated: tables of up to so many rows are replicated.
    """

    def __init__(
        self, group: Group, name: str, rows: Sequence[int], hotness: Sequence[int], size: int, exponent: float,
        rule: AnyOptimizer, replicated: int, wire: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.group, self.name, self.size = group, name, size // group.size
        tables = [TableConfig(name=f"t{i}", num_rows=one, dim=DIM) for i, one in enumerate(rows)]
        features = [FeatureConfig(name=f"f{i}", table=f"t{i}") for i in range(len(rows))]
        plan = make_plan(rows, hotness, group.size, replicated)
        self.emb = ShardedCollection(
            tables, features, rule, plan=plan, group=group, device=DEVICE, wire_dtype=wire, output_dtype=torch.bfloat16
        )
        self.emb.fix_sizes(self.size, {f"f{i}": one for i, one in enumerate(hotness) if one > 1})
        self.shape = {
            "gpus": group.size, "global batch": size, "dim": DIM, "tables": len(rows), "rows": sum(rows),
            "exponent": exponent, "replicated up to": replicated, "wire": str(wire).removeprefix("torch."),
        }  # fmt: skip
        self.batches = [self._draw(rows, hotness, exponent, seed) for seed in range(NUM_BATCHES)]
        self.static = Batch(
            self.batches[0].layout, *(torch.empty(self.size, 0, device=DEVICE) for _ in range(2)),
            self.batches[0].one_hot.clone(),
            {name: Bag(bag.values.clone(), bag.offsets) for name, bag in self.batches[0].bags.items()},
        )  # fmt: skip
        self.gradient = torch.randn(self.size, self.emb.width, device=DEVICE).to(torch.bfloat16)
        self.lr = torch.full((), 1e-6, dtype=torch.float64, device=DEVICE)

    def _draw(self, rows: Sequence[int], hotness: Sequence[int], exponent: float, seed: int) -> Batch:
        rng = torch.Generator(DEVICE).manual_seed(1000 * self.group.rank + seed)
        singles, bags, names, bag_names = [], {}, [], []
        for i, (num_rows, count) in enumerate(zip(rows, hotness, strict=True)):
            u = torch.rand(self.size * count, generator=rng, device=DEVICE, dtype=torch.float64)
            ids = law(u, num_rows, exponent).to(torch.int32)
            if count == 1:
                singles.append(ids)
                names.append(f"f{i}")
            else:
                bags[f"f{i}"] = Bag(ids, torch.arange(self.size + 1, device=DEVICE) * count)
                bag_names.append(f"f{i}")
        none = torch.empty(self.size, 0, device=DEVICE)
        return Batch(Layout((), (), tuple(names), tuple(bag_names)), none, none, torch.stack(singles, 1), bags)

    def next(self, i: int) -> None:
        """Copy a batch's keys into those that graphs read."""
        batch = self.batches[i % NUM_BATCHES]
        self.static.one_hot.copy_(batch.one_hot)
        targets = [bag.values for bag in self.static.bags.values()]
        if targets:
            torch._foreach_copy_(targets, [bag.values for bag in batch.bags.values()])

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.emb(self.static).flat

    def iterate(self) -> None:
        self.emb(self.static).flat.backward(self.gradient)
        self.emb.step(self.lr)

    def keep(self, metric: str, times: np.ndarray, **others: Any) -> float:
        low, median, high = (float(one) for one in np.percentile(times, [20, 50, 80]))
        if self.group.rank == 0:
            record(
                bench="exchange_gpu", case=self.name, metric=metric, value=median, unit="us", better="lower",
                spread=(low, high), shape=self.shape, **others,
            )  # fmt: skip
        return median


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Record a step in a CUDA graph, after it ran on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def time_us(run: Callable[[int], object]) -> np.ndarray:
    """Return the microseconds of each run, the device never waiting for the host."""
    for i in range(5):
        run(i)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    torch.cuda._sleep(4_000_000)
    events[0].record()
    for i in range(REPEATS):
        run(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return np.array([a.elapsed_time(b) * 1e3 for a, b in pairwise(events)])


def replayed(case: Case, step: Callable[[], object], profile: Path | None = None, what: str = "") -> np.ndarray:
    graph = captured(step)

    def run(i: int) -> None:
        case.next(i)
        graph.replay()

    times = time_us(run)
    if profile is not None and case.group.rank == 0:
        list_kernels(profile, f"{case.name}, {what}", graph)
    elif profile is not None:
        graph.replay()
        torch.cuda.synchronize()
    return times


def list_kernels(path: Path, name: str, graph: torch.cuda.CUDAGraph) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    with path.open("a", encoding="utf-8") as file:
        for event in sorted(found.events(), key=lambda one: one.time_range.start):
            if event.device_type == torch.autograd.DeviceType.CUDA:
                line = {"case": name, "at": event.time_range.start, "us": event.device_time, "kernel": event.name[:90]}
                file.write(json.dumps(line) + "\n")


def collectives(case: Case) -> tuple[Callable[[], object], int]:
    """Return the exchanges of an iteration, with nothing between them, and the bytes of an all-to-all that leave."""
    route, group, size = next(iter(case.emb.exchanges.static.values())), case.group, case.size
    layout, n, rank = route.layout, group.size, group.rank
    ids = torch.zeros(size * sum(layout.counts[:n]), dtype=layout.dtype, device=DEVICE)
    vectors = torch.zeros(n * size * layout.widths[rank], dtype=route.wire, device=DEVICE)
    blocks = torch.zeros(size * sum(layout.widths), dtype=route.wire, device=DEVICE)
    sums = [torch.zeros(part.storage.null_row * DIM, dtype=route.wire, device=DEVICE) for part in layout.local]

    def run() -> None:
        group.all_to_all(ids, [size * one for one in layout.counts[:n]], [size * layout.counts[rank]] * n)
        there, back = [size * layout.widths[rank]] * n, [size * one for one in layout.widths]
        group.all_to_all(vectors, there, back)
        group.all_to_all(blocks, back, there)
        for one in sums:
            group.all_reduce(one)

    leaving = (ids.nbytes + 2 * vectors.nbytes) * (n - 1) // n
    return run, leaving


def bandwidth(group: Group) -> float:
    """Return bytes a microsecond that leave one GPU in a large all-to-all."""
    count = (1 << (20 if SMALL else 25)) // group.size * group.size
    given = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
    splits = [count // group.size] * group.size
    graph = captured(lambda: group.all_to_all(given, splits, splits))
    return given.nbytes * (group.size - 1) / group.size / float(np.median(time_us(lambda _: graph.replay())))


def measure(case: Case, speed: float, profile: Path | None) -> None:
    """Record one set of tables."""
    case.iterate()
    case.keep("iteration from Python", time_us(lambda i: (case.next(i), case.iterate())))
    forward = case.keep("forward, in a graph", replayed(case, case.forward))
    whole = case.keep("iteration, in a graph", replayed(case, case.iterate, profile, "iteration"))
    case.keep("backward + update: the difference", np.array([whole - forward]))
    if case.group.size > 1:
        run, leaving = collectives(case)
        case.keep("collectives alone, in a graph", replayed(case, run), floor=leaving / speed)
    case.emb.check()


def measure_step(case: Case, kind: str, goal: float, profile: Path | None) -> None:
    """Record a whole training step: lookup, dense part, loss, backward, sums over the processes, updates."""
    torch.manual_seed(0)
    group, size = case.group, case.size
    dense = Dense(kind, plain=False).to(DEVICE)
    numbers = torch.randn(size, 13, device=DEVICE)
    labels = (torch.rand(size, 1, device=DEVICE) < 0.3).float()

    def loss_of() -> Tensor:
        begun = case.emb.begin(case.static)
        with torch.autocast("cuda", torch.bfloat16):
            x = dense.bottom(numbers)  # beside the exchange
            flat = case.emb(begun).flat
            z = dense.middle(x, flat.view(size, -1, DIM)) if kind == "DLRM" else dense.middle(torch.cat([x, flat], 1))
            logits = dense.top(z)
        return binary_cross_entropy(logits, labels) / group.size

    with torch.no_grad():
        loss_of()
    parameters: list[nn.Parameter] = list(dense.parameters())
    exchange = DenseExchange(parameters, group, torch.bfloat16)
    exchange.is_static, exchange.watches = True, False
    optimizer = torch.optim.SGD(parameters, 1e-6, fused=True)

    def step() -> None:
        loss = loss_of()
        exchange.begin(loss)
        loss.backward()
        exchange.finish()
        optimizer.step()
        case.emb.step(case.lr)
        dense.zero_grad(set_to_none=True)

    case.keep(f"whole step, {kind}, in a graph", replayed(case, step, profile, f"step of {kind}"), goal=goal)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure tables over several GPUs.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that they run, keeps no figures")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="append the kernels of each case")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    group = join_processes("cuda")
    torch.cuda.set_device(DEVICE)
    speed = bandwidth(group) if group.size > 1 else 1.0
    if group.rank == 0 and group.size > 1:
        shape = {"gpus": group.size, "bytes": 1 << 26}
        record(
            bench="exchange_gpu", case="all-to-all", metric="bytes that leave a GPU", value=speed / 1e3, unit="GB/s",
            better="higher", shape=shape,
        )  # fmt: skip
    ones = [1] * len(CRITEO)
    for replicated in (0, 20_000) if group.size > 1 else (0,):
        name = f"26 one-hot tables, power law 1.1, {'small ones replicated' if replicated else 'all sharded'}"
        case = Case(group, name, sizes_of(CRITEO), ones, 2048 if SMALL else 65536, 1.1, SGD(), replicated)
        measure(case, speed, arguments.profile)
        if replicated or group.size == 1:
            measure_step(case, "DLRM", 1000 if group.size == 4 else 2800, arguments.profile)
        del case
        gc.collect()  # graphs and autograd's functions refer to each other
        torch.cuda.empty_cache()
    for size, replicated, goal in ((32768, 0, 3000), (32768, 40_000, 3000), (512 * group.size, 0, 600)):
        kinds = "small ones replicated" if replicated else "all sharded"
        name = f"MLPerf's 26 multi-hot tables, uniform, {kinds}, {size // group.size} a GPU"
        rule = AdaGrad()
        case = Case(group, name, sizes_of(MLPERF_ROWS), MLPERF_HOTNESS, 512 if SMALL else size, 0, rule, replicated)
        measure(case, speed, arguments.profile)
        measure_step(case, "DCN v2", goal, arguments.profile)
        del case
        gc.collect()  # graphs and autograd's functions refer to each other
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

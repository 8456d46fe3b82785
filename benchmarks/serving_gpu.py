"""Inference sessions on a GPU: latency from ids on the host to scores on the host, and bulk throughput.

    python benchmarks/serving_gpu.py [--small] [--only TEXT] [--kernels]

Latency is that of `session.predict(batch)`, one request after another from one thread, with the batch in page-locked
memory; "device" is the captured forward pass with both copies, one replay after another. The peer is the same network
in plain PyTorch, bf16 autocast, captured in a CUDA graph with both copies, and waited for.
Bulk rates are those of batches on the GPU, as in MLPerf Inference, and of batches in page-locked memory.
--kernels prints the kernels of a forward pass of the smallest batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import viviane as vv
from dense_gpu import BOTTOM, DIM, NUM_DENSE, TOP, plain_mlp
from embedding_gpu import MLPERF_HOTNESS
from record import record
from train_gpu import dcn_v2, dlrm, draw, schema_of
from viviane.batch import Batch
from viviane.serving import InferenceSession

SMALL = "--small" in sys.argv
ROWS = 4_000 if SMALL else 40_000
"""Of each of 26 tables: 0.5 GB in all, which no cache of the GPU holds."""
GOALS_US = {1: 30.0, 32: 30.0, 2048: 60.0, 8192: 150.0, 65_536: 850.0}
P99_GOALS_US = {1: 50.0, 32: 50.0}
PUBLISHED = {1: "NVIDIA's DLRM example, A100, device only: 140 us", 2048: "NVIDIA's DLRM example, A100: 240 us"}
MLPERF = "MLPerf Inference v5.1, H200, a GPU: {} M pairs/s"


class Plain(nn.Module):
    """DLRM as a PyTorch user writes it, with one table for all features."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, DIM)
        self.bottom, self.top = plain_mlp(NUM_DENSE, BOTTOM, True), plain_mlp(DIM + 27 * 26 // 2, TOP, False)
        lower = torch.tril_indices(27, 27, -1)
        self.register_buffer("lower", lower[0] * 27 + lower[1])
        self.register_buffer("starts", torch.arange(26) * ROWS)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        z = torch.cat([x.unsqueeze(1), self.table(ids + self.starts).to(x.dtype)], 1)
        pairs = torch.bmm(z, z.transpose(1, 2)).view(len(x), -1)[:, self.lower]
        scores: Tensor = self.top(torch.cat([x, pairs], 1)).float().sigmoid()
        return scores


def plain_requests(size: int, batch: Batch, module: Plain) -> Callable[[], object]:
    """Return what answers a request with a hand-made graph."""
    dense, ids = torch.zeros(size, NUM_DENSE, device="cuda"), torch.zeros(size, 26, dtype=torch.int32, device="cuda")
    host = torch.zeros(size, 1, pin_memory=True)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        dense.copy_(batch.dense, non_blocking=True)
        ids.copy_(batch.one_hot, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            host.copy_(module(dense, ids), non_blocking=True)

    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()

    def ask() -> object:
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        return host.numpy().copy()

    return ask


def latencies(ask: Callable[[], object], seconds: float) -> np.ndarray:
    """Return the microseconds of single requests, one after another."""
    for _ in range(20):
        ask()
    found = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 50:
        start = time.perf_counter()
        ask()
        found.append((time.perf_counter() - start) * 1e6)
    return np.array(found)


def device_us(session: InferenceSession, size: int) -> float:
    """Return the microseconds of the device for a replay of a captured size."""
    instance = session._instances._free.get()
    session._instances._free.put(instance)
    slot = instance._slots[0]
    if size not in slot._graphs:
        return float("nan")
    with torch.cuda.stream(slot._lane.stream):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
        torch.cuda._sleep(4_000_000)
        events[0].record()
        for event in events[1:]:
            slot._graphs[size].launch()
            event.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]))


def host_batch(session: InferenceSession, like: Batch) -> Batch:
    batch = session.new_batch(like.size)
    batch.dense.copy_(like.dense)
    batch.one_hot.copy_(like.one_hot)
    return batch


def measure_latency(folder: Path, kernels: bool) -> None:
    schema = schema_of([ROWS] * 26, [1] * 26)
    dlrm(schema).save(folder / "dlrm")
    session = InferenceSession(folder / "dlrm", device="cuda", precision="bf16", instances=1)
    assert session.execution == "cuda graphs"
    plain = Plain(26 * ROWS).cuda()
    shape = {"rows": ROWS, "dim": DIM, "tables": 26}
    for size, goal in GOALS_US.items():
        batch = host_batch(session, draw(schema, [1] * 26, size, 1.05, size).to("cpu"))
        seconds = 0.2 if SMALL else 3.0
        ours = latencies(lambda b=batch: session.predict(b), seconds)
        theirs = latencies(plain_requests(size, batch, plain), seconds / 3)
        p50, p99 = np.percentile(ours, [50, 99])
        inside = device_us(session, size)
        print(
            f"batch {size}: device {inside:.1f} us, p50 {p50:.1f}, p99 {p99:.1f}, plain {np.median(theirs):.1f}",
            flush=True,
        )
        case = f"one-hot DLRM, bf16, batch {size}"
        record(bench="serving_gpu", case=case, metric="ids on the host to scores on the host, p50", value=float(p50),
               unit="us", better="lower", goal=goal, peer="plain PyTorch in a CUDA graph",
               peer_value=float(np.median(theirs)), peer_published=PUBLISHED.get(size), shape=shape)  # fmt: skip
        record(bench="serving_gpu", case=case, metric="the same, p99", value=float(p99), unit="us", better="lower",
               goal=P99_GOALS_US.get(size), peer="plain PyTorch in a CUDA graph",
               peer_value=float(np.percentile(theirs, 99)), shape=shape)  # fmt: skip
        if np.isfinite(inside):
            record(bench="serving_gpu", case=case, metric="device, both copies included", value=inside, unit="us",
                   better="lower", shape=shape)  # fmt: skip
        if kernels and size in (1, 2048):
            print_kernels(lambda b=batch: session.predict(b))
    session.close()


def print_kernels(ask: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            ask()
    for event in sorted(profile.events(), key=lambda e: e.time_range.start)[-40:]:
        print(f"    {event.time_range.start:.1f} {event.device_time_total:.2f} us {event.name[:100]}")


def measure_bulk(folder: Path, size: int) -> None:
    """Rates of DLRM-DCNv2 with MLPerf's hotness, capped tables: batches from two threads, then from one."""
    rows = [max(100, min(40_000, ROWS))] * 26
    schema = schema_of(rows, MLPERF_HOTNESS, fixed=True)
    dcn_v2(schema, vv.SGD(), vv.SGD()).save(folder / "dcn")
    there = draw(schema, MLPERF_HOTNESS, size, 1.05, 1)
    there = Batch(there.layout, there.labels[:, :0], there.dense, there.one_hot, there.bags)
    here = there.to("cpu").pin_memory()
    shape: dict[str, Any] = {"batch": size, "hotness": sum(MLPERF_HOTNESS), "rows": rows[0]}
    for tables, form, goal, published in (
        ("model", "bf16", 13.1, "13.1 at 99.9 %"),
        ("int8", "8-bit tables", 20, None),
    ):
        session = InferenceSession(
            folder / "dcn", device="cuda", precision="bf16", table_dtype=tables, instances=2, max_batch_size=size
        )
        for place, batch in (("device", there), ("host", here)):
            for threads in (2, 1):
                rate = bulk_rate(session, batch, threads, 0.2 if SMALL else 2.0)
                record(bench="serving_gpu", case=f"DLRM-DCNv2, {form}, inputs on the {place}", metric="bulk rate",
                       value=rate, unit="M pairs/s", better="higher", goal=goal if place == "device" else None,
                       peer_published=MLPERF.format(published) if published and place == "device" else None,
                       shape={**shape, "threads": threads})  # fmt: skip
        session.close()


def bulk_rate(session: InferenceSession, batch: Batch, threads: int, seconds: float) -> float:
    """Return million rows a second of requests from some threads, each asking again when it has its answer."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: [session.predict(batch) for _ in range(3)], range(threads)))
        end = time.perf_counter() + seconds

        def ask(_: int) -> int:
            count = 0
            while time.perf_counter() < end:
                session.predict(batch)
                count += 1
            return count

        start = time.perf_counter()
        count = sum(pool.map(ask, range(threads)))
        return count * batch.size / (time.perf_counter() - start) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small tables, short runs")
    parser.add_argument("--only", default="", help="latency or bulk")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a forward pass")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("serving_gpu: no GPU here, nothing measured")
        return
    with TemporaryDirectory() as folder:
        if "latency".startswith(options.only):
            measure_latency(Path(folder), options.kernels)
        if "bulk".startswith(options.only):
            measure_bulk(Path(folder), 512 if SMALL else 65_536)


if __name__ == "__main__":
    main()

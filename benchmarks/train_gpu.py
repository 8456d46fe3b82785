"""Training DLRM and DLRM-DCNv2 on a GPU through `Model`, beside plain PyTorch.

    python benchmarks/train_gpu.py [--small] [--only TEXT] [--alone] [--files] [--trace] [--timeline FILE]

Batches lie on the device already, and say so, as those of `fit` do (`Batch.ready_after`); what is timed is
`model.trainer.train_step`, a step after another, between two events, so with the host's time where the host is slower.
Both train the same network in bf16 with SGD. The peer has all tables in one `nn.EmbeddingBag(sparse=True)` with offsets
added in advance, its dense part compiled, its optimizer fused.
--files times steps on batches from files besides; see from_files.py.
--trace prints the kernels of a step and their times, by kind and by name, and the gaps between them; with --timeline
FILE the kernels of six steps in order go there, one JSON list a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import from_files
import viviane as vv
from dense_gpu import BOTTOM, CROSSES, NUM_DENSE, RANK, TOP, Dense
from embedding_gpu import CAP, CRITEO, DIM, MLPERF_HOTNESS, MLPERF_ROWS, SMALL, law
from record import record
from viviane.batch import Bag, Batch, Layout
from viviane.config.optimizers import AnyOptimizer
from viviane.training.profiling.device_time import device_time
from viviane.training.profiling.timeline import Timeline
from viviane.training.profiling.trace import profile_steps
from viviane.zoo import DLRM

NUM_BATCHES = 4
TRACED = 6
"""Steps of a trace: kinds and gaps are those of the four between the first and the last."""
ROUNDS, STEPS = (2, 4) if SMALL else (7, 24)
LR = 0.01
ALONE, FILES = "--alone" in sys.argv, "--files" in sys.argv
BESIDE_TABLES = 16_000_000_000  # bytes of a step at batch 16,384: vectors, their gradients, dense layers
PEER = "plain PyTorch, one merged table, torch.compile"
DLRM_PUBLISHED = "NVIDIA's DLRM example, 1 A100: 4.02 M samples/s; HugeCTR, 8 H100: 8.09 M samples/s a GPU"
DCN_PUBLISHED = "HugeCTR, 8 H200, 55296 rows, AdaGrad, Criteo's ids (MLPerf Training 4.1): 2.12 M samples/s a GPU"


def keep_from_files(
    trainer: vv.Trainer, rows: Sequence[int], hotness: Sequence[int], exponent: float, case: str, shape: dict[str, Any],
    there: np.ndarray,
) -> None:  # fmt: skip
    """Record steps on batches from files beside those on batches that lie on the device."""
    schema = schema_of(rows, hotness, fixed=True)
    with TemporaryDirectory() as folder:
        batches = [draw(schema, hotness, shape["batch"], exponent, seed) for seed in range(NUM_BATCHES)]
        data = from_files.write(Path(folder) / "rows", schema, batches)
        times = from_files.time_ms(trainer, data, shape["batch"])
    keep(case, "step in a CUDA graph, from files", times, shape,
         peer="batches on the device", peer_value=float(np.median(there)))  # fmt: skip


class Traced(NamedTuple):
    """Whether to print the kernels of a step, and the file that they are appended to in order."""

    wanted: bool
    timeline: Path | None


class Plain(nn.Module):
    """DLRM as a PyTorch user writes it, with one table for all features."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, device="cuda", _weight=uniform(rows))
        self.dense = Dense("DLRM", plain=True).cuda()
        self.compiled = torch.compile(self.dense)

    def forward(self, dense: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        vectors = self.table(rows.view(-1), self.offsets(rows)).view(len(rows), -1, DIM)
        loss: Tensor = self.compiled(dense, vectors, labels)
        return loss

    def offsets(self, rows: Tensor) -> Tensor:
        if not hasattr(self, "_offsets") or len(self._offsets) != rows.numel():
            self._offsets = torch.arange(rows.numel(), device="cuda")
        return self._offsets


def uniform(rows: int) -> Tensor:
    return torch.empty(rows, DIM, device="cuda").uniform_(-0.01, 0.01)


def schema_of(rows: Sequence[int], hotness: Sequence[int], fixed: bool = False) -> vv.Schema:
    """Return the schema of so many one-hot and multi-hot columns; `fixed` says that bags have one length."""
    columns: list[dict[str, Any]] = []
    for i, (size, hot) in enumerate(zip(rows, hotness, strict=True)):
        kind = {} if hot == 1 else {"kind": "multi_hot", "hotness" if fixed else "max_length": hot}
        columns.append({"name": f"c{i}", "num_ids": size, **kind})
    dense = [{"name": f"i{i}"} for i in range(NUM_DENSE)]
    return vv.Schema(labels=[{"name": "click"}], dense=dense, categorical=columns)


def draw(schema: vv.Schema, hotness: Sequence[int], size: int, exponent: float, seed: int) -> Batch:
    generator = torch.Generator("cuda").manual_seed(seed)
    singles, bags = [], {}
    for column, hot in zip(schema.categorical, hotness, strict=True):
        assert column.num_ids is not None
        u = torch.rand(size * hot, generator=generator, device="cuda", dtype=torch.float64)
        ids = law(u, column.num_ids, exponent).to(torch.int32)
        if hot == 1:
            singles.append(ids)
        else:
            bags[column.name] = Bag(ids, torch.arange(size + 1, device="cuda") * hot)
    dense = torch.rand(size, NUM_DENSE, generator=generator, device="cuda")
    labels = (torch.rand(size, 1, generator=generator, device="cuda") < 0.25).float()
    batch = Batch(Layout.of(schema), labels, dense, torch.stack(singles, 1), bags)
    there = torch.cuda.Event()
    there.record()
    return batch.ready_after(there)  # as a reader's batches, which are copied on a stream of their own


def solver_of(graph: bool = True, **settings: Any) -> vv.Solver:
    return vv.Solver.from_dict({"lr": LR, "device": "cuda", "precision": "bf16", "cuda_graph": graph, **settings})


def dlrm(
    schema: vv.Schema, graph: bool = True, statistics: Mapping[str, Any] | None = None, **settings: Any
) -> vv.Model:
    """Return the zoo's DLRM of MLPerf's sizes, compiled; the other settings are the solver's."""
    model = vv.Model(solver_of(graph, **settings), schema)
    model.add(DLRM(dim=DIM, bottom_mlp=BOTTOM[:-1], top_mlp=TOP[:-1]))
    model.compile(optimizer=vv.SGD(), statistics=statistics)
    return model


def dcn_v2(
    schema: vv.Schema, rule: AnyOptimizer, tables: AnyOptimizer, statistics: Mapping[str, Any] | None = None,
    **settings: Any,
) -> vv.Model:  # fmt: skip
    """Return DLRM-DCNv2 as MLPerf's benchmark has it, compiled; the other settings are the solver's."""
    model = vv.Model(solver_of(**settings), schema)
    model.add(vv.Input(label="label", dense="dense", sparse="cats"))
    model.add(vv.DenseLayer("bottom", "MLP", bottom="dense", num_outputs=list(BOTTOM)))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=DIM))
    model.add(vv.DenseLayer("emb_flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(vv.DenseLayer("x0", "Concat", bottom=["bottom", "emb_flat"]))
    model.add(vv.DenseLayer("cross", "MultiCross", bottom="x0", num_layers=CROSSES, projection_dim=RANK))
    acts = ["relu"] * (len(TOP) - 1) + ["none"]
    model.add(vv.DenseLayer("top", "MLP", bottom="cross", num_outputs=list(TOP), activations=acts))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["top", "label"]))
    model.compile(optimizer=rule, embedding_optimizer=tables, statistics=statistics)
    return model


def plain_step(rows: Sequence[int], batches: Sequence[Batch]) -> Callable[[int], object]:
    """Return a step of the peer; ids are rows of its one table, int64, prepared in advance."""
    bases = torch.tensor([0, *rows[:-1]], device="cuda").cumsum(0)
    model = Plain(sum(rows))
    given = [(b.dense, b.one_hot.long() + bases, b.labels) for b in batches]
    table = torch.optim.SGD(model.table.parameters(), lr=LR)
    dense = torch.optim.SGD(model.dense.parameters(), lr=LR, fused=True)

    def step(i: int) -> object:
        loss = model(*given[i % NUM_BATCHES])
        for optimizer in (table, dense):
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        table.step()
        dense.step()
        return loss

    return step


def time_ms(step: Callable[[int], object], warm_ups: int = 8) -> np.ndarray:
    """Return the milliseconds of a step, of each round of many."""
    for i in range(warm_ups):
        step(i)
    found = []
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for i in range(STEPS):
            step(i)
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / STEPS)
    return np.array(found)


def trace(step: Callable[[int], object], title: str = "", timeline: Path | None = None) -> None:
    """Print the kernels of a step, by time; append them in order to a file: stream, start and length in us, name."""
    numbers = count()
    with TemporaryDirectory() as spare:
        file = Path(spare) / "trace.json"
        profile_steps(lambda: step(next(numbers)), TRACED, file, torch.device("cuda"))
        found = Timeline.load(file)
    time = device_time(found)
    if time is not None:
        print(
            f"  a step under the profiler: {time.step_ms * 1e3:.0f} us; kernels run {time.running_ms * 1e3:.0f} us, of "
            f"which {time.overlap_ms * 1e3:.0f} on several streams; gaps {time.gap_ms * 1e3:.0f} us"
        )
        for kind in time.kinds:
            print(
                f"  {kind.ms * 1e3:8.1f} us, alone {kind.alone_ms * 1e3:8.1f} us, {kind.launches:5.1f} x  {kind.kind}"
            )
    for name, ms, times in found.kernels(24):
        print(f"  {ms * 1e3:8.1f} us {times:5.1f} x  {name[:90]}", flush=True)
    if timeline is not None:
        with timeline.open("a", encoding="utf-8") as lines:
            for one in found.work:
                at, us = one.start - found.work[0].start, one.stop - one.start
                lines.write(json.dumps([title, one.stream, round(at, 1), round(us, 1), one.name[:60]]) + "\n")


def keep(case: str, metric: str, times: np.ndarray, shape: dict[str, Any], **others: Any) -> None:
    low, median, high = (float(value) for value in np.percentile(times, [20, 50, 80]))
    record(bench="train_gpu", case=case, metric=metric, value=median, unit="ms", better="lower", spread=(low, high),
           shape=shape, **others)  # fmt: skip
    print(f"    {shape['batch'] / median / 1e3:.2f} M samples/s")


def measure_dlrm(size: int, exponent: float, goal: float | None, floor: float | None, traced: Traced) -> None:
    rows = [min(one, CAP) for one in CRITEO]
    size = min(size, 512) if SMALL else size
    schema = schema_of(rows, [1] * len(rows))
    batches = [draw(schema, [1] * len(rows), size, exponent, seed) for seed in range(NUM_BATCHES)]
    case = f"one-hot DLRM, SGD, bf16, {f'power law {exponent}' if exponent else 'uniform'}"
    shape = {"batch": size, "rows": sum(rows), "dim": DIM}
    others: dict[str, Any] = {"peer_published": DLRM_PUBLISHED} if size == 65536 else {}
    times = {}
    for graph in (True, False):
        model = dlrm(schema, graph)
        times[graph] = time_ms(lambda i, model=model: model.trainer.train_step(batches[i % NUM_BATCHES]))
        if graph:
            print("   ", model.trainer.cuda_graph)
        if graph and FILES:
            beside = {"batch": size, "rows": sum(rows), "dim": DIM}
            keep_from_files(model.trainer, rows, [1] * len(rows), exponent, case, beside, times[True])
        if traced.wanted and graph:
            trace(
                lambda i, model=model: model.trainer.train_step(batches[i % NUM_BATCHES]),
                f"{case}, {size}",
                traced.timeline,
            )
        del model
    if not ALONE:  # last: Python is slower in a process in which torch.compile has run
        others |= {"peer": PEER, "peer_value": float(np.median(time_ms(plain_step(rows, batches))))}
    keep(case, "step in a CUDA graph", times[True], shape, goal=goal, floor=floor, **others)
    keep(case, "step from Python", times[False], shape, goal=3.5 if size == 2048 else None, **others)
    torch.cuda.empty_cache()


def measure_precision(size: int, exponent: float, settings: dict[str, Any]) -> None:
    """Record DLRM's step in another precision, in a CUDA graph."""
    rows = [min(one, CAP) for one in CRITEO]
    size = min(size, 512) if SMALL else size
    schema = schema_of(rows, [1] * len(rows))
    batches = [draw(schema, [1] * len(rows), size, exponent, seed) for seed in range(NUM_BATCHES)]
    trainer = dlrm(schema, **settings).trainer
    times = time_ms(lambda i: trainer.train_step(batches[i % NUM_BATCHES]))
    print("   ", trainer.cuda_graph)
    case = f"one-hot DLRM, SGD, {settings['precision']}, power law {exponent}"
    keep(case, "step in a CUDA graph", times, {"batch": size, "rows": sum(rows), "dim": DIM})


def measure_dcn(size: int, exponent: float, goal: float | None, traced: Traced) -> None:
    rows = [min(one, CAP) if SMALL else one for one in MLPERF_ROWS]
    size = min(size, 128) if SMALL else size
    needed, free = 4 * DIM * sum(rows), torch.cuda.mem_get_info()[0]
    if needed + BESIDE_TABLES > free:
        print(f"DLRM-DCNv2 left out: its tables take {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")
        return
    schema = schema_of(rows, MLPERF_HOTNESS)
    batches = [draw(schema, MLPERF_HOTNESS, size, exponent, seed) for seed in range(NUM_BATCHES)]
    trainer = dcn_v2(schema, vv.AdaGrad(), vv.AdaGrad(row_wise=True)).trainer

    def run(i: int) -> object:
        return trainer.train_step(batches[i % NUM_BATCHES])

    times = time_ms(run)
    print("   ", trainer.cuda_graph)
    law_name = f"power law {exponent}" if exponent else "uniform"
    keep(f"DLRM-DCNv2, row-wise AdaGrad, bf16, {law_name}", "step in a CUDA graph", times,
         {"batch": size, "rows": sum(rows), "dim": DIM}, goal=goal, floor=None if exponent else 3.09,
         peer_published=f"TorchRec 1.6.1, H200, another run: 11.89 ms; {DCN_PUBLISHED}")  # fmt: skip
    if FILES:
        beside = {"batch": size, "rows": sum(rows), "dim": DIM}
        case = f"DLRM-DCNv2, row-wise AdaGrad, bf16, {law_name}"
        keep_from_files(trainer, rows, MLPERF_HOTNESS, exponent, case, beside, times)
    if traced.wanted:
        trace(run, f"DLRM-DCNv2, {law_name}, {size}", traced.timeline)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training on a GPU.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that they run, keeps no figures")
    parser.add_argument("--only", default="", help="cases whose name has one of these texts, as 65536,dcn")
    parser.add_argument("--alone", action="store_true", help="leave the peer out")
    parser.add_argument("--files", action="store_true", help="time steps on batches from files, too")
    parser.add_argument("--trace", action="store_true", help="print the kernels of a step")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="with --trace: append the kernels in order")
    chosen = parser.parse_args()
    traced = Traced(chosen.trace, chosen.timeline)
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    cases: dict[str, Callable[[], None]] = {}
    for size, goal, floor in ((65536, 2.8, 1.84), (8192, None, None), (2048, None, None)):
        for exponent in (1.1, 0.0):
            cases[f"dlrm {size} {exponent}"] = lambda s=size, e=exponent, g=goal, f=floor: measure_dlrm(
                s, e, g, f, traced
            )
    for settings in ({"precision": "fp32"}, {"precision": "tf32"}, {"precision": "fp16", "loss_scale": 1024.0}):
        cases[f"precision {settings['precision']}"] = lambda own=settings: measure_precision(65536, 1.1, own)
    for exponent in (0.0, 1.05):
        cases[f"dcn 16384 {exponent}"] = lambda e=exponent: measure_dcn(16384, e, 4.6, traced)
    for part in chosen.only.split(","):
        for name in [name for name in cases if part in name]:
            cases.pop(name)()
            gc.collect()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

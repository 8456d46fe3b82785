"""How long a checkpoint holds training up: written before the next step, or in a thread beside it.

One table with row-wise AdaGrad; steps of 2,048 rows with 26 ids each go on all the while. Training is held up by the
call of save, and by slower steps while one is in work. The goal is the time of a copy of the same bytes.

    python benchmarks/checkpoint.py [--device cuda] [--gigabytes 1] [--folder DIR] [--small]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from record import record
from viviane.batch import Batch, Layout
from viviane.config import AdaGrad
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.training import Progress
from viviane.training.checkpoint.store import CheckpointStore

DIM, BATCH, IDS = 64, 2048, 26


class Tables(nn.Module):
    """One table, looked up by 26 columns."""

    def __init__(self, num_rows: int, device: str) -> None:
        super().__init__()
        features = [FeatureConfig(name=f"c{i}", table="t") for i in range(IDS)]
        table = TableConfig(name="t", num_rows=num_rows, dim=DIM)
        self.tables = EmbeddingCollection([table], features, AdaGrad(row_wise=True), device=device)
        self.names = tuple(f"c{i}" for i in range(IDS))

    def step(self, ids: Tensor) -> None:
        """Train on a batch of ids (BATCH, IDS)."""
        nothing = torch.empty(len(ids), 0, device=ids.device)
        batch = Batch(Layout((), (), self.names, ()), nothing, nothing, ids, {})
        self.tables(batch).flat.sum().backward()
        self.tables.step(lr=0.01)


def wait(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def steps(model: Tables, batches: list[Tensor], device: str, until: float, least: int) -> list[float]:
    """Train for some time, and return the milliseconds of each step."""
    times: list[float] = []
    while perf_counter() < until or len(times) < least:
        start = perf_counter()
        model.step(batches[len(times) % len(batches)])
        wait(device)
        times.append(1e3 * (perf_counter() - start))
    return times


def measure(model: Tables, batches: list[Tensor], device: str, folder: Path, *, beside: bool) -> dict[str, float]:
    """Save while steps go on; returns milliseconds: of the call, of a step, in all."""
    store = CheckpointStore(folder, 1)
    stalls, during = [], []
    for turn in range(2):
        wait(device)
        start = perf_counter()
        store.save(model, None, Progress(step=turn + 1), beside=beside)
        wait(device)  # a GPU's next step waits for the copy
        stalls.append(1e3 * (perf_counter() - start))
        writer = store._writer._thread
        while beside and writer is not None and writer.is_alive():
            during += steps(model, batches, device, 0.0, 1)
        store.finish()
        whole = 1e3 * (perf_counter() - start)
    return {"stall": min(stalls), "step": statistics.median(during) if during else 0.0, "whole": whole}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    num_rows = int((0.02 if args.small else args.gigabytes) * 1e9) // (4 * DIM + 4)
    model = Tables(num_rows, args.device)
    batches = [torch.randint(0, num_rows, (BATCH, IDS), device=args.device) for _ in range(8)]
    alone = statistics.median(steps(model, batches, args.device, perf_counter() + 1.0, 30))
    source = model.tables.all_storages()[0].weight
    target = torch.empty(source.shape, pin_memory=args.device == "cuda").fill_(0)
    copies = []
    for _ in range(4):
        wait(args.device)
        start = perf_counter()
        target.copy_(source)
        wait(args.device)
        copies.append(1e3 * (perf_counter() - start))
    del target
    case = f"{num_rows * (4 * DIM + 4) / 1e9:.2g} GB, {args.device}, dim {DIM}, row-wise AdaGrad"
    shape = {"rows": num_rows, "dim": DIM, "batch": BATCH, "ids": IDS}
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        for beside in (False, True):
            found = measure(model, batches, args.device, folder / str(beside), beside=beside)
            way = "in a thread" if beside else "before the next step"
            record(bench="checkpoint", case=f"{case}, {way}", metric="training held up by a save", value=found["stall"],
                   unit="ms", better="lower", goal=min(copies) if beside else None, floor=None,
                   shape={**shape, "copy_of_the_rows_ms": round(min(copies), 1)})  # fmt: skip
            record(bench="checkpoint", case=f"{case}, {way}", metric="a save from call to end", value=found["whole"],
                   unit="ms", better="lower", shape=shape)  # fmt: skip
            if beside:
                record(bench="checkpoint", case=f"{case}, {way}", metric="a step while a save is in work",
                       value=found["step"], unit="ms", better="lower", floor=alone, shape=shape)  # fmt: skip
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

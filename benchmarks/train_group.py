"""Training DLRM and DLRM-DCNv2 over several GPUs through `Model`, each step one CUDA graph on every GPU.

    torchrun --nproc-per-node 4 benchmarks/train_group.py [--small] [--only TEXT,TEXT] [--trace] [--nccl] [--files]

The networks, tables and batches are those of train_gpu.py; every process draws its share of the global batch on its
GPU. The plan of the tables is the one that `compile` finds from the schema and how many ids the columns have. Vectors,
their gradients and dense gradients are exchanged in bf16. "share of one GPU's speed" is weak scaling: what one GPU
takes for the same rows alone, timed in the same run before the processes join, divided by what the step takes of all.
--nccl leaves the exchange to NCCL, where steps otherwise write into the memory of the other GPUs.
--files times steps on batches from files besides; see from_files.py.
--trace prints rank 0's kernels of a step and their times; with --timeline FILE the kernels of six steps in order go
there, one JSON list a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import from_files
import viviane as vv
from embedding_gpu import CAP, CRITEO, DIM, MLPERF_HOTNESS, MLPERF_ROWS, SMALL
from record import record
from train_gpu import (
    DCN_PUBLISHED,
    DLRM_PUBLISHED,
    NUM_BATCHES,
    TRACED,
    dcn_v2,
    dlrm,
    draw,
    schema_of,
    time_ms,
    trace,
)
from viviane.config.optimizers import AnyOptimizer
from viviane.data import Dataset
from viviane.parallel import Group, join_processes

ALONE = "--one-gpu"
ROWS_OF_WEAK_SCALING = 512 if SMALL else 65_536
TORCHREC = {
    ("dlrm", 4, 65_536): "TorchRec 1.6.1, 4 H200, another run: 7.05 ms",
    ("dcn", 4, 32_768): "TorchRec 1.6.1, 4 H200, another run: 9.46 ms; HugeCTR's best published, 4 H200 NVL: 3.96 ms",
}
PUBLISHED = {"dlrm": DLRM_PUBLISHED, "dcn": DCN_PUBLISHED}
GOALS = {
    ("dlrm", 4, 65_536): (1.0, 0.59),
    ("dcn", 4, 32_768): (3.0, 1.96),
    ("dcn", 4, 55_296): (4.9, 3.165),
    ("dcn", 4, 2_048): (0.6, 0.335),
    ("dcn", 2, 32_768): (5.8, 3.74),
}
"""Goal and floor in ms, by model, GPUs and global batch; floors are those of uniform ids."""


def spread_settings(rows: int) -> dict[str, Any]:
    """What a solver says for a global batch over several GPUs."""
    return {"batch_size": rows, "wire_dtype": "bfloat16", "dense_wire_dtype": "bfloat16"}


def one_gpu() -> None:
    """Print the milliseconds of DLRM's step on one GPU, for weak scaling."""
    rows = [min(one, CAP) for one in CRITEO]
    schema, hotness = schema_of(rows, [1] * len(rows)), [1] * len(rows)
    batches = [draw(schema, hotness, ROWS_OF_WEAK_SCALING, 1.1, seed) for seed in range(NUM_BATCHES)]
    model = dlrm(schema, graph=True)
    print(json.dumps(float(np.median(time_ms(lambda i: model.trainer.train_step(batches[i % NUM_BATCHES]))))))


def time_one_gpu() -> float:
    """Run `one_gpu` in a process that knows of no others."""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    alone = {name: value for name, value in alone.items() if not name.startswith("TORCHELASTIC")}
    command = [sys.executable, str(Path(__file__)), ALONE, *(["--small"] if SMALL else [])]
    done = subprocess.run(command, env=alone, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


class Case:
    """A network, its global batch, and what was found of it.

    Args:
        group: the processes.
        model: "dlrm" or "dcn".
        size: rows of the global batch.
        exponent: of the power law of ids; 0: uniform.
        nccl: whether to exchange over NCCL.
    """

    def __init__(self, group: Group, model: str, size: int, exponent: float, *, nccl: bool) -> None:
        self.peer_memory = False if nccl else "auto"
        self.group, self.model, self.size, self.exponent = group, model, size, exponent
        one_hot = model == "dlrm"
        self.rows = [min(one, CAP) if one_hot or SMALL else one for one in (CRITEO if one_hot else MLPERF_ROWS)]
        self.hotness = [1] * len(self.rows) if one_hot else list(MLPERF_HOTNESS)
        law_name = f"power law {exponent}" if exponent else "uniform"
        kind = "one-hot DLRM, SGD" if one_hot else "DLRM-DCNv2, AdaGrad"
        self.name = f"{kind}, bf16, {law_name}{', over NCCL' if nccl else ''}"

    @property
    def shape(self) -> dict[str, Any]:
        return {"gpus": self.group.size, "global batch": self.size, "rows": sum(self.rows), "dim": DIM}

    def fits(self) -> bool:
        """Whether tables and optimizer state lie whole in the GPUs' memory: with rows in tiers no graph is captured."""
        numbers = sum(self.rows) * DIM * (1 if self.model == "dlrm" else 2)  # AdaGrad's state is as large as its table
        return 4 * numbers <= 0.8 * self.group.size * torch.cuda.get_device_properties(0).total_memory

    def time(self, traced: bool, timeline: Path | None, files: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the milliseconds of steps; and of those on batches from files, where they are asked for."""
        schema = schema_of(self.rows, self.hotness, fixed=True)
        counts = {f"c{i}": {"num_values": hot, "top_counts": []} for i, hot in enumerate(self.hotness)}
        build: Callable[..., vv.Model] = dlrm if self.model == "dlrm" else dcn_v2
        rules: Sequence[AnyOptimizer] = () if self.model == "dlrm" else (vv.AdaGrad(), vv.AdaGrad())
        given = {"statistics": {"rows": 1, "columns": counts}, **spread_settings(self.size)}
        given["peer_memory"] = self.peer_memory
        trainer = build(schema, *rules, **given).trainer
        seeds = [1000 * self.group.rank + i for i in range(NUM_BATCHES)]
        share = self.size // self.group.size
        batches = [draw(schema, self.hotness, share, self.exponent, seed) for seed in seeds]
        trainer.fix_sizes(self.size)

        def run(i: int) -> object:
            return trainer.train_step(batches[i % NUM_BATCHES])

        times = time_ms(run, warm_ups=12)
        if self.group.rank == 0:
            print(f"{self.name}, {self.size}: {trainer.cuda_graph}", flush=True)
        if traced and self.group.rank == 0:
            trace(run, f"{self.name}, {self.size}", timeline)
        elif traced:
            for i in range(TRACED):
                run(i)
            torch.cuda.synchronize()
        return times, self.time_from_files(trainer, schema) if files else None

    def time_from_files(self, trainer: vv.Trainer, schema: vv.Schema) -> np.ndarray:
        """Return the milliseconds of steps on batches from files, which rank 0 writes."""
        with tempfile.TemporaryDirectory() as own:
            folder = Path(self.group.gather_data(own)[0]) / "rows"
            if self.group.rank == 0:
                drawn = [draw(schema, self.hotness, self.size, self.exponent, i) for i in range(NUM_BATCHES)]
                from_files.write(folder, schema, drawn)
            dist.barrier()
            found = from_files.time_ms(trainer, Dataset(folder), self.size, self.group)
            dist.barrier()
        return found

    def measure(self, traced: bool, timeline: Path | None, alone: float | None, files: bool) -> None:
        """Record a step, and its rows a second beside one GPU's."""
        times, read = self.time(traced, timeline, files)
        if self.group.rank:
            return
        goal, floor = GOALS.get((self.model, self.group.size, self.size), (None, None))
        low, median, high = (float(value) for value in np.percentile(times, [20, 50, 80]))
        record(
            bench="train_group", case=self.name, metric="step in a CUDA graph", value=median, unit="ms", better="lower",
            spread=(low, high), shape=self.shape, goal=goal, floor=None if self.exponent else floor,
            peer_published="; ".join(
                filter(None, [TORCHREC.get((self.model, self.group.size, self.size)), PUBLISHED[self.model]])
            ),
        )  # fmt: skip
        print(f"    {self.size / median / 1e3:.2f} M samples/s", flush=True)
        if read is not None:
            record(
                bench="train_group", case=self.name, metric="step in a CUDA graph, from files",
                value=float(np.median(read)), unit="ms", better="lower", spread=(float(read.min()), float(read.max())),
                shape=self.shape, peer="batches on the device", peer_value=median,
            )  # fmt: skip
        if alone is not None:
            record(
                bench="train_group", case=self.name, metric="share of one GPU's speed, weak scaling",
                value=alone / median, unit="", better="higher", goal=0.8, floor=0.86, peer="one GPU, ms",
                peer_value=alone, shape=self.shape,
            )  # fmt: skip


def cases_of(size: int) -> list[tuple[str, int, float]]:
    """List model, global batch and exponent of what is measured on so many GPUs."""
    if SMALL:
        return [("dlrm", 512 * size, 1.1), ("dcn", 128 * size, 0.0)]
    dense = [("dlrm", 65_536, 1.1), ("dlrm", 65_536, 0.0), ("dlrm", 65_536 * size, 1.1)]
    larger = [("dcn", 55_296, 0.0)] if size >= 4 else []
    return [*dense, ("dcn", 32_768, 0.0), ("dcn", 32_768, 1.05), *larger, ("dcn", 512 * size, 0.0)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training over several GPUs.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that they run, keeps no figures")
    parser.add_argument("--only", default="", help="cases whose name has one of these texts, as 65536,dcn")
    parser.add_argument("--trace", action="store_true", help="print the kernels of a step")
    parser.add_argument("--nccl", action="store_true", help="exchange over NCCL")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="with --trace: append the kernels in order")
    parser.add_argument("--files", action="store_true", help="time steps on batches from files, too")
    parser.add_argument(ALONE, action="store_true", help="print one GPU's time of a step and end")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    if chosen.one_gpu:
        one_gpu()
        return 0
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        parser.error("one process was started: use torchrun --nproc-per-node N (train_gpu.py measures one GPU)")
    parts = chosen.only.split(",")
    wanted = [case for case in cases_of(size) if any(part in " ".join(map(str, case)) for part in parts)]
    weak = ROWS_OF_WEAK_SCALING * size
    alone = None
    if int(os.environ["RANK"]) == 0 and any(case[:2] == ("dlrm", weak) for case in wanted):
        alone = time_one_gpu()
    group = join_processes("cuda")
    for model, rows, exponent in wanted:
        beside = alone if (model, rows) == ("dlrm", weak) else None
        case = Case(group, model, rows, exponent, nccl=chosen.nccl)
        if case.fits():
            case.measure(chosen.trace, chosen.timeline, beside, chosen.files)
        elif group.rank == 0:
            print(f"{case.name}, {rows}: left out, its tables do not fit into the memory of {size} GPUs", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Host time of a training step on one CPU thread: Python, torch's dispatcher and the launch of kernels.

    python benchmarks/host_time.py [--profile] [--small]

The model has DCN's graph at Criteo's 26 + 13 columns with narrow layers and tables, and batches of one row: the calls
are those of a full batch, and kernels have almost nothing to compute. The figure is CPU time of the thread, the median
of the fastest fifth of the steps, because other processes only ever add to it. The peer is the same graph in plain
PyTorch with `nn.Embedding` and `torch.optim.Adam(foreach=True)`.

*Outside kernels* is the time of a step minus the time of its kernel calls alone: the operators that torch's dispatcher
runs in the step, forward, backward and update, called again with the same arguments from a loop, and the calls of Numba
kernels, timed one by one. What remains is Python, autograd's graph and the argument checks of operations. To list a
step's operators the benchmark observes one step, which therefore runs eagerly; a replayed step runs the same ones.

DLRM and DeepFM of the same widths are measured against eager steps of their own (`cuda_graph=False`).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable
from time import thread_time
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import viviane as vv
from record import record
from viviane.batch import Batch
from viviane.ops.native.kernels import Kernel
from viviane.zoo import DCN, DLRM, DeepFM

GOAL_MS = 0.25
CASE = "{}, 26 + 13 columns, 1 CPU thread"
NUM_CATEGORICAL, NUM_DENSE, DIM, HIDDEN = 26, 13, 4, (8, 8)
MODELS = {
    "DCN": DCN(dim=DIM, deep_mlp=HIDDEN),
    "DLRM": DLRM(dim=DIM, bottom_mlp=HIDDEN[:1], top_mlp=HIDDEN),
    "DeepFM": DeepFM(dim=DIM, deep_mlp=HIDDEN),
}


class PlainDCN(nn.Module):
    """The same graph in plain PyTorch."""

    def __init__(self, num_ids: int, num_cross: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(num_ids, DIM) for _ in range(NUM_CATEGORICAL)])
        width = NUM_CATEGORICAL * DIM + NUM_DENSE
        self.cross = nn.ModuleList([nn.Linear(width, 1) for _ in range(num_cross)])
        sizes = [width, *HIDDEN]
        self.deep = nn.Sequential(
            *(one for i in range(len(HIDDEN)) for one in (nn.Linear(*sizes[i : i + 2]), nn.ReLU()))
        )
        self.last = nn.Linear(width + HIDDEN[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = torch.cat([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        crossed = x
        for layer in self.cross:
            crossed = x * layer(crossed) + crossed
        out: Tensor = self.last(torch.cat([crossed, self.deep(x)], 1))
        return out


def batch_of(schema: vv.Schema) -> Batch:
    """One row."""
    rng = np.random.default_rng(0)
    columns = {"y": rng.integers(0, 2, 1)}
    columns |= {one.name: rng.normal(size=1).astype("float32") for one in schema.dense}
    columns |= {one.name: rng.integers(3, 200, 1) for one in schema.categorical}
    return Batch.from_columns(schema, columns)


def own_step(name: str, cuda_graph: bool | Literal["auto"] = "auto") -> Callable[[], object]:
    schema = vv.Schema(
        labels=[{"name": "y"}],
        dense=[{"name": f"x{i}"} for i in range(NUM_DENSE)],
        categorical=[{"name": f"c{i}", "num_ids": 200} for i in range(NUM_CATEGORICAL)],
    )
    model = vv.Model(vv.Solver(batch_size=512, device="cpu", num_threads=1, cuda_graph=cuda_graph), schema)
    model.add(MODELS[name])
    model.compile(vv.Adam())
    batch, trainer = batch_of(schema), model.trainer
    return lambda: trainer.train_step(batch)


def plain_step() -> Callable[[], object]:
    model = PlainDCN(200, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    dense, ids, label = torch.randn(1, NUM_DENSE), torch.randint(200, (1, NUM_CATEGORICAL)), torch.ones(1, 1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.binary_cross_entropy_with_logits(model(dense, ids), label).backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], object], count: int) -> tuple[float, float, float]:
    """Return the median of the fastest fifth of the steps, and the 20th and 80th percentile of all."""
    for _ in range(30):
        step()
    seconds = []
    for _ in range(count):
        start = thread_time()
        step()
        seconds.append(thread_time() - start)
    times = np.sort(np.asarray(seconds)) * 1e3
    return float(np.median(times[: count // 5])), float(np.quantile(times, 0.2)), float(np.quantile(times, 0.8))


class RecordedCalls(TorchDispatchMode):
    """Records the operators that torch's dispatcher runs, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "profiler" not in str(call):
            self.calls.append((call, args, kwargs or {}))
        return call(*args, **(kwargs or {}))

    def replay(self) -> None:
        """Run the operators again."""
        for call, args, kwargs in self.calls:
            call(*args, **kwargs)


def kernel_milliseconds(step: Callable[[], object], count: int) -> float:
    """Return the time of a step's kernel calls without what happens between them."""
    seconds: list[float] = []
    run = Kernel.__call__

    def timed(self: Kernel, *args: Any, **kwargs: Any) -> None:
        start = thread_time()
        run(self, *args, **kwargs)
        seconds[-1] += thread_time() - start

    with patch.object(Kernel, "__call__", timed):
        for _ in range(count):
            seconds.append(0.0)
            step()
    native = float(np.median(np.sort(seconds)[: count // 5])) * 1e3
    with RecordedCalls() as recorded:
        step()
    with torch.no_grad():
        return native + milliseconds(recorded.replay, count)[0]


def measure(name: str, count: int) -> None:
    """Record the figures of a model: DCN beside the same graph in plain PyTorch, others beside their eager steps."""
    step = own_step(name)
    label, peer = ("plain PyTorch, ms", plain_step()) if name == "DCN" else ("eager steps, ms", own_step(name, False))
    own, low, high = milliseconds(step, count)
    other, _, _ = milliseconds(peer, count)
    case, shape = CASE.format(name), {"rows": 1, "dim": DIM, "hidden": list(HIDDEN)}
    record(
        bench="host_time", case=case, metric="host time of a training step", value=own, unit="ms", better="lower",
        peer=label, peer_value=other, spread=(low, high), shape=shape,
    )  # fmt: skip
    record(
        bench="host_time", case=case, metric="host time outside kernels", value=own - kernel_milliseconds(step, count),
        unit="ms", better="lower", goal=GOAL_MS if name == "DCN" else None, peer=label,
        peer_value=other - kernel_milliseconds(peer, count), shape=shape,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="few steps; prints only")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of DCN's time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = 100 if arguments.small else 1500
    for name in MODELS:
        measure(name, count)
    if arguments.profile:
        step = own_step("DCN")
        for _ in range(30):
            step()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(count):
            step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

"""Embedding tables: lookup alone, and lookup + backward + update, beside nn.EmbeddingBag(sparse=True).

    python benchmarks/embedding.py [--small]

26 one-hot tables of the Criteo-Kaggle sizes with the largest capped, ids from a power law of exponent 1.1. The
peer gets its ids as int64 columns laid out beforehand, so that only its tables are timed. Ours and the peer
take turns batch by batch, so that a disturbance of the machine strikes both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from record import record
from viviane.batch import Batch, Layout
from viviane.config import SGD, AdaGrad, Adam
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig

SMALL = "--small" in sys.argv
CAP = 20_000 if SMALL else 1_000_000
CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
CRITEO += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
SIZES = [min(rows, CAP) for rows in CRITEO]
NAMES = tuple(f"c{i}" for i in range(len(SIZES)))
LAYOUT = Layout((), (), NAMES, ())
NUM_BATCHES = 8
LR = 0.01


def power_law_ids(size: int, rng: np.random.Generator, exponent: float = 1.1) -> Tensor:
    """Draw (size, tables) ids, P(id) ~ (id + 1)^-exponent, by inverting the continuous law."""
    u, power = rng.random((size, len(SIZES))), 1 - exponent
    limit = np.array(SIZES, dtype=np.float64) + 1
    ids = np.floor((1 + u * (limit**power - 1)) ** (1 / power)) - 1
    return torch.from_numpy(np.clip(ids, 0, limit - 2).astype(np.int32))


class Peer(nn.Module):
    """What one writes by hand in PyTorch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows in SIZES)

    def forward(self, columns: list[Tensor], offsets: Tensor) -> Tensor:
        return torch.cat([table(ids, offsets) for table, ids in zip(self.tables, columns, strict=True)], 1)


def compare(ours: Callable[[int], object], peers: Callable[[int], object]) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each repetition, taking turns; the first of each batch warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(NUM_BATCHES if SMALL else 4 * NUM_BATCHES):
        for run, kept in zip((ours, peers), times, strict=True):
            start = time.perf_counter()
            run(repetition % NUM_BATCHES)
            if SMALL or repetition >= NUM_BATCHES:
                kept.append((time.perf_counter() - start) * 1e3)
    return times


def report(case: str, size: int, dim: int, times: tuple[list[float], list[float]]) -> None:
    low, median, high = np.percentile(times[0], [20, 50, 80])
    record(
        bench="embedding",
        case=case,
        metric="time",
        value=float(median),
        unit="ms",
        better="lower",
        goal=float(np.median(times[1])),
        peer="nn.EmbeddingBag(sparse=True)",
        peer_value=float(np.median(times[1])),
        spread=(float(low), float(high)),
        shape={"batch": size, "dim": dim, "tables": len(SIZES), "rows": sum(SIZES), "threads": torch.get_num_threads()},
    )


def run(size: int, dim: int) -> None:
    rng = np.random.default_rng(0)
    ids = [power_law_ids(size, rng) for _ in range(NUM_BATCHES)]
    nothing = torch.zeros(size, 0)
    batches = [Batch(LAYOUT, nothing, nothing, one) for one in ids]
    columns = [list(one.long().t().contiguous().unbind()) for one in ids]
    offsets = torch.arange(size)
    gradient = torch.randn(size, len(SIZES) * dim)
    tables = [TableConfig(name=name, num_rows=rows, dim=dim) for name, rows in zip(NAMES, SIZES, strict=True)]
    features = [FeatureConfig(name=name, table=name) for name in NAMES]
    rules = {
        "sgd": (SGD(), lambda params: torch.optim.SGD(params, lr=LR)),
        "adagrad": (AdaGrad(), lambda params: torch.optim.Adagrad(params, lr=LR)),
        "adam": (Adam(), lambda params: torch.optim.SparseAdam(params, lr=LR)),
    }
    for name, (settings, build) in rules.items():
        ours, peer = EmbeddingCollection(tables, features, settings), Peer(dim)
        optimizer = build(list(peer.parameters()))

        def train_ours(i: int, ours: EmbeddingCollection = ours) -> None:
            ours(batches[i]).flat.backward(gradient)
            ours.step(LR)

        def train_peer(i: int, peer: Peer = peer, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            peer(columns[i], offsets).backward(gradient)
            optimizer.step()

        if name == "sgd":
            with torch.no_grad():
                times = compare(lambda i, m=ours: m(batches[i]), lambda i, m=peer: m(columns[i], offsets))
            report("lookup", size, dim, times)
        report(f"lookup + backward + {name}", size, dim, compare(train_ours, train_peer))


if __name__ == "__main__":
    for dim in (16,) if SMALL else (16, 128):
        for size in (256,) if SMALL else (2048, 16384):
            run(size, dim)

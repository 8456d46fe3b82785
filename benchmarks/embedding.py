"""Embedding tables on the CPU beside the libraries that are installed: what `viviane bench embedding` measures, kept.

    python benchmarks/embedding.py [--small] [--dims 16,128] [--sizes 2048,16384] [--rules sgd,...] [--peers ...]

26 one-hot tables of Criteo-Kaggle's sizes, capped at a million rows from dim 128 on; ids from a power law of exponent
1.1; a fixed gradient. Everything is measured twice, with THP_MEM_ALLOC_ENABLE=0 and 1 (torch's allocator then asks for
huge pages; TensorFlow's knows nothing of it), and each library counts by its better half. "kernels" is what our
collection is made of, key_rows, gather_rows and update_rows, called without it. --processor-time with
OMP_NUM_THREADS=1 is for a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from record import record
from viviane.bench.embedding import LOOKUP, Measurement, choose_libraries, compare
from viviane.bench.libraries import OURS, Steps
from viviane.bench.timing import Times, measure
from viviane.bench.workload import NUM_BATCHES, RULES, TABLE_SIZES, Draw, Load, Tables
from viviane.ops.embedding_bag import gather_rows
from viviane.ops.key_rows import RAISE, ColumnRule, KeyRules, key_rows
from viviane.ops.native.pages import advise_huge_pages
from viviane.ops.row_update import Entries, Scratch, initial_state, state_shape, update_rows

CPU = torch.device("cpu")
# How many times FBGEMM's speed is aimed at, at dim 16; at dim 128 twice, and any other peer's at the least.
GOALS = {"sgd": 2.5, "adagrad": 3.5, "row_wise_adagrad": 6.0}


def kernels(tables: Tables, load: Load) -> Steps:
    """Return the operations alone on one load."""
    rule, num_rows, width = RULES[tables.rule], sum(tables.rows), len(tables.rows) * tables.dim
    bases = np.concatenate([[0], np.cumsum(tables.rows)[:-1]]).tolist()
    columns = [ColumnRule(base, rows, RAISE) for base, rows in zip(bases, tables.rows, strict=True)]
    rules = KeyRules(columns, num_rows, CPU)
    weight = torch.empty(num_rows + 2, tables.dim)
    advise_huge_pages(weight)
    weight.uniform_(-0.01, 0.01)
    state = {}
    for name, value in initial_state(rule).items():
        state[name] = torch.empty(state_shape(name, weight, rule))
        advise_huge_pages(state[name])
        state[name].fill_(value)
    scratch, out = Scratch(), torch.empty(load.size, width)
    places = range(0, width, tables.dim)
    sources = torch.arange(0, load.size * width, tables.dim, dtype=torch.int32)

    def forward(i: int) -> torch.Tensor:
        rows = key_rows(load.ids[i], rules)[0]
        gather_rows(weight, rows, out, places)
        return rows

    def train(i: int) -> None:
        entries = Entries(forward(i).view(-1), load.gradient.view(-1), sources)
        update_rows(weight, state, entries, rule, lr=tables.lr, step=i + 1, scratch=scratch)

    return Steps(forward, train)


def measure_kernels(
    tables: Tables, draw: Draw, *, seconds: float, lookup: bool, processor_time: bool
) -> Iterator[tuple[str, Times]]:
    steps, clock = kernels(tables, draw.load(tables)), time.process_time if processor_time else time.perf_counter
    yield tables.rule, measure(steps.train, NUM_BATCHES, CPU, seconds, clock)
    if lookup:
        yield LOOKUP, measure(steps.forward, NUM_BATCHES, CPU, seconds, clock)


def better_halves(
    kinds: list[Tables], draws: list[Draw], peers: str, *, seconds: float, processor_time: bool
) -> dict[str, Measurement]:
    """Return the fastest figure of each operation, batch and library over both settings, by a name of the three."""
    best: dict[str, Measurement] = {}
    for huge_pages in ("0", "1"):
        os.environ["THP_MEM_ALLOC_ENABLE"] = huge_pages  # the processes of the libraries inherit it
        names = [name for name in choose_libraries(peers, CPU) if huge_pages == "0" or name != "keras"]
        found = compare(kinds, draws, names, seconds=seconds, processor_time=processor_time, heard=print)
        for one in found.measurements:
            name = f"{one.operation} {one.batch} {one.library}"
            if name not in best or one.ms < best[name].ms:
                best[name] = one
    return best


def describe(operation: str, dim: int, size: int) -> str:
    done = LOOKUP if operation == LOOKUP else f"lookup + backward + {operation}"
    return f"{done}, dim {dim}, batch {size}"


def keep(
    case: str, metric: str, value: Times | Measurement, shape: dict[str, int], peer: Measurement | None, goal: float
) -> None:
    value_ms = value.ms if isinstance(value, Measurement) else value.best_ms
    record(
        bench="embedding", case=case, metric=metric, value=value_ms, unit="ms", better="lower",
        goal=None if peer is None else peer.ms / goal, peer=None if peer is None else peer.library,
        peer_value=None if peer is None else peer.ms, spread=(value_ms, value.high_ms), shape=shape,
    )  # fmt: skip


def goal(peer: Measurement, dim: int) -> float:
    """Return how many times faster than a peer we mean to be."""
    if peer.library != "fbgemm" or peer.operation not in GOALS:
        return 1.0
    return 2.0 if dim >= 128 else GOALS[peer.operation]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tables of at most 20,000 rows, little time")
    parser.add_argument("--dims", default="16,128")
    parser.add_argument("--sizes", default="2048,16384")
    parser.add_argument("--rules", default="sgd,adagrad,row_wise_adagrad,adam")
    parser.add_argument("--peers", default="auto", help="as `viviane bench embedding --peers`")
    parser.add_argument("--seconds", type=float, default=3.0, help="to spend on each figure")
    parser.add_argument("--processor-time", action="store_true", help="of all threads, not on the wall")
    options = parser.parse_args()
    how = {"seconds": 0.05 if options.small else options.seconds, "processor_time": options.processor_time}
    draws = [Draw(int(size)) for size in options.sizes.split(",")]
    for dim in map(int, options.dims.split(",")):
        cap = 20_000 if options.small else 1_000_000 if dim >= 128 else sys.maxsize
        rows = tuple(min(size, cap) for size in TABLE_SIZES["criteo-kaggle"])
        kinds = [Tables(rows, dim, rule, CPU) for rule in options.rules.split(",")]
        best = better_halves(kinds, draws, options.peers, **how)
        shape = {"dim": dim, "tables": len(rows), "rows": sum(rows), "threads": torch.get_num_threads()}
        metric = "processor time" if options.processor_time else "time"
        for tables in kinds:
            for draw in draws:
                for operation, times in measure_kernels(tables, draw, lookup=tables is kinds[0], **how):
                    case = f"{describe(operation, dim, draw.size)}, kernels alone"
                    keep(case, metric, times, {**shape, "batch": draw.size}, None, 1.0)
        for one in best.values():
            own = best[f"{one.operation} {one.batch} {OURS}"]
            if one.library != OURS:
                case = f"{describe(one.operation, dim, one.batch)}, beside {one.library}"
                keep(case, metric, own, {**shape, "batch": one.batch}, one, goal(one, dim))


if __name__ == "__main__":
    main()

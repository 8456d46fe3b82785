"""Caches over tiers: the time to plan the slots of a batch, on the host.

    python benchmarks/tiers.py [--small]

Ten tables of 6 M rows whose cache holds 10% of them, 1,048,570 ids a batch, of power law 1.05: the setting of
tiers_gpu.py. A step on a GPU takes 2 to 3 ms there, and the plans of later batches are made beside it. Recorded are the
processor time of all threads and, where no other work runs on the machine, the time by the clock.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import numpy as np

from record import record
from viviane.store.slots import Region, SlotMap
from viviane.store.threads import num_workers

TABLES = 10
IN_FLIGHT = 3  # batches whose rows may not leave


def by_frequency(uniform: Any, rows: int, exponent: float = 1.05) -> Any:
    """Return ids 0 <= id < rows of frequency (id + 1)^-exponent, the order in which the ETL numbers values, as floats.

    Args:
        uniform: numbers 0 <= u < 1, an array or a tensor of float64.
        rows: of the table.
        exponent: of the law.
    """
    drawn = ((rows ** (1 - exponent) - 1) * uniform + 1) ** (1 / (1 - exponent))
    return (drawn - 1).clip(0, rows - 1)


def spread(ids: Any, rows: int) -> Any:
    """Return other ids for these, an array or a tensor of int64, far from each other, each for one."""
    return ids * 2_654_435_761 % rows


def measure(rows: int, ids: int, repeats: int) -> None:
    """Plan batches in the steady state, and record the time of one."""
    slots_each = rows // 10
    regions = [Region(str(t), t * rows, rows, t * slots_each, slots_each) for t in range(TABLES)]
    slots, rng, stamp = SlotMap(regions, pinned=2), np.random.default_rng(0), 0
    bases = np.arange(TABLES)[:, None] * rows
    for part in np.array_split(np.arange(slots_each), 6):  # the rows that a cache has after a while
        stamp += 1
        slots.mark_dirty(slots.admit((spread(part, rows) + bases).reshape(-1).astype(np.int32), stamp, stamp).slots)
    clocks, cores, missing = [], [], []
    for i in range(repeats):
        drawn = spread(by_frequency(rng.random((TABLES, ids)), rows).astype(np.int64), rows)
        batch = (drawn + bases).T.reshape(-1).astype(np.int32)
        stamp += 1
        clock, core = time.perf_counter(), time.process_time()
        admission = slots.admit(batch, stamp, max(1, stamp - IN_FLIGHT))
        if i >= repeats // 3:
            clocks.append(time.perf_counter() - clock)
            cores.append(time.process_time() - core)
            missing.append(len(admission.new_rows))
        slots.mark_dirty(admission.slots)
    count = TABLES * ids
    figures = [("processor time", cores)]
    if os.getloadavg()[0] <= num_workers() + 1:
        figures.append((f"time, {num_workers()} threads", clocks))
    for metric, times in figures:
        per_id = np.array(times) / count * 1e9
        record(
            bench="tiers", case="plan a batch", metric=f"{metric} an id", value=round(float(np.median(per_id)), 2),
            unit="ns", better="lower", spread=tuple(np.percentile(per_id, (20, 80)).round(2).tolist()),
            shape={"tables": TABLES, "rows": rows, "ids": count, "cache": 0.1, "missing": round(np.mean(missing))},
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the planning of caches over tiers.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that it runs, keeps no figures")
    arguments = parser.parse_args()
    measure(*((60_000, 1_000, 6) if arguments.small else (6_000_000, 104_857, 18)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

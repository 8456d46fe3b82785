"""Requests during 100 changes of versions: failures, mixtures, latency, hit rate, leaks.

Two clients ask without pause, so that on two cores loading a version competes with them for processor time. The score
of a request is a function of the version and its rows; the harness is the tests' own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from record import ROOT, record

sys.path[:0] = [str(ROOT / "tests" / "serving" / "parameter_server")]
BENCH = "parameter_server"


def main() -> None:
    from version_changes import run

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    changes, requests = (3, 300) if small else (100, 100_000)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), changes, requests, quiet_s=0.5 if small else 5.0, settle_s=0.1 if small else 0.5)
    shape = {"changes": changes, "requests": found.requests, "rows": 16}
    record(bench=BENCH, case="requests during changes of versions", metric="failed or mixed",
           value=len(found.failed) + found.mixed, unit="requests", better="lower", goal=0, shape=shape)  # fmt: skip
    before, during = np.percentile(found.before_ms, 99), np.percentile(found.during_ms, 99)
    record(bench=BENCH, case="requests during changes of versions", metric="p99 during a change / without",
           value=during / before, unit="x", better="lower", goal=1.3,
           shape={**shape, "p99 ms": [round(before, 2), round(during, 2)],
                  "p50 ms": [round(float(np.median(x)), 2) for x in (found.before_ms, found.during_ms)]})  # fmt: skip
    old, new = (np.array(part) for part in zip(*found.hit_rates, strict=True))
    record(bench=BENCH, case="requests during changes of versions", metric="hit rate in the first half second / before",
           value=float(np.mean(new) / np.mean(old)), unit="x", better="higher", goal=0.95,
           shape={**shape, "hit rate": [round(float(old.mean()), 4), round(float(new.mean()), 4)],
                  "worst": round(float((new / old).min()), 3)})  # fmt: skip
    half = len(found.handles) // 2
    growth = (found.resident[-1] - found.resident[half]) / max(1, len(found.resident) - 1 - half)
    record(bench=BENCH, case="requests during changes of versions", metric="resident memory gained by a change",
           value=growth / 1024, unit="KiB", better="lower",
           shape={**shape, "file handles": [found.handles[half], found.handles[-1]],
                  "threads": [found.threads[half], found.threads[-1]]})  # fmt: skip


if __name__ == "__main__":
    main()

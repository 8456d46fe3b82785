"""Exactly-once effect of updates: kills of publisher, consumer and broker; repeated, reordered and lost messages.

The harness is the tests' own, tests/store/exactly_once.py. It raises where the store differs from a replay of all
publications, or where a dropped message is not reported with its number. The broker is Tansu, its log in memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from record import ROOT, record

sys.path[:0] = [str(ROOT / "tests" / name) for name in ("store", "remote")]


def main() -> None:
    from exactly_once import run

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kills = 2 if arguments.small else arguments.kills
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts = run(kills, max(1, kills // 20), Path(folder), seed=arguments.seed)
    record(
        bench="parameter_server", case="kills of publisher and consumer, store compared with a replay of the log",
        metric="kills of each, no difference", value=min(counts["publisher kills"], counts["consumer kills"]),
        unit="kills", better="higher", goal=200, shape={**counts, "seconds": round(time.perf_counter() - start)},
    )  # fmt: skip


if __name__ == "__main__":
    main()

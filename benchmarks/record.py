"""Keep figures as data: one JSON object a line in benchmarks/results/, with machine, versions, commit and date."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, Literal

from viviane.core import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("VIVIANE_RESULTS", ROOT / "benchmarks" / "results"))
_MEASURED_WITH = ("torch", "numpy", "pyarrow", "duckdb", "numba", "triton")


def record(
    *,
    bench: str,
    case: str,
    metric: str,
    value: float,
    unit: str,
    better: Literal["higher", "lower"],
    goal: float | None = None,
    floor: float | None = None,
    peer: str | None = None,
    peer_value: float | None = None,
    peer_published: str | None = None,
    spread: tuple[float, float] | None = None,
    shape: dict[str, Any] | str | None = None,
) -> dict[str, Any]:
    """Print a figure and append it to the results; a run with --small prints only, since its sizes prove nothing.

    Args:
        bench: the benchmark, which names the file.
        case, metric: what was measured; with `shape` they identify the figure over time.
        value, unit: the figure, such as 1.9 and "M rows/s".
        better: whether higher or lower is better.
        goal, floor: what is aimed at, and the limit that the hardware or theory sets, in the same unit.
        peer, peer_value: the other library measured in the same run, and its figure.
        peer_published: a peer's figure of another run or machine, with its name and hardware.
        spread: 20th and 80th percentile of the repetitions.
        shape: sizes of the case, such as {"rows": 1_000_000, "dim": 16}.
    """
    if better not in ("higher", "lower"):
        raise ValueError(f"better is 'higher' or 'lower', not {better!r}")
    line = {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "better": better,
        "goal": goal,
        "floor": floor,
        "peer": peer,
        "peer_value": peer_value,
        "peer_published": peer_published,
        "spread": None if spread is None else list(spread),
        "shape": shape,
        "machine": machine.describe(),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": machine.commit(ROOT),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    beside = "" if peer_value is None else f"   {peer}: {peer_value:.4g}"
    beside += "" if peer_published is None else f"   ({peer_published})"
    print(f"{bench} | {case} | {metric}: {value:.4g} {unit}{beside}", flush=True)
    if "--small" not in sys.argv:
        RESULTS.mkdir(parents=True, exist_ok=True)
        with (RESULTS / f"{bench}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
    return line


def _versions() -> dict[str, str]:
    return {name: version for name, version in machine.versions(*_MEASURED_WITH).items() if version is not None}

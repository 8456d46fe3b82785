"""Raw rows through an inference session: encoded value by value in Python, beside the ETL's own queries.

    python benchmarks/serving_raw.py [--small]

What is timed is `session.predict(rows)` with rows as dicts, 13 numbers and 26 texts each as in Criteo, on one CPU
thread. The peer is the same session with the encoder of small requests taken away.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import viviane as vv
from record import record
from viviane.etl import EtlConfig, run
from viviane.serving import InferenceSession

SMALL = "--small" in sys.argv
SIZES = (1, 16, 64)
GOAL_US = {1: 200.0}
VALUES = 300 if SMALL else 20_000
"""Of each text column."""


def raw_rows(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    numbers, texts = rng.exponential(9, (count, 13)).round(2), rng.integers(0, VALUES, (count, 26))
    return [
        {"click": int(rng.integers(0, 2))}
        | {f"I{i}": float(value) for i, value in enumerate(numbers[row])}
        | {f"C{i}": f"{value * 2654435761 % 2**32:08x}" for i, value in enumerate(texts[row])}
        for row in range(count)
    ]


def saved(folder: Path) -> Path:
    rows = raw_rows(2_000 if SMALL else 20_000, 0)
    names = list(rows[0])
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    (folder / "raw.csv").write_text("\n".join(lines) + "\n")
    kinds = {"c": "int", "I": "float", "C": "string"}
    config = EtlConfig.from_dict({
        "input": {"columns": [{"name": name, "type": kinds[name[0]]} for name in names]},
        "labels": [{"name": "click"}],
        "dense": [{"name": f"I{i}", "operators": [{"type": "fill", "value": 0}, {"type": "log"}]} for i in range(13)],
        "categorical": [{"name": f"C{i}"} for i in range(26)],
    })  # fmt: skip
    run(config, folder / "raw.csv", folder / "data")
    model = vv.Model(vv.Solver(device="cpu", num_threads=1), vv.Dataset(folder / "data" / "train"))
    model.add(vv.zoo.DLRM(dim=16, bottom_mlp=[256, 64], top_mlp=[256, 128]))
    model.compile()
    model.save(folder / "model")
    return folder / "model"


def microseconds(session: InferenceSession, rows: list[dict[str, Any]]) -> float:
    times = []
    session.predict(rows)
    for _ in range(10 if SMALL else 60):
        start = time.process_time()
        session.predict(rows)
        times.append(time.process_time() - start)
    return float(np.median(times)) * 1e6


def main() -> None:
    with TemporaryDirectory() as folder:
        path = saved(Path(folder))
        session, slow = (InferenceSession(path, device="cpu") for _ in range(2))
        slow._encoder._plain = None
        for size in SIZES:
            rows = raw_rows(size, size)
            np.testing.assert_array_equal(session.predict(rows), slow.predict(rows))
            record(bench="serving_raw", case=f"DLRM, 39 raw columns, batch {size}", metric="raw rows to scores, p50",
                   value=microseconds(session, rows), unit="us", better="lower", goal=GOAL_US.get(size),
                   peer="the ETL's queries", peer_value=microseconds(slow, rows),
                   shape={"tables": 26, "values": VALUES})  # fmt: skip


if __name__ == "__main__":
    main()

"""Faults of tiers under load: requests that were wrong without being counted, by tier and fault; see docs.

The cases are those of tests/serving/parameter_server/test_faults.py, which documents them; here they run for longer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from record import ROOT, record

sys.path[:0] = [str(ROOT / "tests" / part) for part in ("store", "remote", "serving/parameter_server")]
_MOST_SLOW = 100
"""Requests of cases in which each of them waits."""


def main() -> None:
    from broker import Broker
    from click_models import build, train
    from test_faults import CASES, check
    from valkey_servers import Valkey

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    requests = 20 if parser.parse_args().small else 1000
    random = np.random.default_rng(0)
    rows = {
        "d": random.random(150, dtype=np.float32), "item": random.integers(0, 300, 150),
        "city": random.integers(0, 4, 150), "user": random.integers(-5, 60, 150),
        "past": [random.integers(1, 300, n).tolist() for n in random.integers(0, 5, 150)],
    }  # fmt: skip
    model, total = build(), 0
    train(model, 5)
    outcomes: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder, Valkey() as valkey, Broker() as broker:
        saved = Path(str(model.save(Path(folder) / "models" / "1")))
        for number, (name, strict) in enumerate((name, strict) for name in CASES for strict in (False, True)):
            work = Path(folder) / str(number)
            work.mkdir()
            count = min(requests, _MOST_SLOW) if "slow" in name or "STOP" in name else requests
            found = check(name, strict, count, saved, rows, valkey, broker, work)  # raises where an answer is wrong
            outcomes[f"{name}{', strict' if strict else ''}"] = found["fault"]
            total += sum(found["all"].values())
            print(name, strict, found, flush=True)
    record(
        bench="parameter_server", case="faults of tiers under load", metric="answers that are wrong and not counted",
        value=0, unit="answers", better="lower", goal=0, shape={"requests": total, "outcomes": outcomes},
    )  # fmt: skip


if __name__ == "__main__":
    main()

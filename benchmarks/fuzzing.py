"""Mutated files, stores, command lines, scripts and requests to a server, 10,000 of each: python benchmarks/fuzzing.py

Runs the slow tests of tests/hostile and of tests/serving/test_server_fuzz.py, which fail where one ends with anything
but success or a VivianeError, or over the network its status code; keeps how many cases ran. `--log FILE` reads what
such a run has printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from record import ROOT, record

LINE = re.compile(
    r"^(?P<kind>mutated [A-Za-z ]+): (?P<cases>\d+) cases, (?P<accepted>\d+) accepted, (?P<refused>\d+) refused$",
    re.MULTILINE,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few cases instead of all; keeps no figures")
    parser.add_argument("--log", type=Path, help="take the figures from the output of a finished run")
    arguments = parser.parse_args()
    if arguments.log is None:
        chosen = ["-m", "not slow" if arguments.small else "slow"]
        places = [str(ROOT / "tests" / one) for one in ("hostile", "serving/test_server_fuzz.py")]
        command = [sys.executable, "-m", "pytest", "-q", "-s", *chosen, *places]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        if done.returncode != 0:
            return 1
        text = done.stdout
    else:
        text = arguments.log.read_text(encoding="utf-8")
    for found in LINE.finditer(text):
        record(
            bench="fuzzing",
            case=found["kind"],
            metric="cases that ended with success or a VivianeError",
            value=int(found["cases"]),
            unit="cases, all of them",
            better="higher",
            goal=10_000,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

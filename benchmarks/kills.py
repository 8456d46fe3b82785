"""kill -9 at every write of the commands that write outputs, and at how many of them: python benchmarks/kills.py

Runs the slow tests of tests/kill, which fail where an output is not whole afterwards, the next run does not work, or
something is left behind. A command runs once, what its folder holds before each write is kept, and the next run starts
from each of the states that differ. `--log FILE` reads what such a run has printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from record import ROOT, record

LINE = re.compile(r"^\.*(?P<name>[a-z -]+): (?P<count>\d+) writes, (?P<states>\d+) states$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few kills instead of all; keeps no figures")
    parser.add_argument("--log", type=Path, help="take the figures from the output of a finished run")
    arguments = parser.parse_args()
    if arguments.log is None:
        chosen = ["-m", "not slow" if arguments.small else "slow"]
        command = [sys.executable, "-m", "pytest", "-q", "-s", *chosen, str(ROOT / "tests" / "kill")]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        if done.returncode != 0:
            return 1
        text = done.stdout
    else:
        text = arguments.log.read_text(encoding="utf-8")
    for found in LINE.finditer(text):
        record(
            bench="kills",
            case=f"kill -9 at every write, {found['name']}",
            metric="kills after which the older or the new output was whole and the next run left nothing behind",
            value=int(found["count"]),
            unit="kills, all of them",
            better="higher",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

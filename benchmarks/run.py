"""Run the benchmarks one after another: python benchmarks/run.py [--small] [NAME ...]"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Not benchmarks themselves; quality trains on real data and has its own make target; kills and fuzzing take an hour.
NOT_HERE = {"fuzzing", "kills", "run", "record", "tables", "quality", "zoo_peers", "etl_peers", "on_gpus", "same_bits"}


def main() -> int:
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_HERE)
    parser = argparse.ArgumentParser(description="Run the benchmarks and append their figures to benchmarks/results/.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(names)}; all by default")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that they run, keeps no figures")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    failed = []
    for name in arguments.names or names:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        command = [sys.executable, str(FOLDER / f"{name}.py"), *(["--small"] if arguments.small else [])]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not arguments.small:
        print("write the new figures into the pages with `make bench-tables`")
    return 0


if __name__ == "__main__":
    sys.exit(main())

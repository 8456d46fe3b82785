"""ETL of a file in the Criteo format beside pandas, Polars, pyarrow and Spark: seconds and peak memory.

python benchmarks/etl.py [--small] [--rows N] [--threads N] [--peer NAME] [--big]

All learn on the first 80% of the rows (fill 0, ln(1 + x), categories seen 6 times or more get ids by falling count) and
write three Parquet parts; the ids are compared. Each runs in a fresh process, up to a million rows seven times, all in
turns, of which the medians are kept; Spark is local[threads], heap 4 GB. Up to a million rows `viviane etl` runs, too,
beside Python's `run`. Peak memory is that of a process and all its children together. Peers that are not installed are
left out. The modules are compiled to bytecode before the first run, as pip does on installation.

--big runs 20 million rows x 40 columns with a memory limit of 4 GiB instead, and fails when the process took more.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from etl_peers import PEERS, Peer
from record import record

# Distinct values of the 26 columns, spread as in the Criteo contest's file, the largest cut to 2 million.
SIZES = [1460, 583, 2_000_000, 1_800_000, 305, 24, 12_517, 633, 3, 93_145, 5_683, 1_900_000, 3_194]
SIZES += [27, 14_992, 1_700_000, 10, 5_652, 2_173, 4, 1_850_000, 18, 15, 286_181, 105, 142_572]
SPLIT = {"train": 0.8, "valid": 0.1, "test": 0.1}
GOAL_TIMES_FASTER = 4.0
GOAL_MEMORY_SHARE = 1 / 3
SMALL_ROWS = 1_000_000  # up to here the goal is Polars' time
SMALL_ROUNDS = 7  # of so few rows, all programs in turns; the figure is the median
BIG_LIMIT_BYTES = 4 << 30

VIVIANE = """
import sys
from viviane.etl import run
raw, out, threads, limit = sys.argv[1:]
run("criteo", raw, out, split="rows:train=0.8,valid=0.1,test=0.1", threads=int(threads), memory_limit=limit)
"""
COMMAND = """
import sys
from viviane.__main__ import main
raw, out, threads, limit = sys.argv[1:]
options = ["--preset", "criteo", "--split", "rows:train=0.8,valid=0.1,test=0.1", "--quiet"]
sys.argv = ["viviane", "etl", raw, "--output", out, "--threads", threads, "--memory-limit", limit, *options]
main()
"""


def hexadecimal(keys: np.ndarray) -> pa.Array:
    """Eight digits for each 32-bit key."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    shifts = np.arange(28, -1, -4, dtype=np.uint64)
    text = digits[((keys[:, None] >> shifts) & np.uint64(15)).astype(np.int64)].reshape(-1)
    offsets = np.arange(0, 8 * len(keys) + 1, 8, dtype=np.int32)
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))


def generate(path: Path, rows: int) -> None:
    """Write a Criteo-like file: skewed categories, some missing; the same for the same number of rows."""
    random = np.random.default_rng(0)
    options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with path.open("wb") as file:
        for start in range(0, rows, 200_000):
            n = min(200_000, rows - start)
            columns = {"label": pa.array((random.random(n) < 0.25).astype(np.int8))}
            for i in range(13):
                values = np.floor(random.lognormal(2, 2, n)).astype(np.int64) - 2
                columns[f"I{i + 1}"] = pa.array(values, mask=random.random(n) < 0.1 * (i % 4))
            for i, size in enumerate(SIZES):
                ranks = np.minimum(size * random.random(n) ** 4, size - 1).astype(np.uint64)
                keys = (ranks + np.uint64(7919 * i)) * np.uint64(2_654_435_761) & np.uint64(0xFFFFFFFF)
                missing = pa.array(random.random(n) < 0.03 * (i % 3))
                column = pa.compute.if_else(missing, pa.scalar(None, pa.string()), hexadecimal(keys))
                columns[f"C{i + 1}"] = column
            pa_csv.write_csv(pa.table(columns), file, options)


def generate_apart(path: Path, rows: int) -> None:
    """Generate in another process: a child's peak memory counts what its parent held when it was started."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(generate, path, rows).result()


class PeakMemory(threading.Thread):
    """Watches the resident bytes of a process and its children, which Spark keeps its rows in; needs Linux's /proc."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self._done = process, 0, threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, self._resident())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak

    def _resident(self) -> int:
        parents, resident = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            parents[int(folder.name)], resident[int(folder.name)] = int(fields[1]), int(fields[21])
        family, found = {self.process}, -1
        while len(family) != found:
            found = len(family)
            family |= {one for one, parent in parents.items() if parent in family}
        return sum(resident.get(one, 0) for one in family) * resource.getpagesize()


class Measured(NamedTuple):
    """What a program took: seconds on the clock and of processors, and its peak resident bytes."""

    seconds: float
    cpu_seconds: float
    peak: int


def measured(program: str, *arguments: str) -> Measured:
    """Run a program in a fresh interpreter."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program, *arguments])
    watch = PeakMemory(process.pid)
    watch.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"the measured program ended with {process.returncode}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Measured(seconds, usage.ru_utime + usage.ru_stime, max(peak, watch.stop()))


def same_ids(ours: Path, theirs: Path) -> bool:
    """Compare the ids of every category in every part."""
    names = [f"C{i}" for i in range(1, 27)]

    def ids(folder: Path, name: str) -> list[pa.ChunkedArray]:
        return [pq.read_table(file, columns=[name]).column(0) for file in sorted(folder.glob("*.parquet"))]

    return all(
        pa.chunked_array([chunk for column in ids(ours / part, name) for chunk in column.chunks])
        == pa.chunked_array([chunk for column in ids(theirs / part, name) for chunk in column.chunks])
        for part in SPLIT
        for name in names
    )


def compile_modules() -> None:
    """Write the bytecode that pip writes for peers: where Python may not, every run would compile a checkout again."""
    spec = importlib.util.find_spec("viviane")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        compileall.compile_dir(folder, quiet=1)


def in_turns(
    folder: Path, raw: Path, threads: int, own: dict[str, str], peers: Sequence[Peer], rounds: int
) -> dict[str, list[Measured]]:
    """Run all programs in turns, ours first: the first of all reads libraries that no cache has."""
    found: dict[str, list[Measured]] = {name: [] for name in (*own, *(one.name for one in peers))}
    for _ in range(rounds):
        for name, program in own.items():
            shutil.rmtree(folder / "ours", ignore_errors=True)
            found[name].append(measured(program, str(raw), str(folder / "ours"), str(threads), "4GB"))
        for peer in peers:
            theirs = folder / peer.module
            found[peer.name].append(measured(peer.program, str(raw), str(theirs), str(threads)))
            if not same_ids(folder / "ours", theirs):
                raise SystemExit(f"viviane and {peer.name} gave different ids")
            shutil.rmtree(theirs)
        shutil.rmtree(folder / "ours")
    return found


def compare(folder: Path, rows: int, threads: int, peers: Sequence[Peer]) -> None:
    compile_modules()
    raw, shape = folder / "raw.tsv", {"rows": rows, "dense": 13, "categorical": 26, "threads": threads}
    generate_apart(raw, rows)
    small = rows <= SMALL_ROWS
    own = {"": VIVIANE, " by `viviane etl`": COMMAND} if small else {"": VIVIANE}
    found = in_turns(folder, raw, threads, own, peers, SMALL_ROUNDS if small else 1)
    for peer, way in product(peers, own):
        (seconds, cpu, peak), (its, its_cpu, its_peak) = (
            (float(np.median([one.seconds for one in runs])), float(np.median([one.cpu_seconds for one in runs])),
             max(one.peak for one in runs))
            for runs in (found[way], found[peer.name])
        )  # fmt: skip
        pandas = peer.name == "pandas"  # the goals are set against it
        has_goal = peer.name == "Polars" and small
        case = f"criteo text to Parquet{way}" + ("" if pandas else f", beside {peer.name}")
        shared = {"bench": "etl", "case": case, "peer": peer.name, "shape": shape}
        times = [one.seconds for one in found[way]]
        record(
            metric="time", value=seconds, unit="s", better="lower", peer_value=its, spread=(min(times), max(times)),
            goal=its / GOAL_TIMES_FASTER if pandas else its if has_goal else None, **shared,
        )  # fmt: skip
        record(
            metric="processor time", value=cpu, unit="s", better="lower", peer_value=its_cpu,
            goal=its_cpu if has_goal else None, **shared,
        )  # fmt: skip
        record(
            metric="speed", value=rows / seconds / 1e3, unit="thousand rows/s", better="higher",
            peer_value=rows / its / 1e3, **shared,
        )  # fmt: skip
        record(
            metric="peak memory", value=peak / 1e6, unit="MB", better="lower", peer_value=its_peak / 1e6,
            goal=its_peak * GOAL_MEMORY_SHARE / 1e6 if pandas else None, **shared,
        )  # fmt: skip


def big(folder: Path, rows: int, threads: int) -> None:
    raw, shape = folder / "raw.tsv", {"rows": rows, "columns": 40, "memory_limit_gib": 4, "threads": threads}
    generate_apart(raw, rows)
    seconds, _, peak = measured(VIVIANE, str(raw), str(folder / "ours"), str(threads), "4GiB")
    shared = {"bench": "etl", "case": "within a memory limit of 4 GiB", "shape": shape}
    record(
        metric="peak memory", value=peak / (1 << 30), unit="GiB", better="lower", goal=BIG_LIMIT_BYTES / (1 << 30),
        **shared,
    )  # fmt: skip
    record(metric="speed", value=rows / seconds / 1e3, unit="thousand rows/s", better="higher", **shared)
    if peak > BIG_LIMIT_BYTES:
        raise SystemExit(f"the process took {peak} bytes, more than its limit of {BIG_LIMIT_BYTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few rows: shows that it runs, keeps no figures")
    parser.add_argument("--big", action="store_true", help="20 million rows inside 4 GiB instead of the comparison")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", choices=[one.name for one in PEERS], action="append", help="default: the installed")
    parser.add_argument("--folder", type=Path, help="for the files at work; a temporary one if not given")
    arguments = parser.parse_args()
    default = 20_000_000 if arguments.big else 5_000_000
    rows = arguments.rows or (50_000 if arguments.small else default)
    folder = Path(tempfile.mkdtemp(prefix="viviane-bench-etl-", dir=arguments.folder))
    try:
        if arguments.big:
            big(folder, rows, arguments.threads)
        else:
            wanted = arguments.peer or [one.name for one in PEERS if importlib.util.find_spec(one.module)]
            compare(folder, rows, arguments.threads, [one for one in PEERS if one.name in wanted])
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

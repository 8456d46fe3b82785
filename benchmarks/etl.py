"""ETL of a file in the Criteo format beside straightforward pandas: seconds and peak memory, each in a fresh process.

python benchmarks/etl.py [--small] [--rows N] [--threads N] [--big]

Both learn on the first 80% of the rows (fill 0, ln(1 + x), categories seen 6 times or more get ids by falling count)
and write three Parquet parts; the ids of both are compared. --big runs 20 million rows x 40 columns with a memory
limit of 4 GiB instead, and fails when the process took more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from record import record

# Distinct values of the 26 columns, spread as in the Criteo contest's file, the largest cut to 2 million.
SIZES = [1460, 583, 2_000_000, 1_800_000, 305, 24, 12_517, 633, 3, 93_145, 5_683, 1_900_000, 3_194]
SIZES += [27, 14_992, 1_700_000, 10, 5_652, 2_173, 4, 1_850_000, 18, 15, 286_181, 105, 142_572]
SPLIT = {"train": 0.8, "valid": 0.1, "test": 0.1}
GOAL_TIMES_FASTER = 4.0
GOAL_MEMORY_SHARE = 1 / 3
BIG_LIMIT_BYTES = 4 << 30

VIVIANE = """
import sys
from viviane.etl import run
raw, out, threads, limit = sys.argv[1:]
run("criteo", raw, out, split="rows:train=0.8,valid=0.1,test=0.1", threads=int(threads), memory_limit=limit)
"""
PANDAS = """
import sys
from pathlib import Path
import numpy as np, pandas as pd
raw, out = sys.argv[1], Path(sys.argv[2])
dense = [f"I{i}" for i in range(1, 14)]
cats = [f"C{i}" for i in range(1, 27)]
frame = pd.read_csv(raw, sep="\\t", header=None, names=["label", *dense, *cats], dtype=dict.fromkeys(cats, str))
n = len(frame)
borders = [0, round(0.8 * n), round(0.9 * n), n]
frame["label"] = frame["label"].astype("float32")
for name in dense:
    frame[name] = np.log1p(frame[name].fillna(0).clip(lower=0)).astype("float32")
for name in cats:
    counts = frame[name].iloc[: borders[1]].value_counts()
    counts = counts[counts >= 6].sort_index().sort_values(ascending=False, kind="stable")
    ids = pd.Series(np.arange(3, 3 + len(counts)), index=counts.index)
    missing = frame[name].isna()
    frame[name] = frame[name].map(ids).fillna(2).astype("int32").mask(missing, 1)
for part, start, end in zip(("train", "valid", "test"), borders, borders[1:]):
    (out / part).mkdir(parents=True)
    frame.iloc[start:end].to_parquet(out / part / "part-00000.parquet", index=False)
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


def measured(program: str, *arguments: str) -> tuple[float, int]:
    """Run a program in a fresh interpreter; returns seconds and peak resident bytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program, *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"the measured program ended with {process.returncode}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return time.perf_counter() - start, peak


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


def compare(folder: Path, rows: int, threads: int) -> None:
    raw, shape = folder / "raw.tsv", {"rows": rows, "dense": 13, "categorical": 26, "threads": threads}
    generate_apart(raw, rows)
    seconds, peak = measured(VIVIANE, str(raw), str(folder / "ours"), str(threads), "4GB")
    pandas_seconds, pandas_peak = measured(PANDAS, str(raw), str(folder / "pandas"))
    if not same_ids(folder / "ours", folder / "pandas"):
        raise SystemExit("viviane and pandas gave different ids")
    shared = {"bench": "etl", "case": "criteo text to Parquet", "peer": "pandas", "shape": shape}
    record(
        metric="time", value=seconds, unit="s", better="lower", peer_value=pandas_seconds,
        goal=pandas_seconds / GOAL_TIMES_FASTER, **shared,
    )  # fmt: skip
    record(
        metric="speed", value=rows / seconds / 1e3, unit="thousand rows/s", better="higher",
        peer_value=rows / pandas_seconds / 1e3, **shared,
    )  # fmt: skip
    record(
        metric="peak memory", value=peak / 1e6, unit="MB", better="lower", peer_value=pandas_peak / 1e6,
        goal=pandas_peak * GOAL_MEMORY_SHARE / 1e6, **shared,
    )  # fmt: skip


def big(folder: Path, rows: int, threads: int) -> None:
    raw, shape = folder / "raw.tsv", {"rows": rows, "columns": 40, "memory_limit_gib": 4, "threads": threads}
    generate_apart(raw, rows)
    seconds, peak = measured(VIVIANE, str(raw), str(folder / "ours"), str(threads), "4GiB")
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
    parser.add_argument("--folder", type=Path, help="for the files at work; a temporary one if not given")
    arguments = parser.parse_args()
    default = 20_000_000 if arguments.big else 5_000_000
    rows = arguments.rows or (50_000 if arguments.small else default)
    folder = Path(tempfile.mkdtemp(prefix="viviane-bench-etl-", dir=arguments.folder))
    try:
        (big if arguments.big else compare)(folder, rows, arguments.threads)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""Reader throughput by format, beside plain copies of the same files and PyTorch's DataLoader over pyarrow.

python benchmarks/formats.py [--small]

The rows have the Criteo layout (1 label, 13 dense and 26 one-hot columns) and come from the page cache. A round
measures every case once, so that a disturbance hits all of them; figures are medians over rounds, ratios are taken
within a round. A copy reads the file in pieces as large as a batch into two buffers by turns: the least that a reader
must do whose consumer holds one batch while the next is made.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
from torch.utils.data import DataLoader

from reader import ArrowBatches
from record import record
from viviane.data import Dataset, Reader
from viviane.data.conversion import convert
from viviane.data.formats import Format, HugectrParquetFormat, NormFormat, RawAsyncFormat, RawFormat, VivianeFormat
from viviane.data.synthetic import SyntheticConfig, generate

FORMATS: dict[str, Format] = {
    "viviane": VivianeFormat(),
    "viviane, columns": VivianeFormat(layout="columns"),
    "raw": RawFormat(),
    "raw-async": RawAsyncFormat(),
    "norm": NormFormat(check_sum=False),
    "norm, check sums": NormFormat(),
    "hugectr-parquet": HugectrParquetFormat(),
}
GOAL = 0.8  # of the speed at which the same file is copied out of the page cache
PEER = "DataLoader over pyarrow.dataset.to_batches"
BATCH = 16_384


def copy_files(files: list[Path], row_bytes: int, threads: int) -> float:
    """Read the files in pieces of a batch into warm buffers; return seconds."""
    pairs = [[bytearray(BATCH * row_bytes) for _ in range(2)] for _ in range(threads)]

    def copy(worker: int) -> None:
        for file in files:
            size = file.stat().st_size
            with file.open("rb", buffering=0) as source:
                source.seek(size * worker // threads)
                left = size * (worker + 1) // threads - source.tell()
                while left > 0:
                    pairs[worker].reverse()
                    left -= source.readinto(memoryview(pairs[worker][0])[:left])

    start = time.perf_counter()
    if threads == 1:
        copy(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(copy, range(threads)))
    return time.perf_counter() - start


def data_bytes(data: Dataset) -> int:
    return sum(file.stat().st_size for file in data.files)


def read(reader: Reader) -> float:
    """Take one epoch; return seconds. The reader is that of the epochs before, as in training: its buffers are warm."""
    start = time.perf_counter()
    rows = sum(len(batch) for batch in reader)
    assert rows == len(reader.dataset)
    return time.perf_counter() - start


def read_peer(data: Dataset, shuffle: bool, threads: int) -> float:
    pyarrow.set_cpu_count(threads)  # the peer decodes in Arrow's own pool
    start = time.perf_counter()
    rows = sum(len(batch[0]) for batch in DataLoader(ArrowBatches(data, BATCH, shuffle), batch_size=None))
    assert rows == len(data)
    return time.perf_counter() - start


def main() -> None:
    rows, rounds = (400_000, 3) if "--small" in sys.argv else (1_000_000, 5)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        generate(SyntheticConfig(rows=rows), root / "parquet")
        sets = {"parquet": Dataset(root / "parquet")}
        for name, kind in FORMATS.items():
            sets[name] = convert(sets["parquet"], root / name.replace(", ", "-"), kind)
        for threads in (1, 2):
            for shuffle in (False, True):
                measure(sets, shuffle, threads, rounds)


def measure(sets: dict[str, Dataset], shuffle: bool, threads: int, rounds: int) -> None:
    cases: dict[str, Callable[[], float]] = {"peer": partial(read_peer, sets["parquet"], shuffle, threads)}
    for name, data in sets.items():
        cases[name] = partial(read, data.reader(BATCH, shuffle=shuffle, num_threads=threads))
        cases[f"copy {name}"] = partial(copy_files, data.files, max(1, data_bytes(data) // len(data)), threads)
    for case in cases.values():
        case()  # into the page cache; check sums and ids are compared the first time
    seconds = {name: np.array([]) for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            seconds[name] = np.append(seconds[name], case())
    rows = len(sets["parquet"])
    for name, data in sets.items():
        how = f"{name}, {'shuffled' if shuffle else 'in order'}, {threads} thread(s)"
        shape = {"rows": rows, "dense": 13, "one_hot": 26, "batch_size": BATCH, "threads": threads}
        speeds = rows / seconds[name] / 1e6
        low, high = np.percentile(speeds, [20, 80])
        record(
            bench="formats", case=how, metric="rows", value=float(np.median(speeds)), unit="M rows/s", better="higher",
            peer=PEER, peer_value=float(np.median(rows / seconds["peer"] / 1e6)), spread=(float(low), float(high)),
            shape=shape,
        )  # fmt: skip
        size = data_bytes(data)
        record(
            bench="formats", case=how, metric="bytes of the file", value=float(np.median(size / seconds[name] / 1e9)),
            unit="GB/s", better="higher", peer="readinto of the same file",
            peer_value=float(np.median(size / seconds[f"copy {name}"] / 1e9)), shape=shape,
        )  # fmt: skip
        share = seconds[f"copy {name}"] / seconds[name]
        record(
            bench="formats", case=how, metric="share of the speed of a copy", value=float(np.median(share)), unit="",
            better="higher", goal=GOAL if name == "viviane" and not shuffle else None,
            spread=(float(np.percentile(share, 20)), float(np.percentile(share, 80))), shape=shape,
        )  # fmt: skip


if __name__ == "__main__":
    main()

"""Rows a second that the reader delivers, beside the straightforward way: pyarrow.dataset in a torch DataLoader.

python benchmarks/reader.py [--small]

The data set has the Criteo layout (1 label, 13 dense and 26 one-hot columns) and is read from the page cache:
it is read once before measuring. Each case takes whole epochs and touches every batch's shape only.

Short epochs, in Viviane's format: what passes between the last batch of one and the first of the next, for a consumer
that takes its time for each batch, and rows a second over many of them for one that does not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.dataset
import torch
from torch.utils.data import DataLoader, IterableDataset

from record import record
from viviane.data import Dataset, Reader, convert
from viviane.data.synthetic import SyntheticConfig, generate

# Five times the fastest model seen on 2 cores: Wide & Deep of dim 4 with one layer of 32, 0.80 M samples/s.
GOAL_MILLION_ROWS = 4.0
PEER = "DataLoader over pyarrow.dataset.to_batches"
SHORT = 16  # batches


class ArrowBatches(IterableDataset):  # type: ignore[type-arg]
    """What one writes in an afternoon: Arrow batches, columns stacked, rows permuted within an Arrow batch."""

    def __init__(self, data: Dataset, batch_size: int, shuffle: bool) -> None:
        self.data, self.batch_size, self.shuffle = data, batch_size, shuffle
        self.groups = [
            [column.name for column in columns]
            for columns in (data.schema.labels, data.schema.dense, data.schema.one_hot)
        ]

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        files = [str(file) for file in self.data.files]
        for part in pyarrow.dataset.dataset(files, format="parquet").to_batches(batch_size=self.batch_size):
            order = torch.randperm(part.num_rows) if self.shuffle else None
            stacked = [
                torch.stack([torch.from_numpy(part.column(name).to_numpy().copy()) for name in names], 1)
                for names in self.groups
            ]
            yield stacked if order is None else [matrix[order] for matrix in stacked]


def speeds(epoch: Callable[[], int], repeats: int) -> list[float]:
    """Return the million rows a second of each repetition."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        rows = epoch()
        found.append(rows / (time.perf_counter() - start) / 1e6)
    return found


def main() -> None:
    small = "--small" in sys.argv
    rows, repeats = (400_000, 1) if small else (8_000_000, 5)
    with tempfile.TemporaryDirectory() as folder:
        generate(SyntheticConfig(rows=rows), Path(folder) / "train")
        data = Dataset(Path(folder) / "train")
        data.check()
        for threads in (1, 2):
            for batch_size in (2048, 16384):
                for shuffle in (False, True):
                    measure(data, batch_size, shuffle, threads, repeats)
        for batch_size, step_s in ((8192, 1.5e-3), (65_536, 10e-3)):
            rows = batch_size * SHORT
            generate(SyntheticConfig(rows=rows), Path(folder) / f"rows-{rows}")
            data = convert(Dataset(Path(folder) / f"rows-{rows}"), Path(folder) / f"short-{rows}", "viviane")
            data.check()
            short_epochs(data, batch_size, step_s, 3 if small else 20)


def short_epochs(data: Dataset, batch_size: int, step_s: float, epochs: int) -> None:
    """Take shuffled epochs of 16 batches, each by itself and read on, in turn."""
    pauses: dict[str, list[float]] = {"each by itself": [], "read on": []}
    rates: dict[str, list[float]] = {name: [] for name in pauses}
    for _ in range(3):
        for name in pauses:
            until = epochs if name == "read on" else 0
            with data.reader(batch_size, shuffle=True, until_epoch=until) as reader:
                pauses[name] += pauses_between(reader, epochs, step_s)
            with data.reader(batch_size, shuffle=True, until_epoch=until) as reader:
                rates[name] += speeds(lambda: sum(len(batch) for _ in range(epochs) for batch in reader), 1)
    shape = {"rows": data.num_rows, "dense": 13, "one_hot": 26, "batch_size": batch_size, "threads": 2}
    for name, found in pauses.items():
        case = f"criteo layout, {SHORT} batches of {batch_size} an epoch, shuffled, {name}"
        low, high = np.percentile(found, [20, 80])
        record(
            bench="reader", case=case, metric=f"last batch to first, {step_s * 1e3:g} ms a step",
            value=float(np.median(found)), unit="ms", better="lower", spread=(float(low), float(high)), shape=shape,
        )  # fmt: skip
        record(
            bench="reader", case=case, metric="speed", value=float(np.median(rates[name])), unit="M rows/s",
            better="higher", spread=(min(rates[name]), max(rates[name])), shape=shape,
        )  # fmt: skip


def pauses_between(reader: Reader, epochs: int, step_s: float) -> list[float]:
    """Return the milliseconds that the first batch of each epoch but the first is waited for."""
    found = []
    for epoch in range(epochs):
        start = time.perf_counter()
        for number, _ in enumerate(reader):
            if number == 0 and epoch:
                found.append((time.perf_counter() - start) * 1e3)
            time.sleep(step_s)
    return found


def measure(data: Dataset, batch_size: int, shuffle: bool, threads: int, repeats: int) -> None:
    pyarrow.set_cpu_count(threads)  # the peer decodes in Arrow's own pool
    reader = data.reader(batch_size, shuffle=shuffle, num_threads=threads)
    ours = speeds(lambda: sum(len(batch) for batch in reader), repeats)
    loader = DataLoader(ArrowBatches(data, batch_size, shuffle), batch_size=None)
    theirs = speeds(lambda: sum(len(batch[0]) for batch in loader), repeats)
    low, high = np.percentile(ours, [20, 80])
    record(
        bench="reader",
        case=f"criteo layout, {'shuffled' if shuffle else 'in order'}, batch {batch_size}, {threads} thread(s)",
        metric="speed",
        value=float(np.median(ours)),
        unit="M rows/s",
        better="higher",
        goal=GOAL_MILLION_ROWS if shuffle and batch_size == 16384 and threads == 2 else None,
        peer=PEER,
        peer_value=float(np.median(theirs)),
        spread=(float(low), float(high)),
        shape={"rows": data.num_rows, "dense": 13, "one_hot": 26, "batch_size": batch_size, "threads": threads},
    )


if __name__ == "__main__":
    main()

"""From files to a GPU: what the reader delivers alone, what arrives on the device, and training from files.

python benchmarks/feed_gpu.py [--small]

A sample has 912 bytes: 1 label, 13 dense numbers and 214 ids of 32 bits, as many as MLPerf's DLRM-DCNv2 has. Rows are
in Viviane's format and come from the page cache, one file under several names. The floor is the copy of one batch's
bytes from page-locked memory. Training is the zoo's DLRM (dim 128, bf16) on 26 ids a row: the same steps on batches
that lie on the device, and from files, epoch after epoch as fit does them. What waits for the first window of rows, at
the beginning of a fit, is a figure of its own; the speed is that of the steps after the first 40.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from from_files import named_again
from record import record
from viviane.batch import Batch
from viviane.bench.samples import Samples, columns_of, criteo_schema
from viviane.bench.train_libraries import Training
from viviane.bench.workload import TABLE_SIZES, Tables
from viviane.data import Dataset, write_dataset
from viviane.training.feed import DeviceFeed, ShuffleOn

GPU = torch.device("cuda", 0)
SMALL = "--small" in sys.argv
BATCH = 65_536
EPOCHS = 3
EPOCH_ROWS = 1 << 23
COLD_STEPS = 40
GOAL_SAMPLES = 13e6
WIDE = criteo_schema((1_000_000,) * 214)


def write(folder: Path, files: int) -> Dataset:
    """Write four blocks of rows, and name their file several times."""
    columns = columns_of(WIDE, Samples(WIDE, "uniform").batch(131_072))
    return named_again(write_dataset(folder, WIDE, [columns] * 4, format="viviane"), files)


def speed(batches: Callable[[], Iterable[Batch]], repeats: int) -> list[float]:
    """Return the samples a second of each repetition."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        rows = sum(len(batch) for batch in batches())
        torch.cuda.synchronize()
        found.append(rows / (time.perf_counter() - start))
    return found


def copy_speed() -> float:
    """Return the samples a second that a plain copy of one batch's bytes allows."""
    here = torch.empty(BATCH * 912, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=GPU)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, stop):
        for _ in range(10):
            there.copy_(here, non_blocking=True)
        event.record()
    torch.cuda.synchronize()
    return 10 * BATCH / start.elapsed_time(stop) * 1e3


def reading(data: Dataset, repeats: int) -> None:
    floor = copy_speed()
    for shuffle in (False, True):
        how = "shuffled" if shuffle else "in order"
        for threads in (2, 4, 8, 14) if not shuffle else (4, 8, 14):
            reader = data.reader(BATCH, shuffle=shuffle, num_threads=threads, pin_memory=True)
            ways: dict[str, Iterable[Batch]] = {"reader alone": reader, "to the device": DeviceFeed(reader, GPU)}
            if shuffle:
                ways["to the device, put in order by the host"] = DeviceFeed(reader, GPU, shuffle_on="host")
            for name, one in ways.items():
                found = speed(lambda: one, repeats + 1)[1:]  # noqa: B023 - called at once
                record(
                    bench="feed_gpu", case=f"912-byte samples, {how}, {threads} threads", metric=name,
                    value=statistics.median(found) / 1e6, unit="M samples/s", better="higher", goal=GOAL_SAMPLES / 1e6,
                    floor=None if name == "reader alone" else floor / 1e6,
                    spread=(min(found) / 1e6, max(found) / 1e6),
                    shape={"rows": len(data), "batch": BATCH, "bytes": 912},
                )  # fmt: skip


def sharing(data: Dataset, repeats: int) -> None:
    """Record how fast one of several processes gets its share of every batch, the others not running."""
    floor, threads = copy_speed(), 4
    for ranks in (2, 4, 8):
        reader = data.reader(BATCH, shuffle=True, num_threads=threads, pin_memory=True, num_ranks=ranks)
        feed = DeviceFeed(reader, GPU, shuffle_on="device")
        found = [ranks * one for one in speed(lambda: feed, repeats + 1)[1:]]  # noqa: B023 - called at once
        record(
            bench="feed_gpu", case=f"912-byte samples, shuffled, {threads} threads of one of {ranks} processes",
            metric="to the device, samples of all processes", value=statistics.median(found) / 1e6,
            unit="M samples/s", better="higher", floor=ranks * floor / 1e6,
            spread=(min(found) / 1e6, max(found) / 1e6), shape={"rows": len(data), "batch": BATCH, "bytes": 912},
        )  # fmt: skip


class Steps:
    """Steps of one trainer on batches on the device and from files, in turn."""

    def __init__(self, batch: int) -> None:
        sizes = tuple(min(size, 1_000_000) for size in TABLE_SIZES["criteo-terabyte"])
        self.what = Training("dlrm", Tables(sizes, 128, "sgd", GPU), batch, precision="bf16")
        self.trainer, self.there = self.what.build().trainer, self.what.batches()
        self.trainer.module.train()
        self.shape = {"tables": len(sizes), "rows": sum(sizes), "dim": 128, "batch": batch}

    def run(self, batches: Iterator[Batch], cold: int) -> tuple[float, float]:
        """Return the samples a second after the first `cold` steps, and the seconds until the first batch is there."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        first = next(batches)
        torch.cuda.synchronize()
        waited = time.perf_counter() - start
        self.trainer.train_step(first)
        for _ in range(cold - 1):
            self.trainer.train_step(next(batches))
        torch.cuda.synchronize()
        start, count = time.perf_counter(), 0
        for one in batches:
            self.trainer.train_step(one)
            count += len(one)
        torch.cuda.synchronize()
        return count / (time.perf_counter() - start), waited

    def on_device(self, count: int) -> float:
        """Return the samples a second of steps on batches that lie on the device."""
        return self.run(iter(self.there * (count // len(self.there))), COLD_STEPS)[0]

    def from_files(self, data: Dataset, where: ShuffleOn) -> tuple[float, float, int]:
        """Return what `run` does, of epochs from files, and the number of batches."""

        def epochs() -> Iterator[Batch]:
            feed.read_on(EPOCHS)
            for _ in range(EPOCHS):
                yield from feed

        with DeviceFeed.open(data, self.what.batch, GPU, shuffle=True, shuffle_on=where) as feed:
            return *self.run(epochs(), COLD_STEPS), len(feed)


def training(batch: int) -> None:
    steps = Steps(batch)
    ways: dict[ShuffleOn, str] = {"auto": "", "host": ", put in order by the host"}
    shares: dict[ShuffleOn, list[float]] = {way: [] for way in ways}
    files: dict[ShuffleOn, list[float]] = {way: [] for way in ways}
    waits: dict[ShuffleOn, list[float]] = {way: [] for way in ways}
    memory = []
    with tempfile.TemporaryDirectory() as folder:
        written = steps.what.write(Path(folder) / "rows")
        data = named_again(written, max(1, EPOCH_ROWS // len(written)))
        steps.on_device(2 * COLD_STEPS)
        for repeat in range(2 if SMALL else 6):
            for way in ways:
                memory.append(steps.on_device(max(len(data) // batch, 4 * COLD_STEPS)))
                found, waited, epoch_batches = steps.from_files(data, way)
                if repeat:  # the first has page-locked memory made
                    files[way].append(found)
                    shares[way].append(found / memory[-1])
                    waits[way].append(waited * 1e3)
    shape = {**steps.shape, "epoch_batches": epoch_batches, "epochs": EPOCHS}
    for way, said in ways.items():
        case = f"DLRM training from files, batch {batch}{said}"
        record(
            bench="feed_gpu", case=case, metric="speed", value=statistics.median(files[way]) / 1e6,
            unit="M samples/s", better="higher", peer="batches on the device",
            peer_value=statistics.median(memory) / 1e6,
            spread=(min(files[way]) / 1e6, max(files[way]) / 1e6), shape=shape,
        )  # fmt: skip
        record(
            bench="feed_gpu", case=case, metric="share of the speed without reading",
            value=statistics.median(shares[way]), unit="", better="higher", goal=1.0,
            spread=(min(shares[way]), max(shares[way])), shape=shape,
        )  # fmt: skip
        record(
            bench="feed_gpu", case=case, metric="first batch of a fit on the device after",
            value=statistics.median(waits[way]), unit="ms", better="lower", spread=(min(waits[way]), max(waits[way])),
            shape=shape,
        )  # fmt: skip


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    with tempfile.TemporaryDirectory() as folder:
        data = write(Path(folder) / "wide", 2 if SMALL else 8)
        reading(data, 1 if SMALL else 2)
        sharing(data, 1 if SMALL else 2)
    for batch in (8192, BATCH):
        training(batch)


if __name__ == "__main__":
    main()

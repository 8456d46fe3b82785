"""From files to a GPU: what the reader delivers alone, what arrives on the device, and training from files.

python benchmarks/feed_gpu.py [--small]

A sample has 912 bytes: 1 label, 13 dense numbers and 214 ids of 32 bits, as many as MLPerf's DLRM-DCNv2 has. Rows are
in Viviane's format and come from the page cache, one file under several names. The floor is the copy of one batch's
bytes from page-locked memory. Training is the zoo's DLRM (dim 128, bf16) on 26 ids a row: the same steps on batches
that lie on the device, and from files, four epochs in a row as fit does them: nothing of the first is read beforehand.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from record import record
from viviane.batch import Batch
from viviane.bench.samples import Samples, columns_of, criteo_schema
from viviane.bench.train_libraries import Training
from viviane.bench.workload import TABLE_SIZES, Tables
from viviane.data import Dataset, write_dataset
from viviane.training.feed import DeviceFeed

GPU = torch.device("cuda", 0)
SMALL = "--small" in sys.argv
BATCH = 65_536
EPOCHS = 4
GOAL_SAMPLES = 13e6
WIDE = criteo_schema((1_000_000,) * 214)


def write(folder: Path, files: int) -> Dataset:
    """Write four blocks of rows, and name their file several times: drawing rows would take longer than measuring."""
    columns = columns_of(WIDE, Samples(WIDE, "uniform").batch(131_072))
    first = write_dataset(folder, WIDE, [columns] * 4, format="viviane").files[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    [entry] = manifest["files"]
    for number in range(1, files):
        name = first.name.replace("00000", f"{number:05}")
        (folder / name).hardlink_to(first)
        manifest["files"].append({**entry, "name": name})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Dataset(folder)


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
            feed = DeviceFeed(reader, GPU)
            for name, one in (("reader alone", reader), ("to the device", feed)):
                found = speed(lambda: one, repeats + 1)[1:]  # noqa: B023 - called at once
                record(
                    bench="feed_gpu", case=f"912-byte samples, {how}, {threads} threads", metric=name,
                    value=statistics.median(found) / 1e6, unit="M samples/s", better="higher", goal=GOAL_SAMPLES / 1e6,
                    floor=floor / 1e6 if name == "to the device" else None, spread=(min(found) / 1e6, max(found) / 1e6),
                    shape={"rows": len(data), "batch": BATCH, "bytes": 912},
                )  # fmt: skip


def training(batch: int) -> None:
    """Time steps of one trainer on batches on the device and from files, in turn."""
    sizes = tuple(min(size, 1_000_000) for size in TABLE_SIZES["criteo-terabyte"])
    what = Training("dlrm", Tables(sizes, 128, "sgd", GPU), batch, precision="bf16")
    trainer, there = what.build().trainer, what.batches()
    with tempfile.TemporaryDirectory() as folder:
        feed = DeviceFeed.open(what.write(Path(folder) / "rows"), batch, GPU, shuffle=True)
        trainer.module.train()

        def run(batches: Iterable[Batch]) -> float:
            torch.cuda.synchronize()
            start, count = time.perf_counter(), 0
            for one in batches:
                trainer.train_step(one)
                count += len(one)
            torch.cuda.synchronize()
            return count / (time.perf_counter() - start)

        def epochs() -> Iterator[Batch]:
            feed.read_on(feed.epoch + EPOCHS)
            for _ in range(EPOCHS):
                yield from feed

        for one in (there, epochs()):
            run(one)
        pairs = [(run(there * 8), run(epochs())) for _ in range(2 if SMALL else 7)]
    memory, files = (statistics.median(one) for one in zip(*pairs, strict=True))
    ratios = [b / a for a, b in pairs]
    shape = {"tables": len(sizes), "rows": sum(sizes), "dim": 128, "batch": batch}
    shape |= {"epoch_batches": len(feed), "epochs": EPOCHS}
    record(
        bench="feed_gpu", case=f"DLRM training from files, batch {batch}", metric="speed", value=files / 1e6,
        unit="M samples/s", better="higher", peer="batches on the device", peer_value=memory / 1e6, shape=shape,
    )  # fmt: skip
    record(
        bench="feed_gpu", case=f"DLRM training from files, batch {batch}", metric="share of the speed without reading",
        value=statistics.median(ratios), unit="", better="higher", goal=1.0, spread=(min(ratios), max(ratios)),
        shape=shape,
    )  # fmt: skip


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    with tempfile.TemporaryDirectory() as folder:
        reading(write(Path(folder) / "wide", 2 if SMALL else 8), 1 if SMALL else 2)
    for batch in (8192, BATCH):
        training(batch)


if __name__ == "__main__":
    main()

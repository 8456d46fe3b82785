"""Steps on batches that come from files: what train_gpu.py and train_group.py measure with --files.

Rows are in Viviane's format and come from the page cache, one file under several names; epochs follow one another as in
`fit`, shuffled. Timed are the steps after two windows of rows, when the memory of windows has been made, and at least
those of another one, in rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import torch

import viviane as vv
from embedding_gpu import SMALL
from viviane.batch import Bag, Batch
from viviane.bench.samples import columns_of
from viviane.data import Dataset, write_dataset
from viviane.data.reader import DEFAULT_SHUFFLE_ROWS
from viviane.parallel import Group
from viviane.training.feed import DeviceFeed

EPOCH_ROWS = 1 << (12 if SMALL else 22)
WINDOW_ROWS = EPOCH_ROWS if SMALL else DEFAULT_SHUFFLE_ROWS
LEAST_STEPS = 40
ROUNDS = 2 if SMALL else 5


def write(folder: Path, schema: vv.Schema, batches: Sequence[Batch]) -> Dataset:
    """Write batches, whose bags have one number of ids, as a data set of some million rows."""
    data = write_dataset(folder, schema, [columns_of(schema, joined(batches))], format="viviane")
    return named_again(data, max(1, EPOCH_ROWS // len(data)))


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch, on the host, of the rows of several."""
    here, size = [batch.to("cpu") for batch in batches], sum(batch.size for batch in batches)
    first = here[0]
    bags = {}
    for name, bag in first.bags.items():
        values = torch.cat([batch.bags[name].values for batch in here])
        bags[name] = Bag(values, torch.arange(size + 1) * (len(bag.values) // first.size))
    labels, dense, one_hot = (
        torch.cat([getattr(batch, part) for batch in here]) for part in ("labels", "dense", "one_hot")
    )
    return Batch(first.layout, labels, dense, one_hot, bags)


def named_again(data: Dataset, times: int) -> Dataset:
    """Name each file of a data set several times: drawing rows would take longer than measuring."""
    folder = data.files[0].parent
    manifest = json.loads((folder / "manifest.json").read_text())
    entries = list(manifest["files"])
    for number in range(len(entries), times * len(entries)):
        entry = entries[number % len(entries)]
        name = f"part-{number:05}.rows"
        (folder / name).hardlink_to(folder / entry["name"])
        manifest["files"].append({**entry, "name": name})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Dataset(folder)


def time_ms(trainer: vv.Trainer, data: Dataset, rows: int, group: Group | None = None) -> np.ndarray:
    """Return the milliseconds of a step from files, of each round of many.

    Args:
        trainer: whose steps they are.
        data: the rows.
        rows: of a batch, over all processes.
        group: the processes.
    """
    cold = max(LEAST_STEPS, 2 * -(-WINDOW_ROWS // rows))
    steps = max(LEAST_STEPS, -(-WINDOW_ROWS // rows // ROUNDS))
    epochs = -(-(cold + ROUNDS * steps) * rows // len(data))

    def batches() -> Generator[Batch, None, None]:
        feed.read_on(epochs)
        for _ in range(epochs):
            yield from feed

    found = []
    options = {"shuffle": True, "drop_last": True}
    with DeviceFeed.open(data, rows, trainer.device, group, **options) as feed:
        every = batches()
        for _ in range(cold):
            trainer.train_step(next(every))
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                trainer.train_step(next(every))
            torch.cuda.synchronize()
            found.append((time.perf_counter() - start) / steps * 1e3)
        every.close()
    return np.array(found)

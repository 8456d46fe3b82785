"""Tables larger than memory on this machine: pass switches beside the disk's sequential rate, and a whole run.

Both run in a control group, so that the page cache of their files counts as memory and the disk is really used.

    python benchmarks/large_tables.py                  # pass switches
    python benchmarks/large_tables.py --run --folder /disk --gigabytes 20 --memory-gib 4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memory_limit import Limited, can_limit, run_limited
from record import ROOT, record

BENCH = "large_tables"
PIECE, PAGE = 8 << 20, 4096
PASSES = 5
ROW_BYTES = 530
"""Of a row of the pass switches in memory: 64 numbers, their state, and what is noted of a slot."""


# Pass switches ------------------------------------------------------------------------------------------------


class Disk:
    """A file of the disk's own, written once: it has its place there, as the rows of tables have.

    Args:
        folder: of the file.
        size: of the file in bytes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._path, self._size = folder / "sequential", size
        self._data = mmap.mmap(-1, PIECE)
        self._data.write(np.random.default_rng(0).integers(0, 255, PIECE, np.uint8).tobytes())
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT)
        self._through(os.pwritev, self._file)

    def rates(self) -> tuple[float, float]:
        """Write the file in place and read it, in bytes a second, the write with fsync.

        Both go past the page cache, which may keep pages that it was asked to drop, and give more than the disk has.
        """
        file = os.open(self._path, os.O_RDWR | os.O_DIRECT)
        found = self._size / self._through(os.pwritev, file), self._size / self._through(os.preadv, file)
        os.close(file)
        return found

    def _through(self, function: Callable[[int, list[mmap.mmap], int], int], file: int) -> float:
        start = time.perf_counter()
        for place in range(0, self._size, PIECE):
            function(file, [self._data], place)
        os.fsync(file)
        return time.perf_counter() - start


def sync_rows() -> None:
    """Return when what was written to the rows of tables is on the disk: an fsync, as the sequential file has."""
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "rows.bin" in str(one.readlink()):
                os.fsync(int(one.name))


def switches(folder: Path, rows: int, share: float, known: bool) -> None:
    """Print, as JSON, seconds and bytes of pass switches and the disk's rates, in turn."""
    import torch

    from viviane.config import AdaGrad
    from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
    from viviane.embedding.cache_sizes import CacheSettings, slot_bytes
    from viviane.training.passes import PassPlan, begin_pass, tiered_storages

    table = TableConfig(name="item", num_rows=rows, dim=64, init="zero")
    room = int(rows * share * 1.05) + 1000
    cache = CacheSettings(tables={"item": room * slot_bytes(table, AdaGrad())}, folder=folder)
    emb = EmbeddingCollection([table], [FeatureConfig(name="item", table="item")], AdaGrad(), cache=cache)
    [storage] = tiered_storages(emb)
    random = np.random.default_rng(1)
    row_bytes = storage.layouts["item"].row_bytes
    zeros = np.zeros((1 << 16, row_bytes), np.uint8)
    for first in range(0, rows, len(zeros)):  # all rows are on disk
        storage.write_rows("item", first, zeros[: min(len(zeros), rows - first)])
    sync_rows()
    sets = [np.flatnonzero(random.random(rows) < share) for _ in range(PASSES)]
    plan = PassPlan(emb, [{"item": keys} for keys in sets])
    plan.prepare(0)
    disk = Disk(folder, 1 << 29)
    found, before = [], np.zeros(0, np.int64)
    first_kept = PASSES if known else 2  # in the first epoch rows stand in the order of their ids
    for number in range(first_kept + PASSES - 1):
        keys, is_kept = sets[number % PASSES], number >= first_kept
        rates = [disk.rates()] if is_kept else []
        start = time.perf_counter()
        moved = plan.begin(number % PASSES) if known else begin_pass(emb, {"item": keys})
        sync_rows()
        seconds = time.perf_counter() - start
        # Of the rows that one pass has and the other has not, some are in memory still.
        pages = [
            PAGE * len(np.unique(random.choice(own, min(count, len(own)), replace=False) * row_bytes // PAGE))
            for own, count in ((np.setdiff1d(keys, before), moved.read), (np.setdiff1d(before, keys), moved.written))
        ]
        if is_kept:  # the disk is shared: its rates are those before and after the switch
            rates.append(disk.rates())
            written, read = np.mean(rates, axis=0).tolist()
            counts = {"read": moved.read, "written": moved.written, "pages": pages}
            found.append(counts | {"seconds": seconds, "disk": (written, read)})
        before = keys
        for part in np.array_split(keys, -(-len(keys) // 65_536)):  # a step on every row: all are dirty
            emb({"item": torch.from_numpy(part)}).flat.sum().backward()
            emb.step(lr=0.1)
    print(json.dumps({"row_bytes": row_bytes, "switches": found}))


def measure_switches(folder: Path, rows: int, limit: int, share: float, known: bool) -> None:
    """Record the share of the disk's sequential rate that switches reach.

    It is the time in which the disk would read, and then write with fsync, the bytes that a switch has to move, by the
    rates of the same run, over the time of the switch with its fsync.
    """
    words = [sys.executable, __file__, "--worker", str(folder), str(rows), str(share), str(int(known))]
    # The rows of a pass are in memory, beside the page cache, and the keys of all passes, here and in the plan.
    own = limit + int(rows * share * (ROW_BYTES + 16 * PASSES))
    done = run_limited(words, own, timeout_s=900)
    if done.code:
        sys.exit(f"passes of {share:.0%}: exit code {done.code}\n{done.output}")
    result = json.loads(done.output.splitlines()[-1])
    shares, rates, of_pages = [], [], []
    for one in result["switches"]:
        written, read = one["disk"]
        moved = result["row_bytes"] * (one["read"] + one["written"])
        floor = result["row_bytes"] * (one["read"] / read + one["written"] / written)
        shares.append(100 * floor / one["seconds"])
        pages_read, pages_written = one["pages"]
        of_pages.append(100 * (pages_read / read + pages_written / written) / one["seconds"])
        rates.append(moved / one["seconds"] / 1e9)
        disk = f"disk {written / 1e9:.2f} GB/s written, {read / 1e9:.2f} read"
        print(f"{one['seconds']:.2f} s, {disk}: {shares[-1]:.1f} %, by pages {of_pages[-1]:.1f} %")
    shape = {"rows": rows, "row_bytes": result["row_bytes"], "share": share, "memory": own}
    case = f"pass of {share:.0%} of the rows" + (", passes known ahead" if known else "")
    common: dict[str, Any] = {"bench": BENCH, "case": case, "better": "higher", "shape": shape}
    record(**common, metric="of the disk's sequential rate, by rows", value=float(np.median(shares)), unit="%",
           spread=(min(shares), max(shares)), goal=70.0 if known else None)  # fmt: skip
    if not known:
        # A disk moves whole pages: where rows keep their places, no order is faster than those that hold the rows.
        record(**common, metric="of the disk's sequential rate, by pages that hold the rows", unit="%", goal=70.0,
               value=float(np.median(of_pages)), spread=(min(of_pages), max(of_pages)))  # fmt: skip
    record(**common, metric="pass switch", value=float(np.median(rates)), unit="GB/s")


# A whole run --------------------------------------------------------------------------------------------------


def whole_run(folder: Path, gigabytes: float, limit: int, rows: int) -> None:
    """Train, save, evaluate and resume from the command line under a limit of memory; record speed and memory.

    Ids are uniform: nearly every one is another row, so that rows leave memory for the disk.
    """
    dim, columns = 32, 2
    num_ids = int(gigabytes * 1e9 / (dim * 4 * 3) / columns)
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    viviane = [sys.executable, "-m", "viviane"]
    run_limited(
        [*viviane, "generate", str(folder / "data"), "--rows", str(rows), "--valid-rows", str(rows // 10),
         "--cardinalities", ",".join([str(num_ids)] * columns), "--num-dense", "4", "--alpha", "0"],
        limit * 4, env=env,
    )  # fmt: skip
    config = {
        "data": {"train": str(folder / "data" / "train"), "validation": str(folder / "data" / "valid")},
        "solver": {
            "device": "cpu", "batch_size": 4096, "embedding_memory": limit // 4, "embedding_folder": str(folder),
            "incremental_checkpoints": 9, "init_output_bias": False,
        },
        "model": {"zoo": "dlrm", "dim": dim, "bottom_mlp": [32, 32], "top_mlp": [32]},
        "optimizer": {"type": "adam"},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(config))
    train = [*viviane, "train", str(folder / "run.json"), "--run-folder", str(folder / "run")]
    half = rows // 4096 // 2
    stages = {
        "train and save": [*train, "--set", f"solver.max_steps={half}"],
        "evaluate": [*viviane, "evaluate", str(folder / "run" / "model"), str(folder / "data" / "valid")],
        "resume": [*train, "--resume", "--set", "solver.epochs=1"],
    }
    shape = {"gigabytes": gigabytes, "memory": limit, "rows": rows, "ids": num_ids * columns, "dim": dim}
    for name, words in stages.items():
        done = run_limited(words, limit, env=env)
        print(done.output[-1500:])
        if done.code:
            sys.exit(f"{name}: exit code {done.code}")
        _record_stage(name, done, shape)
        if words[: len(train)] == train:
            _record_speed(name, folder / "run" / "metrics.jsonl", shape)
    last = max((folder / "run" / "checkpoints").glob("step-*"))
    size = sum(one.stat().st_size for one in folder.glob("run/checkpoints/*/tables/*")) / 1e9
    record(bench=BENCH, case="whole run", metric="tables of all checkpoints", value=size, unit="GB", better="lower",
           shape=shape)  # fmt: skip
    print(last)


def _record_stage(name: str, done: Limited, shape: dict[str, Any]) -> None:
    common: dict[str, Any] = {"bench": BENCH, "case": f"whole run, {name}", "better": "lower", "shape": shape}
    record(**common, metric="time", value=done.seconds, unit="s")
    record(**common, metric="memory without page cache", value=done.most_anonymous / 2**30, unit="GiB")


def _record_speed(name: str, metrics: Path, shape: dict[str, Any]) -> None:
    """Record the speed of the last hundred steps that have a row: starting and saving are not among them."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    speeds = [one["samples_per_second"] for one in rows if one["split"] == "train" and one["step"] % 100 == 0]
    if speeds:
        record(bench=BENCH, case=f"whole run, {name}", metric="training, last 100 steps", value=speeds[-1],
               unit="samples/s", better="higher", shape=shape)  # fmt: skip


def main() -> None:
    """Measure and record."""
    if sys.argv[1:2] == ["--worker"]:
        switches(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "1")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="a whole run instead of pass switches")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=20.0, help="of tables with optimizer state")
    parser.add_argument("--memory-gib", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=6_000_000, help="of data")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="of the rows, in a pass")
    parser.add_argument("--small", action="store_true", help="small sizes, to try it")
    given = parser.parse_args()
    if not can_limit():
        sys.exit("this process may not make control groups with a limit of memory: run as root, or under systemd-run")
    limit = int(given.memory_gib * 2**30)
    folder = Path(tempfile.mkdtemp(prefix="viviane-large-", dir=given.folder))
    try:
        if given.run:
            whole_run(folder, 0.05 if given.small else given.gigabytes, limit, 20_000 if given.small else given.rows)
        else:
            rows = 100_000 if given.small else 6_000_000
            for share in given.shares:
                for known in (True, False):
                    measure_switches(folder, rows, 2**30 if not given.small else limit, share, known)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    assert ROOT.is_dir()
    main()

"""How old served rows are while 50,000 rows a second change; memory of tiers; the first answer of a large snapshot.

Publisher, broker (Tansu) and server share the cores of this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from parameter_server import LAYOUT, OneTable
from record import ROOT, record
from viviane.store.cache import CacheTier
from viviane.store.hierarchy import Level, TableHierarchy
from viviane.store.host import HostTier
from viviane.store.stream import DeltaPublisher
from viviane.store.subscriber import DeltaSubscriber
from viviane.training.checkpoint.manifest import Manifest, write_manifest

sys.path[:0] = [str(ROOT / "tests" / name) for name in ("store", "remote")]
BENCH = "parameter_server"
ROWS_A_SECOND = 50_000
EVERY_S = 0.5
_SENTINELS = np.arange(-64, 0)
"""Keys of every publication, in all partitions."""


def publish(address: str, outbox: str, num_keys: int, seconds: float, pipe: Any) -> None:
    """Publish rows at a rate; each holds the number of its publication, and when it was handed over."""
    random, count = np.random.default_rng(0), int(ROWS_A_SECOND * EVERY_S) - len(_SENTINELS)
    with DeltaPublisher(address, outbox, "bench") as publisher:
        start = time.time()
        for number in range(1, int(seconds / EVERY_S) + 1):
            time.sleep(max(0.0, start + number * EVERY_S - time.time()))
            keys = np.concatenate([random.choice(num_keys, count, replace=False), _SENTINELS])
            rows = np.zeros((len(keys), 64), np.int64)
            rows[:, 0], rows[:, 1] = number, time.time_ns()
            publisher.publish({"t": (keys, rows.view(np.uint8))})
        publisher.barrier()
        pipe.send(time.time() - start)


def freshness(num_keys: int, seconds: float) -> None:
    """Time from `publish` to lookups that see all rows of a publication, and lookups beside the updates."""
    from broker import Broker

    host = HostTier(LAYOUT, max_rows=2 * num_keys)
    cache = CacheTier(LAYOUT, num_keys // 10)
    table = TableHierarchy("t", LAYOUT, [Level(cache, "volatile"), Level(host, "store")])
    every = np.arange(num_keys)
    table.apply(every, np.zeros((num_keys, LAYOUT.row_bytes), np.uint8), every[:0], {})
    hot, out = np.arange(2048), LAYOUT.empty(2048)
    table.warm(hot)

    def lookups(until: threading.Event) -> list[float]:
        found = []
        while not until.wait(0.002):
            begin = time.perf_counter()
            table.lookup(hot, out)
            found.append((time.perf_counter() - begin) * 1e3)
        return found

    quiet = threading.Event()
    threading.Timer(min(5.0, seconds), quiet.set).start()
    before = np.percentile(lookups(quiet), [50, 99])
    ages: dict[int, float] = {}
    ended = threading.Event()

    def watch() -> None:
        rows = LAYOUT.empty(len(_SENTINELS))
        while not ended.wait(0.01):
            table.lookup(_SENTINELS, rows)
            number, stamp = rows.view(np.int64)[:, :2].min(0).tolist()
            if number and number not in ages:
                ages[number] = time.time() - stamp / 1e9

    context = multiprocessing.get_context("spawn")
    with Broker() as broker, tempfile.TemporaryDirectory() as outbox:
        broker.make("deltas", 4)
        address = f"kafka://{broker.servers}/deltas"
        mine, theirs = context.Pipe(duplex=False)
        with DeltaSubscriber(address, OneTable(table)) as subscriber:
            child = context.Process(target=publish, args=(address, outbox, num_keys, seconds, theirs))
            child.start()
            watcher = threading.Thread(target=watch)
            watcher.start()
            done = threading.Event()
            waiter = threading.Thread(target=lambda: (subscriber.wait_for(int(seconds / EVERY_S), 300), done.set()))
            waiter.start()
            during = np.percentile(lookups(done), [50, 99])
            took = mine.recv()
            time.sleep(0.1)
            ended.set()
            for one in (waiter, watcher, child):
                one.join()
    found = np.array(list(ages.values()))
    shape = {"rows/s": round(ROWS_A_SECOND * seconds / took), "publications seen": len(found), "keys": num_keys}
    record(
        bench=BENCH, case="50,000 rows/s of 512 bytes through Kafka into host memory", metric="freshness p99",
        value=float(np.percentile(found, 99)), unit="s", better="lower", goal=2,
        shape={**shape, "p50 s": round(float(np.median(found)), 3), "must": 10},
    )  # fmt: skip
    record(
        bench=BENCH, case="lookups of 2,048 keys beside 50,000 rows/s of updates", metric="p99 during / before",
        value=float(during[1] / before[1]), unit="x", better="lower", goal=1.1,
        shape={"before ms": before.round(3).tolist(), "during ms": during.round(3).tolist()},
    )  # fmt: skip


def memory(rows: int) -> None:
    """Anonymous memory of a tier that holds all rows, over the bytes of its rows."""
    for name in ("host", "cache"):
        for width in (512, 128):
            code = (
                "import numpy as np, psutil, sys\n"
                "from viviane.store import Column, HostTier, RowLayout\n"
                "from viviane.store.cache import CacheTier\n"
                f"layout, rows, name = RowLayout([Column('weight', 'float32', {width // 4})]), {rows}, {name!r}\n"
                "part = np.ones((65536, layout.row_bytes), np.uint8)\n"
                "def make(n): return HostTier(layout, max_rows=2 * n) if name == 'host' else CacheTier(layout, n)\n"
                "make(65536).put(np.arange(65536), part)\n"
                "def used(): return psutil.Process().memory_full_info().uss\n"
                "before, tier = used(), make(rows)\n"
                "for at in range(0, rows, 65536):\n"
                "    keys = np.arange(at, min(at + 65536, rows))\n"
                "    tier.put(keys, part[: len(keys)])\n"
                "print((used() - before) / (rows * layout.row_bytes))\n"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            record(
                bench=BENCH, case=f"{name} tier with all rows, {width}-byte rows", metric="memory / bytes of rows",
                value=float(done.stdout), unit="x", better="lower", goal=1.1, shape={"rows": rows, "must": 1.25},
            )  # fmt: skip


def large_model(folder: Path, gigabytes: float) -> int:
    """Save a small model, then write its table with as many rows as asked for; returns the bytes."""
    import viviane as vv

    rows, few = int(gigabytes * 1e9) // 516, 1000
    schema = vv.Schema(labels=[{"name": "click"}], categorical=[{"name": "item", "num_ids": few}])
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=128, deep_mlp=[64]))
    model.compile()
    model.save(folder)
    weights = folder / "weights"
    manifest = json.loads((weights / "manifest.json").read_text())
    del manifest["sha256"]
    for table in manifest["tables"].values():
        dim = table["weight"]["shape"][1]
        table["weight"]["shape"] = [rows, dim]
        manifest["files"][table["file"]] = write_table(weights / table["file"], rows, dim)
    described = json.loads((folder / "schema.json").read_text())
    described["categorical"][0]["num_ids"] = rows
    (folder / "schema.json").write_text(json.dumps(described))
    write_manifest(weights, Manifest.from_dict(manifest))
    listed = json.loads((folder / "files.json").read_text())
    for name in ("schema.json", "weights/manifest.json"):
        data = (folder / name).read_bytes()
        listed["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for name, entry in manifest["files"].items():
        listed["files"][f"weights/{name}"] = entry
    (folder / "files.json").write_text(json.dumps(listed))
    return rows * 516


def write_table(path: Path, rows: int, dim: int) -> dict[str, Any]:
    """Write a safetensors file of one float32 matrix, piece by piece, and let the system forget it."""
    head = json.dumps({"weight": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [0, rows * dim * 4]}}).encode()
    head += b" " * (-len(head) % 8)
    part = np.random.default_rng(0).random((65_536, dim), dtype=np.float32)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for data in (len(head).to_bytes(8, "little"), head):
            digest.update(data)
            file.write(data)
        for start in range(0, rows, len(part)):
            piece = part[: min(len(part), rows - start)]
            piece[:, 0] = np.arange(start, start + len(piece))
            digest.update(piece.data)
            file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


_FIRST_ANSWER = """
import sys, time
import viviane as vv
from viviane.serving import InferenceSession
begin = time.perf_counter()
session = InferenceSession(sys.argv[1], device="cpu", tables={"cache": {"rows": int(sys.argv[2])}})
score = session.predict({"item": [3, 70_000, int(sys.argv[3]) - 1]})
print(time.perf_counter() - begin, len(score))
import psutil
print(psutil.Process().memory_full_info().uss)
"""


def snapshot(gigabytes: float, folder: Path) -> None:
    """The time from opening a snapshot that is not in memory to its first answer, in a new process."""
    size = large_model(folder / "model", gigabytes)
    for cached in (1_000, 1_000_000):
        for path in (folder / "model").rglob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        words = [str(folder / "model"), str(min(cached, size // 516)), str(size // 516)]
        command = [sys.executable, "-c", _FIRST_ANSWER, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds, used = done.stdout.split()[0], done.stdout.split()[-1]
        record(
            bench=BENCH, case=f"a snapshot from disk, cache of {cached:,} rows", metric="time to the first answer",
            value=float(seconds), unit="s", better="lower", goal=2,
            shape={"snapshot GB": round(size / 1e9, 2), "of the goal's": 50, "must": 10,
                   "own memory GB": round(int(used) / 1e9, 2)},
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=["freshness", "memory", "snapshot"])
    parser.add_argument("--gigabytes", type=float, default=10.0, help="Size of the snapshot.")
    parser.add_argument("--folder", type=Path, help="Where to write it.")
    arguments = parser.parse_args()
    small, only = arguments.small, arguments.only
    print(f"load {psutil.getloadavg()[0]:.1f}", flush=True)
    if only in (None, "freshness"):
        freshness(50_000 if small else 500_000, 3.0 if small else 60.0)
    if only in (None, "memory"):
        memory(100_000 if small else 1_000_000)
    if only in (None, "snapshot"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            snapshot(0.05 if small else arguments.gigabytes, Path(folder))


if __name__ == "__main__":
    main()

"""The cache of a GPU: lookups of keys that are in its memory, in the host's behind it, or in neither, and one writer.

Needs a GPU. Times are those of a call as a server makes it: host keys in, rows on the device, found flags back on the
host. Rows are checked against their keys, beside a writer too.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from record import record
from viviane.ops.row_cache import DeviceRowCache

BENCH = "device_cache_gpu"
DEVICE = torch.device("cuda")


def certified(keys: np.ndarray, dim: int, number: int) -> np.ndarray:
    """Return rows that name their key and a number in all columns."""
    rows = np.empty((len(keys), dim), np.int32)
    rows[:, ::2], rows[:, 1::2] = keys[:, None], number
    return rows.view(np.uint8).reshape(len(keys), 4 * dim)


def lookups(name: str, *, keys: int, tables: int, dim: int, hits: float, on_device: float, goal: float) -> None:
    """Time lookups of `keys` keys of each table; the others are absent, or in the host's memory."""
    rows = 200_000
    cache = DeviceRowCache(int(tables * rows * on_device), 4 * dim, DEVICE, host_capacity=tables * rows)
    known = np.arange(rows)
    for table in range(tables):
        cache.insert(known, certified(known, dim, 1), table)
    random = np.random.default_rng(0)
    count = keys * tables
    near = [cache.keys(table)[:keys] for table in range(tables)]
    times = []
    out = torch.zeros((count, dim), dtype=torch.int32, device=DEVICE)
    number = torch.from_numpy(np.repeat(np.arange(tables, dtype=np.int32), keys)).pin_memory()
    for _ in range(200):
        asked = np.concatenate([random.choice(one, keys) for one in near])
        asked[random.random(count) >= hits] += 10**12  # absent
        given = torch.from_numpy(asked).pin_memory()
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = look(cache, given, number, out)
        times.append(time.perf_counter() - start)
        assert np.array_equal(found, asked < 10**12)
    some = out.cpu().numpy()[found]
    assert (some[:, 0] == asked[found]).all()
    record(
        bench=BENCH, case=name, metric="lookup, p50", value=float(np.median(times[20:])) * 1e6, unit="us",
        better="lower", goal=goal, shape={"tables": tables, "keys": count, "dim": dim, "hits": hits,
                                          "p99_us": float(np.percentile(times[20:], 99)) * 1e6},
    )  # fmt: skip


def look(cache: DeviceRowCache, keys: Tensor, tables: Tensor, out: Tensor) -> Any:
    """Look host keys up as a server does."""
    places = cache.find_into(keys.to(DEVICE, non_blocking=True), tables.to(DEVICE, non_blocking=True), out)
    return (places >= 0).cpu().numpy()


def linearizable(lookups: int) -> None:
    """Readers beside a writer: torn rows, and rows older than one that was seen."""
    dim, rows, batch = 32, 20_000, 16_384
    cache = DeviceRowCache(rows // 4, 4 * dim, DEVICE, host_capacity=rows // 4)
    stopped, problems, changes = threading.Event(), [], [0]

    def write() -> None:
        random = np.random.default_rng(1)
        while not stopped.is_set():
            keys = np.unique(random.integers(0, rows, 512))
            changes[0] += 1
            cache.insert(keys, certified(keys, dim, changes[0]))
            if changes[0] % 7 == 0:
                cache.erase(random.integers(0, rows, 100))
            if changes[0] % 50 == 0:
                cache.promote()

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        newest = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        out = torch.zeros((batch, dim), dtype=torch.int32, device=DEVICE)
        tables = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(lookups // 2 // batch):
                keys = torch.from_numpy(random.integers(0, rows, batch)).to(DEVICE)
                there = cache.find_into(keys, tables, out) >= 0
                got, own = out[there], keys[there]
                whole = (got[:, ::2] == own[:, None]).all() & (got[:, 1::2] == got[:, 1:2]).all()
                ordered = (got[:, 1] >= newest[own]).all()
                newest.scatter_reduce_(0, own, got[:, 1], "amax")
                if not bool(whole & ordered):
                    problems.append("torn" if not bool(whole) else "older than one seen")
                    return

    readers = [threading.Thread(target=read, args=(seed,)) for seed in (2, 3)]
    writer = threading.Thread(target=write)
    start = time.perf_counter()
    for thread in (writer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stopped.set()
    writer.join()
    assert not problems, problems
    record(
        bench=BENCH, case="lookups beside a writer: promotion, eviction, updates; none torn, none older",
        metric="rows checked", value=lookups / 1e6, unit="M rows", better="higher", goal=100,
        shape={"changes": changes[0], "seconds": round(time.perf_counter() - start)},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    assert torch.cuda.is_available(), "needs a GPU"
    lookups("26 x 2,048 keys, dim 128, 99% in the GPU's memory", keys=2048, tables=26, dim=128, hits=0.99,
            on_device=0.5, goal=30)  # fmt: skip
    lookups("26 x 2,048 keys, dim 128, 90% in the GPU's memory", keys=2048, tables=26, dim=128, hits=0.90,
            on_device=0.5, goal=80)  # fmt: skip
    lookups("2,000 keys, dim 16, 84% in the GPU's memory", keys=2000, tables=1, dim=16, hits=0.84, on_device=0.5,
            goal=30)  # fmt: skip
    linearizable(1_000_000 if small else 100_000_000)


if __name__ == "__main__":
    main()

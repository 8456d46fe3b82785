"""The cache of a GPU: lookups of keys that are in its memory or in the host's behind it, and one writer.

Needs a GPU. A lookup is timed twice. The call as a server makes it, by the clock of the host: keys in page-locked
memory, rows on the device, found flags back on the host. And the work of the GPU alone, with keys on the device, by
CUDA's events: what figures of other caches state. Rows are checked against their keys, beside a writer too.
"""

from __future__ import annotations

import argparse
import threading
import time

import numpy as np
import torch

from record import record
from viviane.ops.row_cache import DeviceRowCache

BENCH = "device_cache_gpu"
DEVICE = torch.device("cuda")
UVM_CACHE = "FBGEMM 1.6 UVM caching, 31,800 distinct of as many keys, H200: 380 to 570 us"


def certified(keys: np.ndarray, dim: int, number: int) -> np.ndarray:
    """Return rows that name their key and a number in all columns."""
    rows = np.empty((len(keys), dim), np.int32)
    rows[:, ::2], rows[:, 1::2] = keys[:, None], number
    return rows.view(np.uint8).reshape(len(keys), 4 * dim)


def lookups(name: str, *, keys: int, tables: int, dim: int, hits: float, goal: float) -> None:
    """Time lookups of `keys` distinct keys of each table, some in the GPU's memory, the others in the host's."""
    rows = 200_000
    cache = DeviceRowCache(tables * rows // 2, 4 * dim, DEVICE, host_capacity=tables * rows)
    known, count = np.arange(rows), keys * tables
    near, far, random = [], [], np.random.default_rng(0)
    for part in np.array_split(random.permutation(rows), 8):  # the first ones are in the host's memory in the end
        for table in range(tables):
            cache.insert(part, certified(part, dim, 1), table)
    for table in range(tables):
        number = torch.full((rows,), table, dtype=torch.int32, device=DEVICE)
        out = torch.empty((rows, dim), dtype=torch.int32, device=DEVICE)
        places = cache.find_into(torch.from_numpy(known).to(DEVICE), number, out).cpu().numpy()
        assert (places >= 0).all()
        near.append(known[places < cache.num_device_places])
        far.append(known[places >= cache.num_device_places])
    out = torch.zeros((keys, tables * dim), dtype=torch.int32, device=DEVICE)
    columns = [dim * feature for feature in range(tables)]
    requests = []
    for _ in range(200):
        asked = np.empty((tables, keys), np.int64)
        for table in range(tables):
            on_host = random.random(keys) >= hits
            for source, own in ((near, ~on_host), (far, on_host)):
                asked[table, own] = random.choice(source[table], int(own.sum()), replace=False)
        requests.append(asked)
    shape = {"tables": tables, "keys": count, "dim": dim, "on_device": hits}
    times = _times_on_device(cache, requests, dim)
    record(
        bench=BENCH, case=name, metric="lookup of keys on the device, p50", value=float(np.median(times[20:])) * 1e6,
        unit="us", better="lower", goal=goal, shape=shape,
        peer_published=UVM_CACHE if tables > 1 else None,
    )  # fmt: skip
    times = []
    for asked in requests:
        with cache.requests.take(tables, keys) as request:
            request.keys[:] = asked
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = cache.find_for(request, out, columns, range(tables))
            times.append(time.perf_counter() - start)
            assert found.all()
        assert np.array_equal(out.view(keys, tables, dim)[:, :, 0].T.cpu().numpy(), asked)
    for metric, percent, aim in (("lookup, p50", 50, goal), ("lookup, p99", 99, None)):
        record(
            bench=BENCH, case=name, metric=metric, value=float(np.percentile(times[20:], percent)) * 1e6, unit="us",
            better="lower", goal=aim, shape=shape,
        )  # fmt: skip


def _times_on_device(cache: DeviceRowCache, requests: list[np.ndarray], dim: int) -> list[float]:
    """Return the GPU's seconds for each lookup; a kernel that runs before hides how long its launch takes."""
    times, out = [], torch.zeros((requests[0].size, dim), dtype=torch.int32, device=DEVICE)
    tables = torch.arange(len(requests[0]), dtype=torch.int32, device=DEVICE).repeat_interleave(requests[0].shape[1])
    for asked in requests:
        keys = torch.from_numpy(asked.ravel()).to(DEVICE)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # cycles
        began.record()
        places = cache.find_into(keys, tables, out)
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
        assert bool((places >= 0).all())
        assert np.array_equal(out[:, 0].cpu().numpy(), asked.ravel())
    return times


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

    def read(seed: int, by_request: bool) -> None:
        random = np.random.default_rng(seed)
        newest = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        out = torch.zeros((batch, dim), dtype=torch.int32, device=DEVICE)
        tables = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(lookups // 2 // batch):
                asked = random.integers(0, rows, batch)
                keys = torch.from_numpy(asked).to(DEVICE)
                if by_request:
                    with cache.requests.take(1, batch) as request:
                        request.keys[:] = asked
                        there = torch.from_numpy(cache.find_for(request, out, [0], [0])[0]).to(DEVICE)
                else:
                    there = cache.find_into(keys, tables, out) >= 0
                got, own = out[there], keys[there]
                whole = (got[:, ::2] == own[:, None]).all() & (got[:, 1::2] == got[:, 1:2]).all()
                ordered = (got[:, 1] >= newest[own]).all()
                newest.scatter_reduce_(0, own, got[:, 1], "amax")
                if not bool(whole & ordered):
                    problems.append("torn" if not bool(whole) else "older than one seen")
                    return

    readers = [threading.Thread(target=read, args=(seed, seed == 3)) for seed in (2, 3)]
    writer = threading.Thread(target=write)
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
        shape={"readers": len(readers), "rows": rows, "dim": dim},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    assert torch.cuda.is_available(), "needs a GPU"
    size = {"keys": 2048, "tables": 26, "dim": 128}
    lookups("26 x 2,048 keys, dim 128, 99% in the GPU's memory, 1% in the host's", **size, hits=0.99, goal=30)
    lookups("26 x 2,048 keys, dim 128, 90% in the GPU's memory, 10% in the host's", **size, hits=0.90, goal=80)
    lookups("2,000 keys, dim 16, 84% in the GPU's memory, 16% in the host's", keys=2000, tables=1, dim=16, hits=0.84,
            goal=30)  # fmt: skip
    linearizable(1_000_000 if small else 100_000_000)


if __name__ == "__main__":
    main()

"""Dynamic tables on a GPU: find, insert or assign and find or insert by load, and a whole training iteration.

    python benchmarks/hash_gpu.py [--small] [--profile]

Keys a second of whole calls, from keys to values copied out or in. Loads are keys divided by the table's rows. "There":
all keys of a call are in the table; "new": none is, and in a full table each makes the key used longest ago go.
The floor is that of memory traffic alone at 4.3 TB/s: 8 bytes of key, a line of 64, and the vector read and written.

Device times are between events with the queue filled ahead; calls that wait for the device are timed by the clock, one
by one. Iterations are timed both ways: on the device alone, and by the clock in a loop without waiting, as in training.
The training setting is that of embedding_gpu.py: ten tables of 1.68 M rows, 1.05 M ids, of power law 1.05, as one
dynamic table whose keys carry their table's number in the upper bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from record import record
from viviane.config import SGD, Adam
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import DynamicTableConfig

SMALL = "--small" in sys.argv
ROWS = 1 << (18 if SMALL else 25)
COUNT = 1 << (14 if SMALL else 20)
LARGE = 1 << (15 if SMALL else 23)
REPEATS = 4 if SMALL else 24
CYCLES_AHEAD = 40_000_000
BYTES_PER_SECOND = 4.3e12
HKV = "HierarchicalKV, A100-80 PCIe: {} G keys/s"
DYNAMICEMB = "dynamicemb, H100-80: {} ms"
TABLES, IDS, TABLE_ROWS = 10, (1048 if SMALL else 104_857), (16_800 if SMALL else 1_680_000)
TABLE_SHIFT = 40


def device_us(run: Callable[[int], object], repeats: int = REPEATS) -> np.ndarray:
    """Return the microseconds of each repetition, with the device never waiting for the host."""
    for i in range(3):
        run(i)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(CYCLES_AHEAD)
    events[0].record()
    for i in range(repeats):
        run(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return np.array([a.elapsed_time(b) * 1e3 for a, b in pairwise(events)])


def clock_us(run: Callable[[int], object], repeats: int = REPEATS, warm: int = 2) -> np.ndarray:
    """Return the microseconds of each repetition by the host's clock, the device's work included."""
    times = []
    for i in range(repeats + warm):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return np.array(times[warm:])


def loop_us(run: Callable[[int], object], rounds: int = 5) -> np.ndarray:
    """Return the microseconds of a repetition by the host's clock, in rounds of many without waiting in between."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(2 * REPEATS):
            run(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / (2 * REPEATS))
    return np.array(times)


def keep(
    case: str, metric: str, times: np.ndarray, count: int, floor: float, shape: dict[str, Any], **rest: Any
) -> None:
    """Record billions of keys a second, beside the floor's."""
    low, median, high = (count / float(value) / 1e3 for value in np.percentile(times, [80, 50, 20]))
    record(
        bench="hash_gpu", case=case, metric=metric, value=median, unit="G keys/s", better="higher", floor=floor,
        spread=(low, high), shape=shape, **rest,
    )  # fmt: skip


def check() -> None:
    """Compare with the same table on the CPU over mixed calls of many keys: rows, keys, times of use, values."""
    generator, count, span = torch.Generator().manual_seed(0), (2_000, 200_000)[not SMALL], (5_000, 600_000)[not SMALL]
    settings = DynamicTableConfig(name="t", dim=4, max_capacity=span // 2, when_full="evict", init="uniform")
    own, true = DynamicTable(settings, SGD(), device="cuda"), DynamicTable(settings, SGD())
    for n in range(24):
        keys = (torch.rand(count, generator=generator, dtype=torch.float64) ** 3 * span).long() * 7919 - 10**9
        keys[: count // 50] = keys[0]
        values = torch.randn(count, 4, generator=generator)
        if n % 4 == 3:
            assert own.erase(keys[:500].cuda()) == true.erase(keys[:500])
        elif n % 4 == 2:
            own.insert_or_assign(keys.cuda(), values.cuda())
            true.insert_or_assign(keys, values)
        else:
            assert torch.equal(own.rows(keys.cuda()).cpu(), true.rows(keys))
            own.release()
            true.release()
        one, other = own.export(), true.export()
        for name in ("keys", "scores", "clocks", "weight"):
            assert torch.equal(getattr(one, name).cpu(), getattr(other, name)), name
        assert torch.equal(own.index.free_rows().cpu(), true.index.free_rows())
        assert own.index.num_evicted == true.index.num_evicted
    print(f"checked: equal to the CPU's table, {own.index.num_evicted:,} keys evicted", flush=True)


def floor_of(dim: int, line_bytes: int) -> float:
    return BYTES_PER_SECOND / (8 + line_bytes + 8 * dim) / 1e9


def make_table(dim: int, load: float) -> tuple[DynamicTable, Tensor]:
    """Return a table with so many keys, and the keys."""
    settings = DynamicTableConfig(
        name="t", dim=dim, max_capacity=ROWS, initial_capacity=ROWS, when_full="evict", init="uniform"
    )
    table = DynamicTable(settings, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (int(load * ROWS),), generator=generator, device="cuda")
    for part in keys.split(COUNT):
        table.find_or_insert(part)
    return table, keys


def batches(keys: Tensor, count: int, exponent: float, number: int) -> list[Tensor]:
    """Draw keys that are there; a power law by their places."""
    generator = torch.Generator("cuda").manual_seed(1)
    found = []
    for _ in range(number):
        u = torch.rand(count, generator=generator, device="cuda", dtype=torch.float64)
        found.append(keys[law(u, len(keys), exponent).long()])
    return found


def law(u: Tensor, num_rows: int, exponent: float) -> Tensor:
    """P(id) ~ (id + 1)^-exponent, by inverting the continuous law."""
    if exponent == 0:
        return (u * num_rows).floor().clamp_(max=num_rows - 1)
    power = 1 - exponent
    return ((1 + u * ((num_rows + 1.0) ** power - 1)) ** (1 / power) - 1).floor().clamp_(0, num_rows - 1)


def measure_load(dim: int, load: float) -> None:
    """Find, and insert or assign, at one load."""
    table, keys = make_table(dim, load)
    full = load == 1.0
    timed = clock_us if full else device_us
    for count, exponent in ((COUNT, 0), (COUNT, 1.05), (LARGE, 0)):
        name = "uniform keys" if exponent == 0 else f"power law {exponent}"
        case, drawn = f"{name}, load {load}", batches(keys, count, exponent, 4)
        shape = {"keys": count, "rows": ROWS, "dim": dim}
        headline = dim == 64 and exponent == 0
        keep(case, "find", device_us(lambda i, d=drawn: table.find(d[i % 4])), count, floor_of(dim, 64), shape,
             goal=5.0 if headline else None, peer_published=HKV.format(1.98) if headline else None)  # fmt: skip
        values = torch.randn(count, dim, device="cuda")
        goal = (2.5 if full else 3.0) if headline else None
        published = HKV.format({0.5: 0.834, 0.75: 0.801, 1.0: 0.621}[load]) if headline else None
        times = timed(lambda i, d=drawn, v=values: table.insert_or_assign(d[i % 4], v))
        keep(case, "insert or assign, there", times, count, floor_of(dim, 128), shape, goal=goal,
             peer_published=published)  # fmt: skip
        times = timed(lambda i, d=drawn: table.find_or_insert(d[i % 4]))
        keep(case, "find or insert (rows), there", times, count, BYTES_PER_SECOND / (8 + 128 + 8) / 1e9, shape)
    measure_new(table, dim, load)


def measure_new(table: DynamicTable, dim: int, load: float) -> None:
    """Insert keys that no call had before; a table that is not full gets at most 1/5 of its rows."""
    generator, calls = torch.Generator("cuda").manual_seed(7), 6
    fresh = [
        torch.randint(-(2**63), 2**63 - 1, (COUNT,), generator=generator, device="cuda") for _ in range(2 * calls + 6)
    ]
    values, shape = torch.randn(COUNT, dim, device="cuda"), {"keys": COUNT, "rows": ROWS, "dim": dim}
    case, full, goals = f"uniform keys, load {load}", load == 1.0, dim == 64
    published = HKV.format({0.5: 0.834, 0.75: 0.801, 1.0: 0.621}[load]) if goals else None
    goal = (2.5 if full else 3.0) if goals else None
    table.insert_or_assign(fresh.pop(), values)
    timed = clock_us if full else device_us
    times = timed(lambda _: table.insert_or_assign(fresh.pop(), values), calls - 2)
    keep(case, "insert or assign, new", times, COUNT, floor_of(dim, 128), shape, goal=goal, peer_published=published)
    if full:
        times = clock_us(lambda _: table.find_or_insert(fresh.pop()), calls - 2)
        keep(case, "find or insert (rows), new", times, COUNT, BYTES_PER_SECOND / (8 + 128 + 4 * dim) / 1e9, shape)


def measure_places(dim: int) -> None:
    """Find, and insert or assign, where all rows or the later half lie in the host's memory."""
    rows = ROWS // 8
    generator = torch.Generator("cuda").manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows // 2,), generator=generator, device="cuda")
    drawn, values = batches(keys, COUNT, 0, 4), torch.randn(COUNT, dim, device="cuda")
    for memory, here in (("host", None), ("split", rows // 4)):
        settings = DynamicTableConfig(
            name="t", dim=dim, max_capacity=rows, initial_capacity=rows, init="uniform", memory=memory, device_rows=here
        )
        table = DynamicTable(settings, device="cuda")
        table.find_or_insert(keys)
        case = "rows in host memory" if here is None else "half of the rows in host memory"
        shape = {"keys": COUNT, "rows": rows, "dim": dim}
        for metric, run, published in (
            ("find", lambda i, t=table: t.find(drawn[i % 4]), 0.124),
            ("insert or assign, there", lambda i, t=table: t.insert_or_assign(drawn[i % 4], values), 0.083),
        ):
            times = device_us(run, 6)
            low, median, high = (COUNT / float(value) / 1e3 for value in np.percentile(times, [80, 50, 20]))
            record(
                bench="hash_gpu", case=case, metric=metric, value=median, unit="G keys/s", better="higher",
                peer_published=HKV.format(published), spread=(low, high), shape=shape,
            )  # fmt: skip


def training(name: str, rule: Any, goal: float, published: float, profile: bool) -> None:
    """One iteration of the ten tables: ids to rows, lookup, backward, update."""
    settings = DynamicTableConfig(name="t", dim=128, initial_capacity=4 * TABLES * TABLE_ROWS, init="uniform")
    table = DynamicTable(settings, rule, device="cuda")
    tables = torch.arange(TABLES, device="cuda") << TABLE_SHIFT
    for start in range(0, TABLE_ROWS, 105_000):
        ids = torch.arange(start, min(start + 105_000, TABLE_ROWS), device="cuda")
        table.find_or_insert((ids.unsqueeze(1) + tables).view(-1))
    generator = torch.Generator("cuda").manual_seed(3)
    drawn = [
        law(torch.rand(IDS, TABLES, generator=generator, device="cuda", dtype=torch.float64), TABLE_ROWS, 1.05).long()
        for _ in range(4)
    ]
    gradient = torch.randn(IDS, TABLES, 128, device="cuda")

    def run(i: int) -> None:
        out = table(drawn[i % 4] + tables)
        out.backward(gradient)
        table.step(lr=1e-6)

    shape = {"ids": IDS * TABLES, "tables": TABLES, "rows": TABLES * TABLE_ROWS, "dim": 128}
    for metric, times in ((f"iteration, {name}", device_us(run)), (f"iteration by the clock, {name}", loop_us(run))):
        low, median, high = (float(value) / 1e3 for value in np.percentile(times, [20, 50, 80]))
        record(
            bench="hash_gpu", case="10 tables, power law 1.05", metric=metric, value=median, unit="ms", better="lower",
            goal=goal, peer_published=DYNAMICEMB.format(published), spread=(low, high), shape=shape,
        )  # fmt: skip
    if profile:
        show(f"iteration, {name}", run)
    table.eval()
    times = device_us(lambda i: table(drawn[i % 4] + tables))
    keep("10 tables, power law 1.05", "evaluation lookup", times, IDS * TABLES, floor_of(128, 64), shape)


def show(name: str, run: Callable[[int], object]) -> None:
    """List the kernels of a call, each with its time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run(0)
        torch.cuda.synchronize()
    print(f"-- {name}")
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            print(f"{event.device_time:9.1f} us  {event.name[:90]}")


def profile_calls() -> None:
    """Show where the time of a find and of insertions goes."""
    for load in (0.5, 1.0):
        table, keys = make_table(64, load)
        drawn, values = batches(keys, COUNT, 0, 2), torch.randn(COUNT, 64, device="cuda")
        fresh = [torch.randint(-(2**63), 2**63 - 1, (COUNT,), device="cuda") for _ in range(4)]
        for _ in range(2):
            table.find(drawn[1])
            table.insert_or_assign(fresh.pop(), values)
        show(f"find, load {load}", lambda _, t=table, d=drawn: t.find(d[0]))
        show(f"insert or assign, there, load {load}", lambda _, t=table, d=drawn, v=values: t.insert_or_assign(d[0], v))
        show(f"insert or assign, new, load {load}", lambda _, t=table, f=fresh, v=values: t.insert_or_assign(f[0], v))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure dynamic tables on a GPU.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that they run, keeps no figures")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each call too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    check()
    training("SGD", SGD(), 0.85, 1.92, arguments.profile)
    training("Adam", Adam(), 1.1, 2.19, arguments.profile)
    if arguments.profile:
        profile_calls()
    for load in (0.5, 0.75, 1.0):
        measure_load(64, load)
    measure_places(64)
    for dim in (8, 32, 128):
        measure_load(dim, 0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main())

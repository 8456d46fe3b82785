"""The embedding engine on a GPU: lookup, pooling, row updates, and their correctness on the real thing first.

    python benchmarks/embedding_gpu.py [--small] [--tune FILE]

Times are of the device, between events, with the queue filled ahead so that the host is never waited for; median of
many, over several batches in turn. The backward figures begin at the gradient of the lookup's output and include
the sorting of the rows; "sorted ahead" leaves it out, as when it runs during the forward pass or before.

--tune tries other shapes of the kernels instead, prints them, and appends them to FILE, one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from record import record
from viviane.config import SGD, AdaGrad, Adam
from viviane.config.optimizers import AnyOptimizer
from viviane.ops.row_update import Entries, Scratch, initial_state, reference, state_shape

SMALL = "--small" in sys.argv
DIM = 128
NUM_BATCHES = 2 if SMALL else 4
REPEATS = 8 if SMALL else 48
CYCLES_AHEAD = 40_000_000  # about 20 ms, in which the host fills the queue
FBGEMM = "FBGEMM 1.6.0, H200, another run: {} us"
CAP = 10_000 if SMALL else 10_000_000
MLPERF_ROWS = [40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155]
MLPERF_ROWS += [4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36]
MLPERF_HOTNESS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
CRITEO += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]


@dataclass
class Setting:
    """Tables of one storage, and batches of rows (B, F) or of bags, with where their gradients stand."""

    name: str
    rows: list[int]
    hotness: list[int]
    size: int
    exponent: float  # 0: uniform ids

    def __post_init__(self) -> None:
        self.features = len(self.rows)
        self.one_hot = max(self.hotness) == 1
        self.width = self.features * DIM
        self.columns = tuple(range(0, self.width, DIM))
        self.shape = {"batch": self.size, "dim": DIM, "tables": self.features, "rows": sum(self.rows)}
        lengths = torch.tensor(self.hotness, device="cuda").repeat_interleave(self.size)
        self.offsets = F.pad(lengths.cumsum(0), (1, 0))
        places = torch.arange(self.features, device="cuda") * DIM
        samples = torch.arange(self.size, device="cuda") * self.width
        if self.one_hot:
            self.sources = (samples.unsqueeze(1) + places).view(-1).to(torch.int32)
        else:
            self.sources = (places.unsqueeze(1) + samples).view(-1).repeat_interleave(lengths).to(torch.int32)
        self.batches = [self.draw(seed) for seed in range(NUM_BATCHES)]

    def draw(self, seed: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        columns, base = [], 0
        for num_rows, hotness in zip(self.rows, self.hotness, strict=True):
            u = torch.rand(self.size * hotness, generator=generator, device="cuda", dtype=torch.float64)
            columns.append((base + law(u, num_rows, self.exponent)).to(torch.int32))
            base += num_rows
        return torch.stack(columns, 1).contiguous() if self.one_hot else torch.cat(columns)

    def entries(self, batch: Tensor, gradient: Tensor) -> Entries:
        return Entries(batch.view(-1), gradient, self.sources, aligned=16, bound=sum(self.rows))


def law(u: Tensor, num_rows: int, exponent: float) -> Tensor:
    """P(id) ~ (id + 1)^-exponent, by inverting the continuous law."""
    if exponent == 0:
        return (u * num_rows).floor().clamp_(max=num_rows - 1)
    power = 1 - exponent
    return ((1 + u * ((num_rows + 1.0) ** power - 1)) ** (1 / power) - 1).floor().clamp_(0, num_rows - 1)


def time_us(run: Callable[[int], object]) -> np.ndarray:
    """Return the microseconds of each repetition of run(batch), with the device never waiting for the host."""
    for i in range(NUM_BATCHES):
        run(i)
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        torch.cuda._sleep(CYCLES_AHEAD)
        events[0].record()
        for i in range(REPEATS):
            run(i % NUM_BATCHES)
            events[i + 1].record()
        torch.cuda.synchronize()
        found += [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
    return np.array(found)


def keep(case: str, metric: str, value: float, unit: str, shape: dict[str, Any], **others: Any) -> None:
    better = "lower" if unit == "us" else "higher"
    record(
        bench="embedding_gpu", case=case, metric=metric, value=value, unit=unit, better=better, shape=shape, **others
    )


def keep_times(case: str, metric: str, times: np.ndarray, shape: dict[str, Any], **others: Any) -> None:
    low, median, high = (float(value) for value in np.percentile(times, [20, 50, 80]))
    keep(case, metric, median, "us", shape, spread=(low, high), **others)


def make_table(num_rows: int) -> Tensor:
    return torch.empty(num_rows, DIM, device="cuda").uniform_(-0.1, 0.1)


def make_state(weight: Tensor, rule: AnyOptimizer) -> dict[str, Tensor]:
    return {
        name: torch.full(state_shape(name, weight, rule), start, device="cuda")
        for name, start in initial_state(rule).items()
    }


def copy_bandwidth() -> float:
    """Return GB/s of a device-to-device copy, bytes read and written."""
    source = torch.empty(2**24 if SMALL else 2**29, device="cuda").normal_()
    target = torch.empty_like(source)
    return 8 * source.numel() / float(np.median(time_us(lambda _: target.copy_(source)))) / 1e3


def check() -> None:
    """Compare with the plain truth in float64, with one row 100,000 times; the same bits twice."""
    from viviane.ops.row_update import gpu

    torch.manual_seed(0)
    num_rows, count = 30_000, 400_000
    rows = torch.randint(num_rows, (count,), device="cuda", dtype=torch.int32)
    rows[torch.randperm(count, device="cuda")[:100_000]] = 77
    entries = Entries(rows, torch.randn(count * DIM, device="cuda"))
    truth_entries = Entries(rows, entries.gradients.double())
    start = make_table(num_rows)
    for rule in (SGD(), SGD(momentum=0.9), AdaGrad(epsilon=0.01), AdaGrad(row_wise=True), Adam(epsilon=0.01)):
        tables, states = [start.clone(), start.clone()], [make_state(start, rule) for _ in range(2)]
        for weight, state in zip(tables, states, strict=True):
            gpu.update_rows(weight, state, entries, rule, lr=0.1, step=1, scratch=Scratch())
        truth, true_state = start.double(), {name: part.double() for name, part in make_state(start, rule).items()}
        reference.update_rows(truth, true_state, truth_entries, rule, lr=0.1, step=1)
        # float32 sums of 100,000 numbers near 1, which reach some hundreds.
        torch.testing.assert_close(tables[0].double(), truth, rtol=1e-3, atol=1e-3)
        assert torch.equal(*tables), f"{rule.type}: two runs differ"
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    print("checked: equal to the truth, the same bits twice", flush=True)


def forward(setting: Setting, weight: Tensor) -> Callable[[int], object]:
    from viviane.ops.embedding_bag import gpu

    out = torch.empty(setting.size, setting.width, device="cuda")
    if setting.one_hot:
        return lambda i: gpu.gather_rows(weight, setting.batches[i], out, setting.columns, None)
    return lambda i: gpu.pool_rows(weight, setting.batches[i], setting.offsets, out, setting.columns, None)


def torch_lookup(setting: Setting, weight: Tensor) -> Callable[[int], object]:
    if setting.one_hot:
        return lambda i: F.embedding(setting.batches[i], weight)
    offsets = setting.offsets.to(torch.int32)
    return lambda i: F.embedding_bag(setting.batches[i], weight, offsets, mode="sum", include_last_offset=True)


def backward(setting: Setting, weight: Tensor, rule: AnyOptimizer, *, ahead: bool = False) -> Callable[[int], object]:
    from viviane.ops.row_update import gpu

    gradient = torch.randn(setting.size * setting.width, device="cuda")
    state, scratches = make_state(weight, rule), [Scratch() for _ in range(NUM_BATCHES)]

    def run(i: int) -> None:
        scratch = scratches[i] if ahead else Scratch()
        entries = setting.entries(setting.batches[i], gradient)
        gpu.update_rows(weight, state, entries, rule, lr=1e-6, step=1, scratch=scratch)

    return run


def measure(
    setting: Setting, rules: dict[str, tuple[AnyOptimizer, float | None, Any]], goal: float | None, peer: Any
) -> None:
    """Record one setting: lookup, sorting, and each rule's update with its goal and the peer's time."""
    from viviane.ops.row_update import gpu

    weight = make_table(sum(setting.rows))
    unique = float(np.mean([len(batch.unique()) for batch in setting.batches]))
    shape = {**setting.shape, "ids": setting.batches[0].numel(), "unique": round(unique), "exponent": setting.exponent}
    rest = {} if peer is None else {"peer_published": FBGEMM.format(peer)}
    rest |= {"peer": "torch, out of the box", "peer_value": float(np.median(time_us(torch_lookup(setting, weight))))}
    keep_times(setting.name, "lookup", time_us(forward(setting, weight)), shape, goal=goal, **rest)
    sorting = time_us(lambda i: gpu.sort_entries(setting.batches[i].view(-1), Scratch(), sum(setting.rows)))
    keep_times(setting.name, "sorting alone", sorting, shape)
    for name, (rule, rule_goal, rule_peer) in rules.items():
        rest = {} if rule_peer is None else {"peer_published": FBGEMM.format(rule_peer)}
        times = time_us(backward(setting, weight, rule))
        keep_times(setting.name, f"backward + {name}", times, shape, goal=rule_goal, **rest)
        torch.cuda.empty_cache()
        times = time_us(backward(setting, weight, rule, ahead=True))
        keep_times(setting.name, f"backward + {name}, sorted ahead", times, shape)
        torch.cuda.empty_cache()


def ten_tables(exponent: float) -> Setting:
    law_name = f"power law {exponent}" if exponent else "uniform"
    num_rows, size = (16_800, 1048) if SMALL else (1_680_000, 104_857)
    return Setting(f"10 one-hot tables, {law_name}", [num_rows] * 10, [1] * 10, size, exponent)


def mlperf(exponent: float) -> Setting:
    law_name = f"power law {exponent}" if exponent else "uniform"
    rows = [min(rows, CAP) for rows in MLPERF_ROWS]
    return Setting(f"MLPerf's 26 multi-hot tables, {law_name}", rows, MLPERF_HOTNESS, 512 if SMALL else 8192, exponent)


def criteo(exponent: float, size: int = 65536) -> Setting:
    law_name = f"power law {exponent}" if exponent else "uniform"
    rows = [min(rows, CAP) for rows in CRITEO]
    return Setting(f"26 one-hot tables, {law_name}", rows, [1] * 26, min(size, 2048) if SMALL else size, exponent)


def measure_all() -> None:
    bandwidth = copy_bandwidth()
    keep("device copy", "bandwidth", bandwidth, "GB/s", {"dim": DIM})
    single = Setting("uniform gather", [168_000 if SMALL else 16_800_000], [1], 10_485 if SMALL else 1_048_570, 0)
    times = time_us(forward(single, make_table(sum(single.rows))))
    share = 8 * DIM * single.size / float(np.median(times)) / 1e3 / bandwidth * 100
    keep(single.name, "share of the copy's bandwidth", share, "%", single.shape, goal=86)
    row_wise = AdaGrad(row_wise=True)
    for exponent, goals in ((1.05, (215, 330, 580, 340)), (0, (None, None, None, None))):
        known = exponent > 0
        rules: dict[str, tuple[AnyOptimizer, float | None, Any]] = {
            "SGD": (SGD(), goals[1], 549 if known else None),
            "Adam": (Adam(), goals[2], 946 if known else None),
            "row-wise AdaGrad": (row_wise, goals[3], 612 if known else None),
            "AdaGrad": (AdaGrad(), None, None),
        }
        measure(ten_tables(exponent), rules, goals[0], 528 if known else None)
    for exponent, peers in ((0, (298, 1226, 1148)), (1.05, (195, 750, 730))):
        goal = 950 if exponent == 0 else None
        rules = {"AdaGrad": (AdaGrad(), goal, peers[1]), "row-wise AdaGrad": (row_wise, None, peers[2])}
        measure(mlperf(exponent), rules, 220 if exponent == 0 else None, peers[0])
    for exponent, one_hot in ((1.1, (827, 703)), (0, (870, 843))):
        measure(criteo(exponent), {"SGD": (SGD(), None, one_hot[1])}, None, one_hot[0])


GATHERS = [(4, 1), (8, 1), (16, 1), (16, 2), (16, 4), (32, 4), (64, 4), (32, 8), (64, 8)]
POOLS = [(1, 8, 1), (2, 4, 1), (2, 8, 1), (4, 2, 1), (4, 4, 1), (8, 1, 1), (8, 2, 1), (8, 2, 4), (16, 2, 4), (16, 4, 4)]
SPANS = {
    "SGD": (SGD(), list(product((2, 4, 8), (32, 64, 128)))),
    "AdaGrad": (AdaGrad(), list(product((2, 4, 8), (32, 64, 128)))),
    "row-wise AdaGrad": (AdaGrad(row_wise=True), list(product((2, 4), (64, 128)))),
    "Adam": (Adam(), list(product((2, 4), (64, 128)))),
}


def attempts(setting: Setting) -> Iterator[dict[str, Any]]:
    """Try the shapes of each kernel."""
    from viviane.ops.embedding_bag import gpu as bag
    from viviane.ops.row_update import gpu as update

    weight = make_table(sum(setting.rows))
    before = bag.gather_shape, bag.pool_shape, update.span_shape, update.slot_shape

    def tried(kernel: str, shape: object, run: Callable[[int], object]) -> dict[str, Any]:
        line = {"setting": setting.name, "kernel": kernel, "shape": str(shape), "us": float(np.median(time_us(run)))}
        bag.gather_shape, bag.pool_shape, update.span_shape, update.slot_shape = before
        return line

    for (rows, warps), hint in product(GATHERS if setting.one_hot else (), ("", "evict_last")):
        bag.gather_shape = lambda dim, item, rows=rows, warps=warps, hint=hint: bag.GatherShape(rows, warps, hint)
        yield tried("lookup", (rows, warps, hint), forward(setting, weight))
    for shape in () if setting.one_hot else POOLS:
        bag.pool_shape = lambda dim, length, shape=shape: bag.PoolShape(*shape)
        yield tried("pooling", shape, forward(setting, weight))
    for name, (rule, shapes) in SPANS.items():
        run = backward(setting, weight, rule, ahead=True)
        for tile, span in shapes:
            update.span_shape = lambda dim, num_states=0, tile=tile, span=span: update.SpanShape(tile, span, 1)
            update.slot_shape = lambda dim: update.SpanShape(8, 64, 1)
            yield tried(f"update, {name}", (tile, span), run)
        for tile, span in product((4, 8, 16), (32, 64, 128)) if name == "SGD" else ():
            update.slot_shape = lambda dim, tile=tile, span=span: update.SpanShape(tile, span, 1)
            yield tried(f"slots, {name}", (tile, span), run)
        del run
        torch.cuda.empty_cache()
    small = setting.batches[0].view(-1).to(torch.int16)
    yield tried("sort int32, stable", "", lambda i: torch.sort(setting.batches[i].view(-1), stable=True))
    yield tried("sort int32", "", lambda i: torch.sort(setting.batches[i].view(-1)))
    yield tried("sort int16", "", lambda _: torch.sort(small, stable=True))


def profile(setting: Setting) -> Iterator[dict[str, Any]]:
    """List the kernels of one update, each with its time."""
    run = backward(setting, make_table(sum(setting.rows)), SGD())
    run(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for i in range(NUM_BATCHES):
            run(i)
        torch.cuda.synchronize()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield {"setting": setting.name, "profile": event.name[:80], "us": event.device_time}


def tune(path: Path) -> None:
    lines: list[dict[str, Any]] = []
    with path.open("a", encoding="utf-8") as file:
        for make in (ten_tables, mlperf):
            setting = make(1.05 if make is ten_tables else 0)
            for line in chain(attempts(setting), profile(setting)):
                lines.append(line)
                file.write(json.dumps(line) + "\n")
                file.flush()
            torch.cuda.empty_cache()
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if "kernel" in line:
            key = (line["setting"], line["kernel"])
            best[key] = min(best.get(key, line), line, key=lambda one: float(one["us"]))
        else:
            print(f"{line['us']:8.1f} us  {line['profile']}")
    for (setting, kernel), line in best.items():
        print(f"{setting} | {kernel} | best {line['us']:.1f} us | {line['shape']}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the embedding engine on a GPU.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that they run, keeps no figures")
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="try shapes of kernels instead, and append them to FILE"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    check()
    if arguments.tune is not None:
        tune(arguments.tune)
    else:
        measure_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())

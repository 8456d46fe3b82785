"""Benchmarks of embedding tables against other libraries: lookup only, and lookup + backward + update per optimizer.

Each library runs in a separate process. In one process the OpenMP and thread pools of the libraries compete for cores,
and the library that is imported last appears slow.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from viviane.bench.libraries import LIBRARIES, OURS, Library
from viviane.bench.timing import Times, copy_bandwidth, measure
from viviane.bench.workload import NUM_BATCHES, Draw, Load, Tables, lookup_bytes, step_bytes
from viviane.core import machine
from viviane.core.errors import ConfigError, suggest

LOOKUP: Final = "lookup"


@dataclass(frozen=True)
class Measurement:
    """The result of one library for one operation.

    Args:
        operation: "lookup", or the optimizer of lookup + backward + update.
        library: its name in `LIBRARIES`.
        batch: B.
        num_ids, distinct_rows: ids per batch, and distinct rows that they touch (mean over the batches).
        ms, median_ms, high_ms: best, median and 80th percentile of the step time.
        first_ms: the first step, including compilation.
        ids_per_second: rate of lookups, from `ms`.
        gb_per_second: compulsory bytes divided by `ms`; see `lookup_bytes` and `step_bytes`.
    """

    operation: str
    library: str
    batch: int
    num_ids: int
    distinct_rows: float
    ms: float
    median_ms: float
    high_ms: float
    first_ms: float
    ids_per_second: float
    gb_per_second: float


@dataclass(frozen=True)
class LeftOut:
    """A library that is excluded from the comparison, or from one operation; `install` is the command to install it."""

    library: str
    operation: str | None
    why: str
    install: str | None


@dataclass(frozen=True)
class Comparison:
    """All measurements on this machine.

    Args:
        tables: sizes and width of the tables.
        device: "cpu", "cuda:0".
        copy_gb_per_second: bandwidth of a large copy, bytes read and written, in the same run.
        measurements: in chronological order.
        left_out: excluded libraries, with reasons.
    """

    tables: Tables
    device: str
    copy_gb_per_second: float
    measurements: tuple[Measurement, ...]
    left_out: tuple[LeftOut, ...]

    def times_faster(self, one: Measurement) -> float | None:
        """Return the speedup of this package over this measurement; None if this package was not measured."""
        for own in self.measurements:
            if (own.library, own.operation, own.batch) == (OURS, one.operation, one.batch):
                return one.ms / own.ms
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        packages = [library.package for library in LIBRARIES.values()]
        return {
            "bench": "embedding",
            "machine": machine.describe(),
            "device": self.device,
            "threads": torch.get_num_threads(),
            "versions": machine.versions(*packages, "fbgemm-gpu-cpu", "tensorflow", "numba", "triton"),
            "tables": {"num": len(self.tables.rows), "rows": sum(self.tables.rows), "dim": self.tables.dim},
            "copy_gb_per_second": self.copy_gb_per_second,
            "measurements": [
                {
                    **asdict(one),
                    "share_of_copy": one.gb_per_second / self.copy_gb_per_second,
                    "ours_is_faster_by": self.times_faster(one),
                }
                for one in self.measurements
            ],
            "left_out": [asdict(one) for one in self.left_out],
        }


def choose_libraries(peers: str, device: torch.device) -> list[str]:
    """Return this package and the peers: "auto" (all that run on the device), "none", or comma-separated names."""
    able = [name for name, library in LIBRARIES.items() if device.type in library.rules]
    if peers == "auto":
        return able
    named = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    for name in named:
        if name not in LIBRARIES:
            raise ConfigError("unknown peer", where="--peers", value=name, fix=suggest(name, LIBRARIES))
        if name not in able:
            raise ConfigError(f"{name} is not supported on {device.type}", where="--peers", allowed=", ".join(able))
    return list(dict.fromkeys([OURS, *named]))


def why_absent(name: str, library: Library, device: torch.device) -> LeftOut | None:
    """Import a library; return None on success, else the reason for excluding it."""
    return not_imported(name, library.modules, library.install.get(device.type))


def not_imported(name: str, modules: Sequence[str], install: str | None) -> LeftOut | None:
    """Import modules; return None on success, else the reason for excluding the library."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] == module:
                return LeftOut(name, None, "not installed", install)
            return LeftOut(name, None, f"cannot be imported: {error}", None)
        except (ImportError, OSError, RuntimeError) as error:
            # A build for another version of torch raises one of these.
            return LeftOut(name, None, f"cannot be imported: {str(error).splitlines()[0]}", None)
    return None


def check_memory(tables: Tables) -> None:
    """Refuse tables that do not fit in the device's free memory."""
    if tables.device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(tables.device)[0]
    else:
        free = machine.memory_bytes()[1]
    if free is not None and tables.num_bytes > free:
        raise ConfigError(
            f"the tables and the state of {tables.rule} do not fit in the free memory",
            value=f"{tables.num_bytes / machine.GIB:.1f} GiB",
            allowed=f"{free / machine.GIB:.1f} GiB",
            fix="lower --max-rows or --dim",
        )


def compare(
    kinds: Sequence[Tables],
    draws: Sequence[Draw],
    names: Sequence[str],
    *,
    seconds: float = 2.0,
    processor_time: bool = False,
    heard: Callable[[Measurement | LeftOut], object] = lambda _: None,
) -> Comparison:
    """Measure libraries one after another; tables are created once per optimizer and used for all batch sizes.

    Args:
        kinds: the same tables for each optimizer; the first is also used for lookups.
        draws: batches for them.
        names: names in `LIBRARIES`.
        seconds: time per measurement.
        processor_time: measure the CPU time of all threads instead of wall-clock time.
        heard: called with each result when it is available.
    """
    if processor_time and kinds[0].device.type != "cpu":
        raise ConfigError("processor time does not measure a GPU", value=str(kinds[0].device), allowed="cpu")
    for tables in kinds:
        check_memory(tables)
    found: list[Measurement | LeftOut] = []
    with _process() as process:
        copied = process.submit(copy_bandwidth, kinds[0].device).result()
    for name in names:
        with _process() as process:
            for tables in kinds:
                lookup = tables is kinds[0]
                task = process.submit(measure_library, name, tables, draws, seconds, lookup, processor_time)
                try:
                    results: list[Measurement | LeftOut] = task.result()
                except BrokenProcessPool:
                    results = [LeftOut(name, None, "its process was killed, perhaps out of memory", None)]
                for one in results:
                    found.append(one)
                    heard(one)
                if any(isinstance(one, LeftOut) and one.operation is None for one in results):
                    break
    measurements = tuple(one for one in found if isinstance(one, Measurement))
    left_out = tuple(one for one in found if isinstance(one, LeftOut))
    return Comparison(kinds[0], str(kinds[0].device), copied, measurements, left_out)


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def measure_library(
    name: str, tables: Tables, draws: Sequence[Draw], seconds: float, lookup: bool, processor_time: bool = False
) -> list[Measurement | LeftOut]:
    """Measure one library with one optimizer in this process."""
    library = LIBRARIES[name]
    absent = why_absent(name, library, tables.device)
    if absent is not None:
        return [absent]
    if tables.rule not in library.rules[tables.device.type]:
        return [LeftOut(name, tables.rule, f"has no {tables.rule} on {tables.device.type}", None)]
    found: list[Measurement | LeftOut] = []
    clock = time.process_time if processor_time else time.perf_counter
    try:
        bind = library.build(tables)
        for draw in draws:
            load = draw.load(tables)
            steps = bind(load)
            # Training first: its first step is the first of the process and includes all compilation.
            times = measure(steps.train, NUM_BATCHES, tables.device, seconds, clock)
            found.append(_figure(tables.rule, name, load, times, step_bytes(tables, load)))
            if lookup:
                times = measure(steps.forward, NUM_BATCHES, tables.device, seconds, clock)
                found.append(_figure(LOOKUP, name, load, times, lookup_bytes(tables, load)))
            del steps
        del bind
    except torch.cuda.OutOfMemoryError:
        found.append(LeftOut(name, tables.rule, "out of memory", None))
    gc.collect()
    if tables.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _figure(operation: str, name: str, load: Load, times: Times, num_bytes: float) -> Measurement:
    return Measurement(
        operation, name, load.size, load.num_ids, load.distinct_rows, times.best_ms, times.median_ms, times.high_ms,
        times.first_ms, load.num_ids / times.best_ms * 1e3, num_bytes / times.best_ms / 1e6,
    )  # fmt: skip

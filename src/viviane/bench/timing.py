"""Timing of steps, and the memory bandwidth of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

_MIN_ROUNDS: Final = 1
_MAX_ROUNDS: Final = 400
_COPY_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 30}


@dataclass(frozen=True)
class Times:
    """Milliseconds of one step.

    Args:
        first_ms: the first step, including compilation and first touches of memory.
        best_ms: the fastest time of each batch, averaged over the batches.
        median_ms, high_ms: median and 80th percentile of all steps except the first rounds.
    """

    first_ms: float
    best_ms: float
    median_ms: float
    high_ms: float


def measure(
    step: Callable[[int], object],
    count: int,
    device: torch.device,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Time step(0) to step(count - 1) in turn, for about `seconds`, at least one round after a warm-up round.

    On a busy machine the fastest times are the most meaningful: other load can only add time. On a GPU complete
    rounds are timed, since steps follow one another without waiting.

    Args:
        step: runs one batch.
        count: number of batches.
        device: device to synchronize with.
        seconds: time to spend; compilation and slow steps may take longer.
        clock: clock in seconds; `time.process_time` measures the CPU time of all threads of this process.
    """
    laps = [range(i, i + 1) for i in range(count)] if device.type == "cpu" else [range(count)]
    first = _lap(step, range(1), device, clock)
    for lap in laps:
        _lap(step, lap, device, clock)
    times: list[list[float]] = [[] for _ in laps]
    begin = time.perf_counter()
    while len(times[0]) < _MIN_ROUNDS or (len(times[0]) < _MAX_ROUNDS and time.perf_counter() - begin < seconds):
        for lap, found in zip(laps, times, strict=True):
            found.append(_lap(step, lap, device, clock))
    every = sorted(one for found in times for one in found)
    best = statistics.fmean(min(found) for found in times)
    return Times(first, best, statistics.median(every), every[int(0.8 * (len(every) - 1))])


def _lap(
    step: Callable[[int], object], batches: Iterable[int], device: torch.device, clock: Callable[[], float]
) -> float:
    """Return the milliseconds per batch of some batches."""
    chosen = list(batches)
    _wait(device)
    begin = clock()
    for i in chosen:
        step(i)
    _wait(device)
    return (clock() - begin) * 1e3 / len(chosen)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, seconds: float = 1.0) -> float:
    """Return the bandwidth of a large torch copy, in GB/s of bytes read and written; the best of many.

    Example:
        >>> copy_bandwidth(torch.device("cpu"), seconds=0.01) > 0
        True
    """
    num_bytes = _COPY_BYTES[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = measure(lambda _: target.copy_(source), 1, device, seconds).best_ms
    return 2 * num_bytes / best / 1e6

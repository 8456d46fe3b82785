"""How fast a device's memory is, and its way to other devices: measured, for the planner."""

from __future__ import annotations

import math
import os
from time import perf_counter
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from viviane.core.machine import memory_bytes
from viviane.parallel.costs import Machine
from viviane.parallel.group import Group

FIXED_COSTS: Final = {"cpu": (40.0, 0.5, 2.0), "cuda": (0.1, 0.03, 1.0)}
"""By kind of device: nanoseconds of a looked-up row and milliseconds of an exchange, beside their bytes; and what a
byte that is summed costs, of one that is sent. An H200 sorts 5.2 million ids in 352 us, 0.07 ns each."""
CACHE_BYTES: Final = {"cpu": 0, "cuda": 30_000_000}
"""By kind of device: half of the cache of an H200 (60 MB); on CPUs a row's cost beside its bytes decides."""
WIDTH_MS: Final = {"cpu": 0.0, "cuda": 0.06}
"""By kind of device: of a further width of rows. An H200 took 0.1 ms for a small table of its own width, its work
included: a gather, a sort, an update in two launches and what prepares them."""
_LINK_BYTES: Final = {"cpu": 8 << 20, "cuda": 128 << 20}
"""By kind of device: what a process sends. Of 8 MiB over NVLink much of the time is that of the call (four H200, eager:
4 MiB take .040 ms, 64 MiB .218), which the planner counts apart."""
_CPU_BYTES, _GPU_BYTES = 64 << 20, 1 << 30
_REPEATS = 5
# By group, and not by its number, so that processes never differ in what they know: measuring is an exchange.
_measured: WeakKeyDictionary[Any, dict[torch.device, Machine]] = WeakKeyDictionary()
_measured_alone: dict[torch.device, Machine] = {}


def copy_gb_per_s(device: torch.device) -> float:
    """Return bytes read plus written per nanosecond by a large copy on a device: the best of five.

    Example:
        >>> copy_gb_per_s(torch.device("cpu")) > 0.1
        True
    """
    size = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_ns(source, target)


def link_gb_per_s() -> float | None:
    """Return bytes sent per nanosecond from the first GPU to the second; None with fewer than two."""
    if torch.cuda.device_count() < 2:
        return None
    source = torch.zeros(_GPU_BYTES // 4, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(_GPU_BYTES // 4, dtype=torch.uint8, device="cuda:1")
    return len(source) / _best_ns(source, target)


def measure_machine(group: Group, device: torch.device) -> Machine:
    """Describe the processes' devices by rank 0's figures, speeds rounded to powers of two; all call it together.

    The first call for a group of torch.distributed and a device measures; later ones return what it found, at once.

    Example:
        >>> measure_machine(Group(), torch.device("cpu")).memory_bytes > 0
        True
    """
    key = group.device_group
    known = _measured_alone if key is None else _measured.setdefault(key, {})
    if device not in known:
        known[device] = _measure(group, device)
    return known[device]


def _measure(group: Group, device: torch.device) -> Machine:
    if device.type == "cuda":
        held = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        total, _ = memory_bytes()
        held = total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    link = _exchange_gb_per_s(group, device)
    own = [held, copy_gb_per_s(device), link]
    memory, speed, link = group.gather_data(own)[0]
    return machine_of(device, int(memory), _power_of_two(speed), _power_of_two(link))


def machine_of(device: torch.device, memory: int, speed: float, link: float) -> Machine:
    """Return a device of these speeds, with the fixed costs of its kind."""
    row_ns, call_ms, sum_ratio = FIXED_COSTS[device.type]
    shares = device.type == "cpu"
    return Machine(
        memory, speed, link, row_ns, call_ms, sum_ratio, shares, CACHE_BYTES[device.type], WIDTH_MS[device.type]
    )


def _exchange_gb_per_s(group: Group, device: torch.device) -> float:
    """Return bytes sent to other processes per nanosecond by an exchange of all with all: the best of ten."""
    if group.size == 1:
        return 1.0  # nothing is sent
    count = _LINK_BYTES[device.type] // group.size
    given = torch.zeros(count * group.size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(2 * _REPEATS + 1):  # other processes are in the way more often than in a copy
        _wait(given)
        start = perf_counter()
        taken = group.all_to_all(given, [count] * group.size, [count] * group.size)
        _wait(taken)
        times.append(perf_counter() - start)
    return count * (group.size - 1) / (1e9 * min(times[1:]))


def _power_of_two(number: float) -> float:
    return float(2.0 ** round(math.log2(number)))


def _best_ns(source: Tensor, target: Tensor) -> float:
    times = []
    for _ in range(_REPEATS + 1):  # the first one touches fresh pages
        _wait(source, target)
        start = perf_counter()
        target.copy_(source)
        _wait(source, target)
        times.append(perf_counter() - start)
    return 1e9 * min(times[1:])


def _wait(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

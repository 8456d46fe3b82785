"""How fast a device's memory is, and its way to other devices: measured, for the planner."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

_CPU_BYTES, _GPU_BYTES = 64 << 20, 1 << 30
_REPEATS = 5


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

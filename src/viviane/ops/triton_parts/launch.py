"""Launch Triton kernels: on the right device, with a tile's shape, and with the columns of an output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from viviane.ops.capture import refuse_capture

WARP = 32
_PROGRAMS_BESIDE = 4  # on each multiprocessor
_NOTHING = nullcontext()
_ALIGNED = 16  # elements; kernels profit from no more


class Columns(NamedTuple):
    """Where a kernel finds the columns of an output.

    Args:
        places: (F,), int64, on the device, or None where they are first + f * step.
        first, step: see `places`.
        aligned: a power of two, at most 16, that divides every column and the output's width.
    """

    places: Tensor | None
    first: int
    step: int
    aligned: int


@cache
def find_columns(columns: tuple[int, ...], width: int, device: torch.device) -> Columns:
    """Describe columns; those with one distance between them need no list.

    Kept for good, a number a feature: it is copied just once, and a CUDA graph may continue reading it.

    Example:
        >>> find_columns((0, 8, 16), 24, torch.device("cpu"))
        Columns(places=None, first=0, step=8, aligned=8)
    """
    aligned = math.gcd(_ALIGNED, width, *columns)
    step = columns[1] - columns[0] if len(columns) > 1 else 0
    if all(column == columns[0] + f * step for f, column in enumerate(columns)):
        return Columns(None, columns[0], step, aligned)
    refuse_capture(device, "a new layout of the output", fix="run an iteration with such a batch before the capture")
    return Columns(torch.tensor(columns, dtype=torch.int64).to(device), 0, 0, aligned)


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one, on which Triton launches; nothing to do for the interpreter.

    Example:
        >>> with on_device(torch.ones(1)):
        ...     pass
    """
    if not tensor.is_cuda or tensor.get_device() == torch.accelerator.current_device_index():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def current_stream(device: int) -> int:
    """Return the handle of a GPU's current stream in 1 us; `torch.cuda.current_stream` takes 5, 15 with cold caches.

    Example:
        >>> synchronize(current_stream(0))  # doctest: +SKIP
    """
    handle: int = driver.active.get_current_stream(device)
    return handle


@cache
def few_programs(device: torch.device) -> int:
    """Return how many programs run beside other kernels: four for each multiprocessor.

    More would wait, for a link or for memory, in places that the others could use; these keep some 400 GB/s of a link
    on their way, and are enough for memory's speed where each holds 16 KiB.

    Example:
        >>> few_programs(torch.device("cpu"))
        8
    """
    return _PROGRAMS_BESIDE * (multiprocessors(device) if device.type == "cuda" else 2)


def whole_programs(device: torch.device) -> int:
    """Return how many programs of 32 warps run beside matrix products: on a fourth of the multiprocessors.

    Each has one for itself; the products, which need all registers of one, keep the others. They fill a link, too.

    Example:
        >>> whole_programs(torch.device("cpu"))
        2
    """
    return multiprocessors(device) // 4 if device.type == "cuda" else 2


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has.

    Example:
        >>> multiprocessors(torch.device("cuda"))  # doctest: +SKIP
        132
    """
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(count: int) -> int:
    """Return the least power of two that is not less.

    Example:
        >>> [power_of_two(count) for count in (1, 3, 8)]
        [1, 4, 8]
    """
    return 1 << (count - 1).bit_length()


def warps_for(dim: int) -> int:
    """Return how many warps hold one row of D numbers, sixteen of them a thread at most.

    Example:
        >>> warps_for(128), warps_for(4096)
        (1, 8)
    """
    return min(8, max(1, power_of_two(dim) // (16 * WARP)))


def ceil_div(count: int, size: int) -> int:
    """Return how many blocks of a size cover a count.

    Example:
        >>> ceil_div(9, 4)
        3
    """
    return -(-count // size)


def devices_agree(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all tensors are on one device.

    Example:
        >>> devices_agree([torch.ones(1), None])
        True
    """
    return len({tensor.device for tensor in tensors if tensor is not None}) == 1

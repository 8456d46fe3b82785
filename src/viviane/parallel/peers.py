"""Memory on the GPUs of one host that all their processes write to: an exchange without collectives.

A library that exchanges tensors copies what a kernel wrote once more, and its kernels begin when others leave them
room. GPUs that reach each other's memory need neither: the kernel that looks rows up stores them where the other
process reads them, and a barrier signals that they are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from platform import node
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from viviane.parallel.group import Group

T = TypeVar("T")
UNIT: Final = 256
"""Bytes: a part of such memory begins at a multiple of it."""


class SymmetricMemory(Protocol):
    """Equal pieces of memory, one of each process, that all of them read and write."""

    def base(self, dtype: torch.dtype) -> Tensor:
        """Return the flat tensor from whose first number `offset` counts."""
        ...

    def offset(self, rank: int, start: int, dtype: torch.dtype) -> int:
        """Return where byte `start` of a process's piece is, in numbers from the first of `base`; it may be negative.

        Kernels add such an offset to the address of `base`, whatever lies between.
        """
        ...

    def view(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor over a process's piece, from byte `start` on."""
        ...

    def barrier(self, channel: int) -> None:
        """Go on when all processes have come here; what they wrote before is there then."""
        ...


class PeerMemory:
    """Memory on the GPUs of one host, by PyTorch's symmetric memory; a CUDA graph can record what is done with it.

    All processes make it together; see `open_peer_memory`.

    Args:
        memory: this process's piece, made by `allocate`.
        group: the processes, over NCCL.
    """

    def __init__(self, memory: Tensor, group: Group) -> None:
        self._rank, self._memory = group.rank, memory
        self._handle = _symmetric().rendezvous(memory, group.device_group)
        self._starts = [self.view(rank, 0, (1,), torch.uint8).data_ptr() for rank in range(group.size)]

    @staticmethod
    def allocate(num_bytes: int, device: torch.device) -> Tensor:
        """Return a piece; torch's own allocator gives back what it keeps for later where there is no room."""
        try:
            found: Tensor = _symmetric().empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError:
            torch.cuda.empty_cache()
            found = _symmetric().empty(num_bytes, dtype=torch.uint8, device=device)
        return found

    def base(self, dtype: torch.dtype) -> Tensor:
        """Return this process's piece as numbers."""
        return self._memory.view(dtype)

    def offset(self, rank: int, start: int, dtype: torch.dtype) -> int:
        """Return how far a process's byte `start` is from this process's first, in numbers."""
        return (self._starts[rank] - self._starts[self._rank] + start) // dtype.itemsize

    def view(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor over a process's piece."""
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype, device=self._memory.device)
        found: Tensor = self._handle.get_buffer(rank, tuple(shape), dtype, start // dtype.itemsize)
        return found

    def barrier(self, channel: int) -> None:
        """Let the current stream wait for all processes."""
        self._handle.barrier(channel=channel)


def open_peer_memory(num_bytes: int, group: Group, device: torch.device) -> tuple[PeerMemory | None, str | None]:
    """Allocate memory that all ranks write to, or return the same reason on all ranks why there is none.

    All processes call it together.

    Args:
        num_bytes: of each process's piece.
        group: the processes.
        device: of this process.
    """
    reason = ineligible_reason(group, device)
    if reason is not None:
        return None, reason
    piece, failure = _tried(lambda: PeerMemory.allocate(max(UNIT, rounded(num_bytes)), device), group)
    if piece is None:
        return None, failure
    return _tried(lambda: PeerMemory(piece, group), group)


def _tried(make: Callable[[], T], group: Group) -> tuple[T | None, str | None]:
    """Return what is made, or the first failure of any process: so that no process waits for one that failed."""
    made: T | None = None
    failure: str | None = None
    try:
        made = make()
    except (RuntimeError, ImportError, AttributeError) as error:  # of the driver, of the memory, of torch
        failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    told = group.gather_data(failure)
    for rank, words in enumerate(told):
        if words is not None:
            return None, f"rank {rank}: {words}"
    return made, None


def ineligible_reason(group: Group, device: torch.device) -> str | None:
    """Return the reason why processes cannot write to each other's memory, or None if they may; all call it together.

    Args:
        group: the processes.
        device: of this process.

    Example:
        >>> ineligible_reason(Group(), torch.device("cpu"))
        'one process trains'
    """
    if group.size == 1:
        return "one process trains"
    if device.type != "cuda":
        return f"no GPU: the processes are on {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    every = group.gather_data([_machine(), index])
    if len({machine for machine, _ in every}) > 1:
        return "the processes are on several machines"
    if len({place for _, place in every}) < group.size:
        return "the processes see their own GPU alone (CUDA_VISIBLE_DEVICES); let all of them see all"
    lacks = [place for _, place in every if place != index and not torch.cuda.can_device_access_peer(index, place)]
    for rank, missing in enumerate(group.gather_data(lacks)):
        if missing:
            return f"the GPU of rank {rank} does not reach the memory of cuda:{missing[0]}"
    return None


def rounded(num_bytes: int) -> int:
    """Return the next multiple of `UNIT`.

    Example:
        >>> rounded(1), rounded(512)
        (256, 512)
    """
    return math.ceil(num_bytes / UNIT) * UNIT


def _symmetric() -> Any:
    return import_module("torch.distributed._symmetric_memory")


def _machine() -> str:
    """Name this machine, and this start of it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{node()} {boot.read_text().strip() if boot.exists() else ''}"

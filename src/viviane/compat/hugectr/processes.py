"""The processes of a script: one, or those that torchrun started. Rank 0 prints and writes files."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from viviane.core.files import write_bytes_atomic
from viviane.parallel import Group, join_processes


def num_processes() -> int:
    """Return the number of processes of the script."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    """Return whether this process prints and writes files."""
    return num_processes() == 1 or int(os.environ["RANK"]) == 0


def shared_device() -> str:
    """Return the device of each process of a group: the GPU of its rank, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def group() -> Group:
    """Return the group of all processes."""
    return join_processes(shared_device()) if num_processes() > 1 else Group()


def wait_for_all() -> None:
    """Wait for all processes."""
    group().gather_numbers([0])


def write(file: Path, data: bytes) -> None:
    """Write a file, only on rank 0."""
    if is_first():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(file, data)


def rows_of_all(part: torch.Tensor) -> torch.Tensor:
    """Return the rows of every process's part, (N, ...), concatenated in order of rank."""
    if num_processes() == 1:
        return part
    flat = torch.cat(group().gather(part.contiguous().reshape(-1)))
    return flat.view(-1, *part.shape[1:])

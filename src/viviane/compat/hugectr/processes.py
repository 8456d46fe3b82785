"""The processes that a script runs in: one, or those that torchrun started. The first one speaks and writes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from viviane.core.files import write_bytes_atomic
from viviane.parallel import Group, join_processes


def num_processes() -> int:
    """Return how many processes run the script."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    """Say whether this process speaks and writes."""
    return num_processes() == 1 or int(os.environ["RANK"]) == 0


def shared_device() -> str:
    """Return where each of several processes trains: on the GPU of its own rank, or on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def group() -> Group:
    """Return the group of all processes."""
    return join_processes(shared_device()) if num_processes() > 1 else Group()


def wait_for_all() -> None:
    """Wait until every process is here."""
    group().gather_numbers([0])


def write(file: Path, data: bytes) -> None:
    """Write a file, on the first process alone."""
    if is_first():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(file, data)


def rows_of_all(part: torch.Tensor) -> torch.Tensor:
    """Return the rows of every process's part, (N, ...), one below the other in order of rank."""
    if num_processes() == 1:
        return part
    flat = torch.cat(group().gather(part.contiguous().reshape(-1)))
    return flat.view(-1, *part.shape[1:])

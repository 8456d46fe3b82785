"""Checkpoints of several processes: tables are put together by all of them, rank 0 writes the files.

Every process reads them again, so the folder stands on a disk that all of them see.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from viviane.optim import DenseOptimizer
from viviane.parallel import Group
from viviane.training.checkpoint import Progress, write_checkpoint
from viviane.training.checkpoint_store import CheckpointStore


def write_together(folder: str | Path, module: nn.Module, group: Group, **options: Any) -> None:
    """Write a checkpoint; all processes call it together, and return when it is whole.

    Args:
        folder: of rank 0.
        options: as of `write_checkpoint`.
    """
    if group.rank == 0:
        write_checkpoint(folder, module, **options)
    else:
        take_part(module, **options)
    group.gather_numbers([0])


def take_part(module: nn.Module, **options: Any) -> None:
    """Do what `write_checkpoint` does on rank 0, whose exchanges need every process, and keep nothing."""
    with tempfile.TemporaryDirectory(prefix="viviane-") as scratch:
        write_checkpoint(Path(scratch) / "checkpoint", module, **options)


class FollowerStore(CheckpointStore):
    """The store of a process other than rank 0: it takes part in saving, and leaves files to rank 0."""

    def clean(self) -> None:
        """Leave the folder to rank 0."""

    def save(self, module: nn.Module, optimizer: DenseOptimizer | None, progress: Progress) -> Path:
        """Take part in writing a checkpoint."""
        take_part(module, optimizer=optimizer, progress=progress)
        return self.path(progress.step)

    def discard_after(self, step: int) -> None:
        """Leave the folder to rank 0."""

"""Updates of several storages, in parallel branches while a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from viviane.embedding.table_storage import TableStorage
from viviane.ops.capture import URGENT, branch


def begin_updates(
    storages: Sequence[TableStorage],
    device: torch.device,
    name: str,
    move: Callable[[TableStorage], None],
) -> Callable[[], None]:
    """Update storages one after another; during capture each in its own branch, so that tails of updates overlap.

    Args:
        storages: whose gradients wait.
        device: of the storages.
        name: of the branches; storages of the same name follow one another.
        move: takes a storage's step.

    Returns:
        a function that makes the current stream wait for all updates and releases their inputs; it must be called.
    """
    if device.type != "cuda":
        for storage in storages:
            move(storage)
        return _nothing
    held: list[list[Tensor]] = []
    joins: list[Callable[[], None]] = []
    for i, storage in enumerate(storages):
        held.append(storage.waiting_tensors())
        with branch(device, f"{name}.{i}", is_open=True, priority=URGENT) as join:
            move(storage)
        joins.append(join)

    def finish() -> None:
        for join in joins:
            join()
        held.clear()

    return finish


def _nothing() -> None:
    """Do nothing: updates on a CPU are finished when they return."""

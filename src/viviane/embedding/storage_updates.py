"""Updates of several storages, beside one another where a CUDA graph is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.storage import Storage
from viviane.ops.capture import URGENT, branch


def begin_updates(
    storages: Sequence[Storage | DynamicStorage],
    device: torch.device,
    name: str,
    move: Callable[[Storage | DynamicStorage], None],
) -> Callable[[], None]:
    """Move storages one after another; in a recording each in a branch, since the end of an update has little to do.

    Args:
        storages: whose gradients wait.
        device: of the storages.
        name: of the branches; storages of the same name follow one another.
        move: takes a storage's step.

    Returns:
        what lets the current stream wait for all of them, and lets go of what they read; it has to be called.
    """
    held: list[list[Tensor]] = []
    joins: list[Callable[[], None]] = []
    for i, storage in enumerate(storages):
        held.append(storage.waiting_tensors() if isinstance(storage, Storage) else [])
        with branch(device, f"{name}.{i}", is_open=True, priority=URGENT) as join:
            move(storage)
        joins.append(join)

    def finish() -> None:
        for join in joins:
            join()
        held.clear()

    return finish

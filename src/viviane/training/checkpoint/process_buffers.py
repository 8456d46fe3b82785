"""Buffers in which the processes of a group differ: estimates that each makes from its own batches.

The weights of a checkpoint hold those of rank 0. Those of the others lie beside the random generators; without them a
resumed run would not go on as it would have. A run of more processes begins with rank 0's in the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.embedding.module_parts import process_buffers
from viviane.parallel import Group


def gather_process_buffers(module: nn.Module, group: Group) -> dict[str, Tensor]:
    """Return the buffers of all ranks but 0, as "buffers/rank<r>/<name>", on the host; all ranks call it."""
    found: dict[str, Tensor] = {}
    if group.size == 1:
        return found
    for name, buffer in process_buffers(module).items():
        every = group.gather(buffer.detach().cpu().reshape(-1))
        found |= {f"buffers/rank{rank}/{name}": every[rank].reshape(buffer.shape) for rank in range(1, group.size)}
    return found


def restore_process_buffers(module: nn.Module, tensors: Mapping[str, Tensor], group: Group) -> None:
    """Copy this rank's buffers in, where `gather_process_buffers` has given them.

    Raises:
        CheckpointError: one has another shape or type than the module's.
    """
    for name, buffer in process_buffers(module).items():
        saved = tensors.get(f"buffers/rank{group.rank}/{name}")
        if saved is None:
            continue
        if saved.shape != buffer.shape or saved.dtype != buffer.dtype:
            raise CheckpointError(
                "a buffer is another one than the module's", where=f"rank {group.rank}, {name}",
                value=f"{saved.dtype} {tuple(saved.shape)}", allowed=f"{buffer.dtype} {tuple(buffer.shape)}",
            )  # fmt: skip
        buffer.copy_(saved)

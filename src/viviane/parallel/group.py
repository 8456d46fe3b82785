"""The processes that train together, and what they exchange.

Shapes: n processes; splits count elements of a flat tensor for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from viviane.core.errors import ConfigError


class Group:
    """Processes 0 to n - 1, of which this one is `rank`; a group of one exchanges nothing.

    Args:
        process_group: of torch.distributed, for tensors on the device; None: this process alone.
        control: a group over the CPU for sizes, so that a GPU is not made to wait; None takes process_group.

    Example:
        >>> alone = Group()
        >>> alone.rank, alone.size, alone.all_to_all(torch.arange(3), [3], [3]).tolist()
        (0, 1, [0, 1, 2])
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, control: dist.ProcessGroup | None = None
    ) -> None:
        self._group = process_group
        self._control = control or process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)

    @classmethod
    def world(cls) -> Group:
        """Return the group of all processes that torchrun started, or of this one alone.

        Raises:
            ConfigError: torchrun started several processes, and torch.distributed was not initialised.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        world = dist.group.WORLD
        assert world is not None
        if dist.get_backend(world) == "gloo":
            return cls(world)
        return cls(world, dist.new_group(backend="gloo"))

    def all_to_all(self, given: Tensor, given_splits: Sequence[int], taken_splits: Sequence[int]) -> Tensor:
        """Send each process its part of a flat tensor, and return the parts they sent, in order of rank.

        Args:
            given: (sum of given_splits,), contiguous.
            given_splits: elements for each process.
            taken_splits: elements from each process.
        """
        if self._group is None:
            return given
        taken = torch.empty(sum(taken_splits), dtype=given.dtype, device=given.device)
        dist.all_to_all_single(taken, given, list(taken_splits), list(given_splits), group=self._group)
        return taken

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Give all processes the tensor of one, in place."""
        if self._group is not None:
            dist.broadcast(tensor, group_src=source, group=self._group)
        return tensor

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every process, in order of rank; a list of one length everywhere."""
        if self._group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self._control)
        return [one.tolist() for one in every]

    def agree(self, what: str, number: int) -> None:
        """Refuse to go on where processes differ in a number.

        Raises:
            ConfigError: naming the processes' numbers.
        """
        numbers = [one[0] for one in self.gather_numbers([number])]
        if len(set(numbers)) > 1:
            raise ConfigError(f"the processes differ in {what}", value=", ".join(map(str, numbers)))

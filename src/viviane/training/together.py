"""What the processes of a group settle in every training step.

Shapes: B rows of this process's share of the global batch, n processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.embedding import EmbeddingCollection
from viviane.parallel import Group
from viviane.training.dense_state import collections_of, dense_buffers, dense_parameters


class Together:
    """The size of the global batch, whether anyone asks to stop, and this process's share of the loss.

    A loss of a global batch is a mean over all its rows. Every process computes the mean over its own rows, l_r; with
    W_r what it divides by (the number of rows, or the sum of sample weights of rows that have the label),

        loss = sum_r s_r l_r,     s_r = W_r / sum_q W_q

    so s_r l_r is what each of them sends backward, and gradients are summed over the processes.

    Args:
        group: the processes.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.num_rows = 0
        """Rows of the global batch."""
        self.asks_to_stop = False
        """Whether this process was asked to stop; all of them hear of it in the next step."""
        self.stop_is_agreed = False

    def begin(self, batch: Batch, *, is_bad: bool = False) -> list[int]:
        """Exchange sizes before a step; returns the ranks whose input is bad."""
        every = self.group.gather_numbers([batch.size, int(self.asks_to_stop), int(is_bad)])
        self.num_rows = sum(one[0] for one in every)
        self.stop_is_agreed = self.stop_is_agreed or any(one[1] for one in every)
        return [rank for rank, one in enumerate(every) if one[2]]

    def share_of_rows(self, batch: Batch) -> float:
        """Return this process's share of the global batch's rows."""
        return batch.size / max(1, self.num_rows)

    def shares(self, divisors: Sequence[Tensor]) -> list[Tensor]:
        """Return s_r of this process for each term of a loss, of what each divides by."""
        own = torch.stack(list(divisors))
        total = self.group.all_reduce(own.clone())
        return list((own / total.clamp_min(torch.finfo(torch.float32).tiny)).float().unbind())


def check_collections(module: nn.Module, group: Group) -> None:
    """Refuse tables that each process would train on its own rows alone.

    Raises:
        ConfigError: an EmbeddingCollection, or a ShardedCollection of other processes, in a group of several.
    """
    if group.size == 1:
        return
    for name, collection in collections_of(module).items():
        if isinstance(collection, EmbeddingCollection):
            raise ConfigError(
                "every process would train its own tables", where=f"module {name!r}", value=type(collection).__name__,
                fix="build it with viviane.parallel.make_tables(..., group=join_processes()), which gives a "
                "ShardedCollection where there are several processes",
            )  # fmt: skip


@torch.no_grad()
def share_first_weights(module: nn.Module, group: Group) -> None:
    """Let every process begin with rank 0's dense weights and buffers."""
    for tensor in _dense(module):
        whole = tensor.detach().contiguous()
        group.broadcast(whole, 0)
        tensor.copy_(whole)


def agree_on_weights(module: nn.Module, group: Group) -> None:
    """Check that dense weights and buffers are the same bits on every process.

    Raises:
        ConfigError: they are not.
    """
    if group.size == 1:
        return
    total = 0
    for tensor in _dense(module):
        data = tensor.detach().cpu().contiguous().view(-1)
        total = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), total)
    group.agree("dense weights (check sum)", total)


def _dense(module: nn.Module) -> list[Tensor]:
    return [*dense_parameters(module).values(), *dense_buffers(module, persistent_only=False).values()]

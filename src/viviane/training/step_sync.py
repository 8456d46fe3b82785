"""What the processes of a group settle in every training step.

Shapes: B rows of this process's share of the global batch, n processes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError
from viviane.embedding import EmbeddingCollection
from viviane.parallel import Group
from viviane.training.dense_exchange import DenseExchange
from viviane.training.dense_state import collections_of, dense_buffers, dense_parameters

_LATE = 6  # steps after which a signal is read: the host need not wait for it, though it is some replays ahead
_FREE = "call trainer.fix_sizes(None) in all processes before such a batch"


class StepSync:
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
        self.stop_requested = False
        """Whether this process was asked to stop; all of them hear of it in the next step."""
        self.stop_agreed = False

        self._fixed: _StaticShape | None = None

    def set_static_shape(self, rows: int, exchange: DenseExchange, hotness: Mapping[str, int] | None = None) -> None:
        """Say beforehand that every process's batch has so many rows, on all processes alike: no host waits then.

        Requests to stop travel with the dense gradients from then on, and are heard `_LATE` steps later, in the same
        step everywhere.

        Args:
            rows: of every process's batch.
            exchange: of the dense gradients.
            hotness: ids of every row, by column with bags.
        """
        exchange.is_static = True
        if self._fixed is None or self._fixed.exchange is not exchange:
            self._fixed = _StaticShape(exchange)
        self._fixed.rows, self._fixed.hotness = rows, dict(hotness or {})

    def clear_static_shape(self) -> None:
        """Let batches have any number of rows again, on all processes alike."""
        if self._fixed is not None:
            self.stop_agreed = self.stop_agreed or self._fixed.rest()
            self._fixed.exchange.is_static = False
            self._fixed = None

    @property
    def is_static(self) -> bool:
        """Whether batches have a number of rows that was said beforehand."""
        return self._fixed is not None

    @property
    def hotness(self) -> Mapping[str, int]:
        """Ids of every row that were said, by column with bags."""
        return {} if self._fixed is None else self._fixed.hotness

    def has_static_shape(self, batch: Batch) -> bool:
        """Whether a batch has the same shapes on all processes: its rows and the ids of all its bags were said."""
        return self._fixed is not None and self._fixed.hotness.keys() >= batch.bags.keys()

    def begin(self, batch: Batch, *, is_bad: bool = False) -> list[int]:
        """Exchange sizes before a step; returns the ranks whose input is bad.

        Where sizes are fixed nothing is exchanged, and nobody is said to be bad.

        Raises:
            DataError: the batch has another number of rows, or of ids, than was said.
        """
        if self._fixed is not None:
            return self._begin_static(self._fixed, batch)
        every = self.group.gather_numbers([batch.size, int(self.stop_requested), int(is_bad)])
        self.num_rows = sum(one[0] for one in every)
        self.stop_agreed = self.stop_agreed or any(one[1] for one in every)
        return [rank for rank, one in enumerate(every) if one[2]]

    def _begin_static(self, fixed: _StaticShape, batch: Batch) -> list[int]:
        if batch.size != fixed.rows:
            raise DataError(
                "the batch has another number of rows than was said", where=batch.origin, value=batch.size,
                allowed=str(fixed.rows), fix=_FREE,
            )  # fmt: skip
        for name, count in fixed.hotness.items():
            if name in batch.bags and batch.bags[name].values.shape[0] != count * batch.size:
                raise DataError(
                    "the bags have another number of ids than was said", where=f"column {name!r}, {batch.origin}",
                    value=batch.bags[name].values.shape[0], allowed=f"{count} a row", fix=_FREE,
                )  # fmt: skip
        self.num_rows = fixed.rows * self.group.size
        self.stop_agreed = fixed.next(self.stop_requested) or self.stop_agreed
        return []

    def expect_signals(self, signals: NDArray[np.int64], done: torch.cuda.Event | None) -> None:
        """Say where the signals of the step that has begun will be: on the host, for a replay writes them there.

        Args:
            signals: of all processes, summed.
            done: after which they are there, and stay for `_LATE` steps; None: they are.
        """
        assert self._fixed is not None
        self._fixed.pending_signals = (signals, done)

    def share_of_rows(self, batch: Batch) -> float:
        """Return this process's share of the global batch's rows."""
        return batch.size / max(1, self.num_rows)

    def shares(self, divisors: Sequence[Tensor]) -> list[Tensor]:
        """Return s_r of this process for each term of a loss, of what each divides by."""
        own = torch.stack(list(divisors))
        total = self.group.all_reduce(own.clone())
        return list((own / total.clamp_min(torch.finfo(torch.float32).tiny)).float().unbind())


_Signals = tuple[NDArray[Any], torch.cuda.Event | None]


class _StaticShape:
    """Signals of steps under way: every step's are read `_LATE` steps later, when they have long been there."""

    def __init__(self, exchange: DenseExchange) -> None:
        self.exchange = exchange
        self.rows = 0
        self.hotness: dict[str, int] = {}
        self.pending_signals: _Signals | None = None
        """Of the last step, where somebody has said it."""
        self._said = False
        self._ring: deque[_Signals] = deque()
        self._has_begun = False

    def next(self, asks: bool) -> bool:
        """Begin a step: keep the last one's signals, say this process's own; returns whether an older one asks to stop.

        Args:
            asks: whether this process was asked to stop.
        """
        self._keep_last()
        self._has_begun = True
        if asks != self._said:
            self.exchange.signals[:1].fill_(float(asks))
            self._said = asks
        return len(self._ring) >= _LATE and self._read()

    def rest(self) -> bool:
        """Wait for all steps; returns whether any of them asks to stop."""
        self._keep_last()
        self.exchange.signals.zero_()
        return sum(self._read() for _ in range(len(self._ring))) > 0

    def _keep_last(self) -> None:
        if self._has_begun:
            pending = self.pending_signals
            self._ring.append(self._copied(self.exchange.received[1:]) if pending is None else pending)
        self.pending_signals = None

    def _copied(self, signals: Tensor) -> _Signals:
        slot = torch.empty(signals.shape, dtype=signals.dtype, pin_memory=signals.is_cuda)
        slot.copy_(signals, non_blocking=True)
        done = None
        if signals.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return slot.numpy(), done

    def _read(self) -> bool:
        signals, done = self._ring.popleft()
        if done is not None:
            done.synchronize()
        return bool(signals[0] > 0)


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

"""Synchronization of the ranks of a group in every training step.

Shapes: B rows in the local batch, n ranks.
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
from viviane.embedding.module_parts import collections_of, dense_buffers, dense_parameters, process_buffers
from viviane.parallel import Group
from viviane.training.step.dense_exchange import DenseExchange
from viviane.training.step.objective import Objective

_LATE = 6  # steps until a signal is read: enough that the host, several replays in advance, does not wait for it
_FIX = "call trainer.fix_sizes(None) on all ranks before such a batch"


class StepSync:
    """Agrees on the size of the global batch, requests to stop, and this rank's share of the loss.

    The loss of a global batch is the mean over all its rows. Rank r computes the mean l_r over its local batch. Let W_r
    be its divisor (the number of rows, or the sum of the sample weights of rows that have the label). Then

        loss = sum_r s_r l_r,     s_r = W_r / sum_q W_q

    Rank r runs backward from s_r l_r, and gradients are summed over the ranks.

    Args:
        group: the ranks that train together.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.num_rows = 0
        """Rows of the global batch."""
        self.stop_requested = False
        """Whether this rank was asked to stop; all ranks learn it in the next step."""
        self.stop_agreed = False

        self._fixed: _StaticShape | None = None

    def set_static_shape(self, rows: int, exchange: DenseExchange, hotness: Mapping[str, int] | None = None) -> None:
        """Set the static shape of local batches, with the same arguments on all ranks. Hosts no longer wait then.

        Requests to stop are then sent with the dense gradients, and read `_LATE` steps later, in the same step on all
        ranks.

        Args:
            rows: rows of every local batch.
            exchange: exchange of the dense gradients.
            hotness: ids per row, by bag column.
        """
        exchange.is_static = True
        if self._fixed is None or self._fixed.exchange is not exchange:
            self._fixed = _StaticShape(exchange)
        self._fixed.rows, self._fixed.hotness = rows, dict(hotness or {})

    def clear_static_shape(self) -> None:
        """Return to dynamic shapes; all ranks call it."""
        if self._fixed is not None:
            self.stop_agreed = self.stop_agreed or self._fixed.rest()
            self._fixed.exchange.is_static = False
            self._fixed = None

    @property
    def is_static(self) -> bool:
        """Whether batches have a static number of rows."""
        return self._fixed is not None

    @property
    def hotness(self) -> Mapping[str, int]:
        """Static number of ids per row, by bag column."""
        return {} if self._fixed is None else self._fixed.hotness

    def has_static_shape(self, batch: Batch) -> bool:
        """Return whether the number of rows and the hotness of all bags of a batch are static."""
        return self._fixed is not None and self._fixed.hotness.keys() >= batch.bags.keys()

    def begin(self, batch: Batch, *, is_bad: bool = False) -> list[int]:
        """Exchange batch sizes before a step and return the ranks whose input is invalid.

        With static shapes nothing is exchanged, and the result is empty.

        Raises:
            DataError: the batch does not have the static shape.
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
                "the number of rows differs from the static batch shape", where=batch.origin, value=batch.size,
                allowed=str(fixed.rows), fix=_FIX,
            )  # fmt: skip
        for name, count in fixed.hotness.items():
            if name in batch.bags and batch.bags[name].values.shape[0] != count * batch.size:
                raise DataError(
                    "the number of ids differs from the static batch shape", where=f"column {name!r}, {batch.origin}",
                    value=batch.bags[name].values.shape[0], allowed=f"{count} per row", fix=_FIX,
                )  # fmt: skip
        self.num_rows = fixed.rows * self.group.size
        self.stop_agreed = fixed.next(self.stop_requested) or self.stop_agreed
        return []

    def expect_signals(self, signals: NDArray[np.int64], done: torch.cuda.Event | None) -> None:
        """Set where the replay that has begun writes its signals in host memory.

        Args:
            signals: the sums over all ranks; they stay valid for `_LATE` steps.
            done: the event after which they are valid; None: they are valid already.
        """
        assert self._fixed is not None
        self._fixed.pending_signals = (signals, done)

    def loss(self, objective: Objective, output: object, batch: Batch) -> Tensor:
        """Return the local batch's share of the loss of the global batch.

        Args:
            objective: the loss of a batch.
            output: output of the module.
            batch: the local batch.
        """
        divisors = objective.divisors(batch)
        shares: list[Tensor] | list[float] = [self.share_of_rows(batch)] * objective.num_terms
        if divisors is not None:
            shares = self.shares(divisors)
        if not batch.size:
            return objective.logits(output, 0).sum()  # 0, so that backward still reaches every weight
        return objective.loss(output, batch, shares=shares)

    def share_of_rows(self, batch: Batch) -> float:
        """Return the local batch's share of the rows of the global batch."""
        return batch.size / max(1, self.num_rows)

    def shares(self, divisors: Sequence[Tensor]) -> list[Tensor]:
        """Return s_r of this rank for each term of a loss, given the divisor of each term."""
        own = torch.stack(list(divisors))
        total = self.group.all_reduce(own.clone())
        return list((own / total.clamp_min(torch.finfo(torch.float32).tiny)).float().unbind())


_Signals = tuple[NDArray[Any], torch.cuda.Event | None]


class _StaticShape:
    """The static shape, and the signals of steps in flight: each is read `_LATE` steps later, without waiting."""

    def __init__(self, exchange: DenseExchange) -> None:
        self.exchange = exchange
        self.rows = 0
        self.hotness: dict[str, int] = {}
        self.pending_signals: _Signals | None = None
        """Signals of the last step, if a replay writes them."""
        self._sent = False
        self._ring: deque[_Signals] = deque()
        self._has_begun = False

    def next(self, requests_stop: bool) -> bool:
        """Begin a step: keep the last step's signals and send this rank's; return whether an older one requests a stop.

        Args:
            requests_stop: whether this rank was asked to stop.
        """
        self._keep_last()
        self._has_begun = True
        if requests_stop != self._sent:
            self.exchange.signals[:1].fill_(float(requests_stop))
            self._sent = requests_stop
        return len(self._ring) >= _LATE and self._read()

    def rest(self) -> bool:
        """Wait for all steps and return whether any of them requests a stop."""
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
    """Refuse tables that each rank would train on its local batch only.

    Raises:
        ConfigError: the group has several ranks, and the module has an EmbeddingCollection or a ShardedCollection of
            another group.
    """
    if group.size == 1:
        return
    for name, collection in collections_of(module).items():
        if isinstance(collection, EmbeddingCollection):
            raise ConfigError(
                "every rank would train its own tables", where=f"module {name!r}", value=type(collection).__name__,
                fix="build it with viviane.parallel.make_tables(..., group=join_processes()), which gives a "
                "ShardedCollection if there are several ranks",
            )  # fmt: skip


@torch.no_grad()
def share_first_weights(module: nn.Module, group: Group) -> None:
    """Broadcast rank 0's dense weights and buffers."""
    for tensor in _dense(module):
        whole = tensor.detach().contiguous()
        group.broadcast(whole, 0)
        tensor.copy_(whole)


def agree_on_weights(module: nn.Module, group: Group) -> None:
    """Check that dense weights and buffers are bit-identical on all ranks, but for buffers of each process.

    Raises:
        ConfigError: weights or buffers differ.
    """
    if group.size == 1:
        return
    total, apart = 0, {id(one) for one in process_buffers(module).values()}
    for tensor in _dense(module):
        if id(tensor) in apart:
            continue
        data = tensor.detach().cpu().contiguous().view(-1)
        total = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), total)
    group.agree("dense weights (checksum)", total)


def _dense(module: nn.Module) -> list[Tensor]:
    return [*dense_parameters(module).values(), *dense_buffers(module, persistent_only=False).values()]

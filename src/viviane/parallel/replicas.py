"""Gradients of replicated tables: summed over the processes, so that all copies move alike.

Shapes: R rows of a storage, D its width, B rows of the batch, W columns of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from viviane.config import SGD
from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding import EmbeddingCollection, Storage
from viviane.embedding.lookup import entries_of, flat_rows, hand_over
from viviane.embedding.table_storage import RowGradients, StorageLookup
from viviane.ops.row_update import Entries, Scratch, prepare_rows, update_rows
from viviane.ops.rules import rule_of
from viviane.parallel.flat_sums import FlatSums, part_size, start_ordered_sum, sums_in_order
from viviane.parallel.group import Group

_ZERO_ROWS = 2  # see viviane.ops.key_rows


def join_replicas(replicas: EmbeddingCollection, group: Group) -> None:
    """Put the sum over all processes in place of the gradients that wait here.

    Replicated tables are small: each storage's gradients are exchanged as one matrix (R, D + 1), whose last column
    marks the touched rows. All processes get the same bits.
    """
    if group.size == 1:
        return
    for storage in replicas.fixed_storages():
        if not storage.has_gradients or storage.is_joined:
            continue
        tables = storage.waiting_tables()
        rows, sums = storage.summed_gradients()
        whole = torch.zeros(storage.null_row, storage.dim + 1, device=sums.device)
        whole[rows, : storage.dim] = sums
        whole[rows, storage.dim] = 1.0
        group.all_reduce(whole)
        touched = whole[:, storage.dim] > 0
        every = torch.arange(storage.null_row, device=sums.device)
        own = every.masked_fill(~touched, storage.null_row)  # untouched rows are skipped
        gradient = whole[:, : storage.dim].contiguous().view(-1)
        storage.replace_gradients(RowGradients(Entries(own, gradient), tables))


def check_unmixed(replicas: EmbeddingCollection | None, *, joined: bool) -> None:
    """Refuse a step whose gradients are partly summed over the processes already.

    Raises:
        ConfigError: what waits in a storage was summed, and what comes is not, or the other way round.
    """
    for storage in [] if replicas is None else replicas.fixed_storages():
        if storage.has_gradients and storage.is_joined != joined:
            raise ConfigError(
                "gradients that are summed over the processes and others wait for one step",
                fix="call step() or discard_gradients() between them",
            )


def ignores_zero_gradients(rule: AnyOptimizer | None) -> bool:
    """Whether a gradient of zero leaves a row and its state as they are, bit by bit.

    Example:
        >>> from viviane.config import SGD, AdaGrad
        >>> ignores_zero_gradients(AdaGrad()), ignores_zero_gradients(SGD(momentum=0.9))
        (True, False)
    """
    if rule is None:
        return True
    return rule_of(rule).rests and not rule.weight_decay


class ReplicaSum:
    """Sums one storage's gradients over the processes, without a look at any number: a CUDA graph can record it.

    They become one matrix (R, D) of zeros and sums, and, where a rule moves rows that have no gradient, R numbers
    that mark the touched rows.

    Args:
        storage: of replicated tables.
        group: the processes.
        wire: type of the sums on the wire.
    """

    def __init__(self, storage: Storage, group: Group, wire: torch.dtype) -> None:
        self.storage, self.group, self.wire = storage, group, wire
        self._scratch = Scratch()
        self._every = torch.arange(storage.null_row, dtype=torch.int32, device=storage.weight.device)
        kind = torch.int32 if storage.null_row * storage.dim < 2**31 else torch.int64
        self._sources = self._every.to(kind) * storage.dim
        self._rests = all(ignores_zero_gradients(one.optimizer) for one in storage.rule_ranges)
        self._size = storage.null_row * storage.dim + (0 if self._rests else storage.null_row + _ZERO_ROWS)
        self._is_ordered = sums_in_order(group, storage.weight.device)
        self._peers: FlatSums | None = None

    def open_peers(self) -> None:
        """Let captured batches sum over peer memory, if there is any. Collective."""
        if self.group.size > 1:
            self.group.open_second_group()
            sizes, device = [(self._size, self.wire)], self.storage.weight.device
            self._peers = FlatSums(self.group, sizes, device, uses_peers=True, name="replica sums")

    def prepare(self, part: StorageLookup) -> None:
        """Begin the part of the sum that needs no gradients."""
        if part.tables and self.group.size > 1:
            rows, bound = part.rows.reshape(-1), self.storage.null_row + _ZERO_ROWS
            prepare_rows(rows, self._scratch, bound, _ZERO_ROWS)

    def start(self, part: StorageLookup, gradient: Tensor, *, through_peers: bool = False) -> Callable[[], None]:
        """Begin the sum; the function that is returned waits for it and hands it to the storage.

        Args:
            part: what was looked up.
            gradient: of the output, (B, W).
            through_peers: whether to use the peer memory, which exists once: in captured steps.
        """
        if not part.tables:
            return lambda: None
        if self.group.size == 1:
            hand_over([part], gradient)
            return lambda: None
        storage, (given, width) = self.storage, flat_rows(gradient)
        rows, dim = storage.null_row, storage.dim
        entries = entries_of(part, given, len(gradient), width)
        entries = replace(entries, bound=rows + _ZERO_ROWS, skipped=_ZERO_ROWS)
        flat = torch.zeros(self._size, device=gradient.device)
        # 0 - (-1) g: the rule of plain descent sums the gradients of equal rows.
        update_rows(flat[: rows * dim].view(rows, dim), {}, entries, SGD(), lr=-1.0, step=1, scratch=self._scratch)
        if not self._rests:
            flat[rows * dim :].index_fill_(0, entries.rows.to(torch.int64), 1.0)
        whole, wait = self._start_sum(flat, self._peers if through_peers else None)

        def finish() -> None:
            wait()
            own, order = self._every, self._every if self._rests else None
            if not self._rests:
                own = own.masked_fill(whole[rows * dim : -_ZERO_ROWS] == 0, rows)  # these are passed over
            bound = rows + _ZERO_ROWS
            summed = Entries(own, whole[: rows * dim], self._sources, None, math.gcd(16, dim), bound, order)
            storage.add_gradients(RowGradients(summed, part.tables))
            storage.is_joined = True

        return finish

    def _start_sum(self, flat: Tensor, peers: FlatSums | None) -> tuple[Tensor, Callable[[], None]]:
        """Begin to sum numbers in the type of the wire; returns what holds the sums after the wait."""
        if peers is not None:
            [whole] = peers.tensors
            whole.copy_(flat)
            return whole, peers.start(0, through_peers=True)
        if not self._is_ordered:
            whole = flat.to(self.wire)
            return whole, self.group.start_sum(whole)
        padded = flat.new_zeros(self.group.size * part_size(self._size, self.group.size), dtype=self.wire)
        padded[: self._size].copy_(flat)
        return padded[: self._size], start_ordered_sum(self.group, padded, beside=False)

"""Sums of flat tensors over the ranks, in place, that are the same bits by whichever way they go.

Each rank sums one part of a tensor, in float32 and in order of rank, rounds once, and gives the sums to all. Where GPUs
write to each other's memory one kernel between two barriers does that (NCCL's all-reduce of 10 MB in bf16 over four
H200 takes 100 us, of which most is latency). Otherwise the parts are sent, summed and sent back. Two ranks on one
machine use the library's all-reduce there, which rounds as often; so do groups over several machines or on CPUs, which
never use peer memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from viviane.ops.capture import URGENT, branch, reached
from viviane.ops.wire_blocks import SUMMED_TOGETHER, sum_pieces
from viviane.parallel.group import Group
from viviane.parallel.peers import UNIT, SymmetricMemory, ineligible_reason, open_peer_memory, rounded

_COMPLETE, _SUMMED = range(2)  # channels of barriers


class _Flat(NamedTuple):
    """A tensor, all of its memory, what one rank sums of it, and where it begins in each rank's memory."""

    tensor: Tensor
    whole: Tensor
    part: int
    starts: Tensor


class FlatSums:
    """Flat tensors that are summed over the ranks; all of them make it together.

    Args:
        group: the ranks, whose second group is open.
        sizes: number of elements and type of each tensor.
        device: of the tensors.
        uses_peers: whether to allocate them where other GPUs write to them, if these can.
        name: of the sums over peer memory in a capture: those of one name follow one another.
    """

    def __init__(
        self,
        group: Group,
        sizes: Sequence[tuple[int, torch.dtype]],
        device: torch.device,
        *,
        uses_peers: bool,
        name: str = "dense sums",
    ) -> None:
        self._group, self._device, self._name = group, device, name
        self._is_ordered = sums_in_order(group, device)
        self._memory: SymmetricMemory | None = None
        parts = [part_size(count, group.size) for count, _ in sizes]
        begins, total = [], 0
        for part, (_, dtype) in zip(parts, sizes, strict=True):
            begins.append(total)
            total += rounded(group.size * part * dtype.itemsize)
        if uses_peers:
            self._memory, _ = open_peer_memory(max(UNIT, total), group, device)
        self._flats = [
            self._flat(begin, part, count, dtype)
            for begin, part, (count, dtype) in zip(begins, parts, sizes, strict=True)
        ]

    def _flat(self, begin: int, part: int, count: int, dtype: torch.dtype) -> _Flat:
        size, memory = self._group.size, self._memory
        if memory is None:
            whole = torch.zeros(size * part, dtype=dtype, device=self._device)
            starts = torch.arange(size, device=self._device) * part
        else:
            whole = memory.view(self._group.rank, begin, (size * part,), dtype).zero_()
            starts = torch.tensor([memory.offset(rank, begin, dtype) for rank in range(size)], device=self._device)
        return _Flat(whole[:count], whole, part, starts)

    @property
    def has_peers(self) -> bool:
        """Whether the tensors are in memory that other GPUs write to."""
        return self._memory is not None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, (N,) each, zeros at first."""
        return [one.tensor for one in self._flats]

    def start(self, number: int, *, through_peers: bool = False) -> Callable[[], None]:
        """Begin to sum a tensor, beside the embedding exchange; the returned function lets the stream wait for it.

        All ranks begin the sums in the same order and wait for them in that order; a wait may be repeated.

        Args:
            number: of the tensor.
            through_peers: whether to use peer memory if `has_peers`: in captured steps, which all ranks replay.
        """
        flat = self._flats[number]
        if through_peers and self._memory is not None:
            return self._start_peers(flat, self._memory)
        if self._is_ordered:
            return start_ordered_sum(self._group, flat.whole, beside=True)
        return self._group.start_all_reduce(flat.tensor)

    def _start_peers(self, flat: _Flat, memory: SymmetricMemory) -> Callable[[], None]:
        first = self._group.rank * flat.part
        with branch(self._device, self._name, priority=URGENT) as join:
            memory.barrier(_COMPLETE)
            sum_pieces(memory.base(flat.tensor.dtype), flat.starts, first, first + flat.part)
            memory.barrier(_SUMMED)
        return join


def sums_in_order(group: Group, device: torch.device) -> bool:
    """Whether sums that do not go through peer memory use `start_ordered_sum`. Collective.

    Example:
        >>> sums_in_order(Group(), torch.device("cpu"))
        False
    """
    return ineligible_reason(group, device) is None and group.size > 2


def start_ordered_sum(group: Group, whole: Tensor, *, beside: bool) -> Callable[[], None]:
    """Begin to sum a tensor in place, each part in order of rank; the returned function lets the stream wait for it.

    Args:
        group: the ranks.
        whole: (size P,), with P of `part_size`.
        beside: whether to use the second group.
    """
    part = len(whole) // group.size
    splits = [part] * group.size
    taken = group.start_all_to_all(whole, splits, splits, beside=beside)
    joins: list[Callable[[], None]] = []

    def wait() -> None:
        if not joins:
            pieces = taken()
            sum_pieces(pieces, torch.arange(group.size, device=whole.device) * part, 0, part)
            whole.copy_(group.start_all_to_all(pieces, splits, splits, beside=beside)())
            joins.append(reached(whole.device))
        joins[0]()

    return wait


def part_size(count: int, size: int) -> int:
    """Return how many of `count` numbers each of `size` ranks sums: all as many, the last ones beyond the end.

    Example:
        >>> part_size(100, 4), part_size(0, 4)
        (32, 0)
    """
    return -(-count // (size * SUMMED_TOGETHER)) * SUMMED_TOGETHER

"""Copies on a GPU: one tensor into another type, and many tensors whose addresses are told each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.copies.gpu_kernels import cast_kernel, copy_kernel
from viviane.ops.triton_parts.launch import ceil_div, on_device

_CAST_BLOCK = 2048
_PIECE = 4096  # units of a program
_UNIT_BYTES, _WIDE_BYTES = 4, 16


def cast(target: Tensor, source: Tensor) -> None:
    """target = source, in the target's type; contiguous both."""
    size = source.numel()
    if not size:
        return
    wide = all(one.data_ptr() % (8 * one.itemsize) == 0 for one in (source, target))
    with on_device(source):
        cast_kernel[(ceil_div(size, _CAST_BLOCK),)](source, target, size, wide=wide, block=_CAST_BLOCK, num_warps=4)


class Launch:
    """One launch that fills tensors; the addresses of what they are filled from go along.

    Args:
        targets: contiguous.
        num_slots: how many calls may be under way at once.
    """

    def __init__(self, targets: Sequence[Tensor], num_slots: int) -> None:
        device = targets[0].device
        self.targets = list(targets)
        self._fits = all(one.is_contiguous() and one.nbytes % _UNIT_BYTES == 0 for one in targets)
        sizes = [one.nbytes // _UNIT_BYTES for one in targets]
        pieces = [(i, start, size) for i, size in enumerate(sizes) for start in range(0, size, _PIECE)]
        self._pieces = torch.tensor(pieces, dtype=torch.int64).view(-1, 3).to(device)
        self._there = [one.data_ptr() for one in targets]
        self._table = torch.zeros(len(targets), 2, dtype=torch.int64, device=device)
        self._slots = torch.zeros(num_slots, len(targets), 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._next = 0

    def __call__(self, sources: Sequence[Tensor]) -> bool:
        """Fill the targets; False, and nothing is done, where the sources do not lie as that needs."""
        here = [one.data_ptr() for one in sources]
        if not self._fits or any(place % _UNIT_BYTES for place in here):
            return False
        for one, target in zip(sources, self.targets, strict=True):
            if not one.is_contiguous() or one.shape != target.shape or one.dtype != target.dtype:
                return False
        if not len(self._pieces):
            return True
        pairs = list(zip(here, self._there, strict=True))
        slot = self._slots[self._next]
        slot.copy_(torch.tensor(pairs, dtype=torch.int64))
        self._next = (self._next + 1) % len(self._slots)
        self._table.copy_(slot, non_blocking=True)
        wide = all(place % _WIDE_BYTES == 0 for pair in pairs for place in pair)
        with on_device(self._table):
            copy_kernel[(len(self._pieces),)](self._table, self._pieces, wide=wide, block=_PIECE, num_warps=4)
        return True

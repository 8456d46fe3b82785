"""Copies on a GPU: one tensor into another type, and many tensors at addresses given per call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.copies import copy_each
from viviane.ops.copies.gpu_kernels import cast_kernel, copy_kernel
from viviane.ops.triton_parts.launch import ceil_div, on_device

_CAST_BLOCK = 2048
_LARGEST_PIECE, _SMALLEST_PIECE = 4096, 1024  # units of a program
_PROGRAMS = 96  # that keep a link to the host's memory at work
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
    """One launch that fills tensors from a list of addresses.

    Args:
        targets: contiguous.

    Attributes:
        width: number of addresses.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        device = targets[0].device
        self._takes = [not (one.nbytes % _UNIT_BYTES or one.data_ptr() % _WIDE_BYTES) for one in targets]
        taken = [one for one, takes in zip(targets, self._takes, strict=True) if takes]
        self._others = [one for one, takes in zip(targets, self._takes, strict=True) if not takes]
        self.width = len(taken)
        sizes = [one.nbytes // _UNIT_BYTES for one in taken]
        self._piece = _LARGEST_PIECE
        while self._piece > _SMALLEST_PIECE and sum(sizes) < _PROGRAMS * self._piece:
            self._piece //= 2
        pieces = [(i, start, size) for i, size in enumerate(sizes) for start in range(0, size, self._piece)]
        self._pieces = torch.tensor(pieces, dtype=torch.int64).view(-1, 3).to(device)
        self._there = torch.tensor([one.data_ptr() for one in taken], dtype=torch.int64).to(device)
        self._copies: list[Tensor] = []

    def words(self, sources: Sequence[Tensor]) -> list[int]:
        """Return the addresses of sources; of copies, where they do not lie as the launch reads them."""
        if self._others:
            others = [one for one, takes in zip(sources, self._takes, strict=True) if not takes]
            copy_each(self._others, others)
            sources = [one for one, takes in zip(sources, self._takes, strict=True) if takes]
        words = [one.data_ptr() for one in sources]
        self._copies = []  # what the call before made is let go: the current stream has read it before it writes there
        for i, one in enumerate(sources):
            if words[i] % _WIDE_BYTES or not one.is_contiguous():
                self._copies.append(one.clone(memory_format=torch.contiguous_format))
                words[i] = self._copies[-1].data_ptr()
        return words

    def __call__(self, words: Tensor) -> None:
        """Fill the targets from these addresses."""
        if len(self._pieces):
            with on_device(words):
                copy_kernel[(len(self._pieces),)](words, self._there, self._pieces, block=self._piece, num_warps=4)

"""Stacks: matrices of equally many rows in one vector, so that rows of all of them are taken in one launch.

A stack of R rows is a vector of words of four bytes. Its matrices follow one another, each with room for R rows
rounded up to a multiple of 64: so every matrix begins at a multiple of 256 bytes, whatever its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from viviane.ops.dispatch import kernels_serve, load

__all__ = ["StackForm", "take_rows"]

_ROUND: Final = 64  # rows


class StackForm:
    """Which matrices a stack has.

    Args:
        widths: words of four bytes in a row of each matrix.

    Example:
        >>> form = StackForm([1, 2])
        >>> form.num_words(3), form.start(1, 3)
        (192, 64)
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self._before = (0, *accumulate(self.widths))
        self._tables: dict[torch.device, Tensor] = {}

    @cached_property
    def row_words(self) -> int:
        """Words of a row in all matrices together."""
        return self._before[-1]

    def num_words(self, num_rows: int) -> int:
        """Return the words of a stack of this many rows."""
        return self.row_words * rounded(num_rows)

    def start(self, number: int, num_rows: int) -> int:
        """Return the word at which a matrix begins in a stack of this many rows."""
        return self._before[number] * rounded(num_rows)

    def matrix(self, stack: Tensor, number: int, num_rows: int) -> Tensor:
        """Return a matrix of a stack, (num_rows, width), as words."""
        width, start = self.widths[number], self.start(number, num_rows)
        return stack[start : start + num_rows * width].view(num_rows, width)

    def table(self, device: torch.device) -> Tensor:
        """Return the width of each matrix and the words of a row before it, (M, 2), int64, on a device."""
        found = self._tables.get(device)
        if found is None:
            rows = list(zip(self.widths, self._before, strict=False))
            found = self._tables[device] = torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device)
        return found


def rounded(num_rows: int) -> int:
    """Return the rows that each matrix of a stack has room for.

    Example:
        >>> rounded(0), rounded(1), rounded(64)
        (0, 64, 64)
    """
    return -(-num_rows // _ROUND) * _ROUND


def take_rows(
    form: StackForm, target: Tensor, target_rows: int, first: int, source: Tensor, source_rows: int, order: Tensor
) -> None:
    """target[first + i] = source[order[i]], in every matrix of two stacks.

    Args:
        form: of both stacks.
        target: (form.num_words(target_rows),), int32, contiguous; is written to.
        target_rows: rows of the target.
        first: the first row that is written to.
        source: (form.num_words(source_rows),), int32, contiguous, on the target's device.
        source_rows: rows of the source.
        order: numbers of the source's rows, (n,), int32, contiguous, on the device, none of them out of range.

    Example:
        >>> form = StackForm([1, 2])
        >>> source, target = torch.arange(192, dtype=torch.int32), torch.zeros(192, dtype=torch.int32)
        >>> take_rows(form, target, 2, 0, source, 3, torch.tensor([2, 0], dtype=torch.int32))
        >>> form.matrix(target, 0, 2).tolist(), form.matrix(target, 1, 2).tolist()
        ([[2], [0]], [[68, 69], [64, 65]])
    """
    if not len(order) or not form.row_words:
        return
    if kernels_serve(target.device):
        load("row_stacks", "gpu").take_rows(form, target, target_rows, first, source, source_rows, order)
        return
    for number in range(len(form.widths)):
        rows = form.matrix(source, number, source_rows)[order]
        form.matrix(target, number, target_rows)[first : first + len(order)] = rows

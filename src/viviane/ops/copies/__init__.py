"""Many tensors copied in few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from viviane.ops.dispatch import kernels_serve, load

LARGE_BYTES: Final = 1 << 18
"""A launch of torch's for many tensors gives each 64 KiB to one multiprocessor, and so copies large ones slowly."""


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target: large ones one by one, small ones of a type in one launch.

    Args:
        targets, sources: as many of one as of the other, of the same shapes; types may differ.

    Example:
        >>> targets = [torch.zeros(2), torch.zeros(1)]
        >>> copy_each(targets, [torch.ones(2), torch.full((1,), 2.0)])
        >>> [one.tolist() for one in targets]
        [[1.0, 1.0], [2.0]]
    """
    small: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.nbytes >= LARGE_BYTES:
            copy_large(target, source)
        else:
            small.setdefault((target.dtype, source.dtype), []).append(i)
    for places in small.values():
        torch._foreach_copy_([targets[i] for i in places], [sources[i] for i in places])


def copy_large(target: Tensor, source: Tensor) -> None:
    """Copy a large tensor; on a GPU also into another type at the speed of memory, which torch's copy has not.

    Example:
        >>> target = torch.zeros(2, dtype=torch.bfloat16)
        >>> copy_large(target, torch.tensor([1.0, 2.0])); target.tolist()
        [1.0, 2.0]
    """
    contiguous = target.is_contiguous() and source.is_contiguous() and target.shape == source.shape
    if target.dtype != source.dtype and contiguous and target.is_cuda and kernels_serve(target.device):
        load("copies", "gpu").cast(target, source)
    else:
        target.copy_(source)


class Refill:
    """Fills the same tensors again and again, from others each time; on a GPU by a launch that a CUDA graph can repeat.

    Args:
        targets: contiguous; what one is filled from has its shape and type.

    Attributes:
        width: how many words `fill` reads; 0 where nothing is left to it.

    Example:
        >>> target = torch.zeros(2)
        >>> refill = Refill([target])
        >>> words = torch.tensor(refill.words([torch.tensor([3.0, 4.0])]), dtype=torch.int64)
        >>> refill.fill(words); target.tolist()
        [3.0, 4.0]
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self.targets = list(targets)
        device = targets[0].device if targets else torch.device("cpu")
        self._launch = load("copies", "gpu").Launch(self.targets) if targets and kernels_serve(device) else None
        self.width: int = 0 if self._launch is None else self._launch.width

    def words(self, sources: Sequence[Tensor]) -> list[int]:
        """Return what `fill` is to read: where the sources are. They stay as they are until it has run.

        What it cannot read is copied at once, on the current stream.
        """
        if self._launch is not None:
            words: list[int] = self._launch.words(sources)
            return words
        copy_each(self.targets, sources)
        return []

    def fill(self, words: Tensor) -> None:
        """Copy each source to its target.

        Args:
            words: (width,), int64, on the device of the targets.
        """
        if self._launch is not None:
            self._launch(words)

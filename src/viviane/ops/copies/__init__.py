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
    """Copies to the same tensors again and again, from others each time, in one launch on a GPU.

    Args:
        targets: contiguous; what is copied to one has its shape and type.
        num_slots: how many calls may be under way at once: the call before the last `num_slots` must be over.

    Example:
        >>> target = torch.zeros(2)
        >>> Refill([target], 1)([torch.tensor([3.0, 4.0])]); target.tolist()
        [3.0, 4.0]
    """

    def __init__(self, targets: Sequence[Tensor], num_slots: int) -> None:
        self.targets = list(targets)
        device = targets[0].device if targets else torch.device("cpu")
        serves = len(targets) > 1 and device.type == "cuda" and kernels_serve(device)
        self._launch = load("copies", "gpu").Launch(self.targets, num_slots) if serves else None

    def __call__(self, sources: Sequence[Tensor]) -> None:
        """Copy each source to its target."""
        if self._launch is not None and self._launch(sources):
            return
        copy_each(self.targets, sources)

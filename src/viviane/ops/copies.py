"""Many tensors copied in few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

LARGE_BYTES: Final = 1 << 18
"""A launch for many tensors gives each 64 KiB to one multiprocessor, and so copies large ones slowly."""


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
            target.copy_(source)
        else:
            small.setdefault((target.dtype, source.dtype), []).append(i)
    for places in small.values():
        torch._foreach_copy_([targets[i] for i in places], [sources[i] for i in places])

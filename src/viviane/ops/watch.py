"""Kernels that look for NaN and infinite numbers in what they write, while it is enabled.

The gradient of an embedding lookup is the largest tensor of a step; to read it once more only to look at it costs as
much as the lookup. A kernel that has it in registers looks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Watch:
    """The tensors that kernels checked, and the flag of a non-finite value.

    Args:
        status: int64, on the device; its first number becomes 1.

    Example:
        >>> watch, one = Watch(torch.zeros(1, dtype=torch.int64)), torch.ones(4, 2)
        >>> watch.add(one)
        >>> watch.covers(one[:, 1:]), watch.covers(torch.ones(4, 2)), watch.covers(one.mul_(2))
        (True, False, False)
    """

    def __init__(self, status: Tensor) -> None:
        self.status = status
        # The tensors themselves are kept: their memory is not reused as long as they live.
        self._seen: list[tuple[Tensor, int]] = []

    def add(self, tensor: Tensor) -> None:
        """Note that a kernel looked at a whole tensor, which is contiguous."""
        self._seen.append((tensor, tensor._version))

    def covers(self, tensor: Tensor) -> bool:
        """Whether kernels checked all these tensors, and they were not written since."""
        start, size = tensor.data_ptr(), tensor.element_size()
        last = start + size * sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return any(
            one.dtype == tensor.dtype
            and one._version == version
            and one.data_ptr() <= start <= last < one.data_ptr() + size * one.numel()
            for one, version in self._seen
        )


_active: dict[torch.device, Watch] = {}  # not a context variable: backward runs in threads of torch's own


@contextmanager
def watching(status: Tensor) -> Iterator[Watch]:
    """Let kernels on the status's device look for bad numbers inside a `with` block.

    Example:
        >>> with watching(torch.zeros(1, dtype=torch.int64)) as watch:
        ...     watched(torch.device("cpu")) is watch
        True
    """
    _active[status.device] = watch = Watch(status)
    try:
        yield watch
    finally:
        del _active[status.device]


def watched(device: torch.device) -> Watch | None:
    """Return who asks for it on a device.

    Example:
        >>> watched(torch.device("cpu")) is None
        True
    """
    return _active.get(device)

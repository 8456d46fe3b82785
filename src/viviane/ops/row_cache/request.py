"""Page-locked memory through which a lookup's keys reach a GPU and its answer comes back, without a copy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from viviane.ops.cuda_driver import RecordedLaunch

_KEPT: Final = 16
"""Requests that wait for their next use; more are made while more threads look up at once."""


class LookupRequest:
    """The keys of F features for B rows each, and which of them a cache has, in memory that host and GPU share.

    The host writes `keys`, and `skip` names those that read zeros; the kernel reads them over the link and writes
    `found`: of a small request the start of copies would take longer than the lookup.

    Args:
        capacity: most keys, F x B.
        device: the GPU that reads it; on the CPU, for Triton's interpreter, it is ordinary memory.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        pinned = device.type == "cuda"
        self._keys = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self._skipped = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._found = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._time, self._last_time = torch.zeros(1, dtype=torch.int32, device=device), 0
        self.recorded: dict[Hashable, RecordedLaunch | None] = {}
        """Lookups through this memory by form and address of the output; None: one that was launched once."""
        self.reshape(1, capacity)

    def reshape(self, features: int, rows: int) -> None:
        """Use the memory for other numbers of features and rows."""
        count = features * rows
        self.shape = features, rows
        self.keys: NDArray[np.int64] = self._keys.numpy()[:count].reshape(features, rows)
        """(F, B), keys of the next lookup."""
        self.skips = False
        """Whether some keys are skipped."""
        self.found: NDArray[np.bool_] = self._found.numpy()[:count].view(np.bool_).reshape(features, rows)
        """(F, B), after a lookup: which keys are there. The next lookup overwrites it."""

    def skip(self, feature: int, rows: NDArray[np.int64]) -> None:
        """Let the next lookup read zeros for some rows of a feature, whatever their keys are."""
        skipped = self._skipped.numpy()[: self.keys.size].reshape(self.shape)
        if not self.skips:
            skipped[:] = 0
            self.skips = True
        skipped[feature, rows] = 1

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return keys, skipped and found flags and the time of use as a kernel takes them; None: no key is skipped."""
        return self._keys, self._skipped if self.skips else None, self._found, self._time

    def set_time(self, now: int) -> None:
        """Let later lookups on the current stream note this time of use, a number of 32 bits."""
        if now != self._last_time:
            self._time.fill_(now)
            self._last_time = now


class LookupRequests:
    """Requests of one GPU, each used by one thread at a time.

    Args:
        device: see `LookupRequest`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[LookupRequest] = deque(maxlen=_KEPT)
        self._turn = threading.Lock()

    @contextmanager
    def take(self, features: int, rows: int) -> Iterator[LookupRequest]:
        """Lend a request for so many features and rows."""
        count = features * rows
        with self._turn:
            # The one used last: the processor has it in its caches, and its lookups are recorded.
            fits = next((one for one in reversed(self._free) if one.capacity >= count), None)
            if fits is not None:
                self._free.remove(fits)
        request = fits or LookupRequest(1 << max(8, (count - 1).bit_length()), self._device)
        request.reshape(features, rows)
        try:
            yield request
        except BaseException:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # its kernel may still use the memory that goes back now
            raise
        with self._turn:
            self._free.append(request)

"""A snapshot of rows at one moment, read piece by piece while training moves them: copy on write, row by row."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_BYTES: Final = 4 << 20
_BLOCK_BYTES: Final = 4 << 20
_LIVE, _READ = -1, -2
Bytes: TypeAlias = NDArray[np.uint8]


class RowSnapshot:
    """Tensors with a line for each of R rows, such as weights and optimizer state, as they are when it is made.

    Making it copies nothing. Before a step moves rows, `moving` keeps those that were not read yet; a reader in
    another thread takes the kept ones where there are any, and the live ones elsewhere. So a step pays for the rows
    that it moves, each once, and waits for one piece of `PIECE_BYTES` at the most.

    Memory: 4 bytes a row, and the rows that are moved before they are read.

    Args:
        tensors: by name, (R, ...) each, on the CPU, contiguous.

    Example:
        >>> weight = torch.tensor([[1.0], [2.0], [3.0]])
        >>> held = RowSnapshot({"weight": weight})
        >>> with held.moving(torch.tensor([2, 0, 2])):
        ...     _ = weight.add_(10.0)
        >>> [part.view(np.float32).tolist() for part in held.read("weight", 0, 1)]
        [[[1.0]]]
        >>> [part.view(np.float32).tolist() for part in held.read("weight", 2, 3)]
        [[[3.0]]]
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._live = {name: _as_bytes(tensor) for name, tensor in tensors.items()}
        widths = [part.shape[1] for part in self._live.values()]
        num_rows = len(next(iter(self._live.values())))
        self._slots = np.full(num_rows, _LIVE, np.int32)
        self._block_rows = max(1, _BLOCK_BYTES // max(1, *widths, 1))
        self._blocks: dict[str, list[Bytes]] = {name: [] for name in self._live}
        self._count = 0
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the rows that were copied because a step moved them first."""
        return self._count * sum(int(part.shape[1]) for part in self._live.values())

    @contextmanager
    def moving(self, rows: Tensor) -> Iterator[None]:
        """Keep rows, (N,), in any order and repeated as they are, before the block changes them."""
        with self._lock:
            self._keep(rows.numpy())
            yield

    def _keep(self, rows: NDArray[Any]) -> None:
        slots = self._slots
        fresh = rows[slots[rows] == _LIVE]
        if not len(fresh):
            return
        places = np.arange(len(fresh), dtype=np.int32)
        slots[fresh] = places  # of equal rows the place of the last one is kept
        fresh = fresh[slots[fresh] == places]
        slots[fresh] = np.arange(self._count, self._count + len(fresh), dtype=np.int32)
        start = 0
        while start < len(fresh):
            block, inside = divmod(self._count, self._block_rows)
            part = fresh[start : start + self._block_rows - inside]
            for name, live in self._live.items():
                blocks = self._blocks[name]
                if block == len(blocks):
                    blocks.append(np.empty((self._block_rows, live.shape[1]), np.uint8))
                np.take(live, part, axis=0, out=blocks[block][inside : inside + len(part)], mode="clip")
            start += len(part)
            self._count += len(part)

    def read(self, name: str, start: int, stop: int) -> Iterator[Bytes]:
        """Give the bytes of rows start to stop, (rows, bytes of a row), in order; each piece until the next one."""
        live = self._live[name]
        step = max(1, PIECE_BYTES // max(1, live.shape[1]))
        buffer = np.empty((min(step, stop - start), live.shape[1]), np.uint8)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            piece = buffer[: high - low]
            with self._lock:
                np.copyto(piece, live[low:high])
                slots = self._slots[low:high].copy()
            kept = np.flatnonzero(slots >= 0)
            block, inside = np.divmod(slots[kept], self._block_rows)
            for one in np.unique(block):
                there = block == one
                piece[kept[there]] = self._blocks[name][one][inside[there]]
            yield piece

    def release(self, start: int, stop: int) -> None:
        """Mark rows start to stop of all tensors as read: steps no longer keep copies of them."""
        with self._lock:
            self._slots[start:stop] = _READ


def _as_bytes(tensor: Tensor) -> Bytes:
    rows = tensor.detach()
    found: Bytes = (
        rows.view(torch.uint8).view(len(rows), -1).numpy() if rows.numel() else np.empty((len(rows), 0), np.uint8)
    )
    return found

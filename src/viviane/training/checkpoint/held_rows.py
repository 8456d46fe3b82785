"""Tensor contents as of one step, which a thread can write while training continues.

On the CPU a row of a table is copied only if a step updates it before it is written (`RowSnapshot`). On a GPU
everything is copied to pinned host memory on a separate stream; the stream of the next steps waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.embedding.row_snapshot import RowSnapshot
from viviane.training.checkpoint.tensor_files import Source, UnchangedTensor

_PINNED_BYTES: Final = 64 << 20  # torch allocates pinned memory in powers of two, and reuses it for the next checkpoint
_ON_HOST: Final = 1 << 20  # smaller tensors are cloned where they are


class HeldRows:
    """A range of rows of one tensor of a `RowSnapshot`.

    Args:
        snapshot: the snapshot that holds the rows.
        name: name of the tensor.
        start, stop: range of rows.
        like: the live rows, for shape and type.
        waiting: names of the tensors of these rows that have not been read yet; shared by all of them.
    """

    def __init__(
        self, snapshot: RowSnapshot, name: str, start: int, stop: int, like: Tensor, waiting: set[str]
    ) -> None:
        self._snapshot, self._name, self._rows, self._waiting = snapshot, name, (start, stop), waiting
        self.shape, self.dtype = tuple(like.shape), like.dtype

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes in order."""
        yield from self._snapshot.read(self._name, *self._rows)
        self._waiting.discard(self._name)
        if not self._waiting:
            self._snapshot.release(*self._rows)


class Pinned:
    """A copy of a GPU's tensor in pinned host memory; the copy is asynchronous.

    Args:
        tensor: a GPU tensor.
        stream: the stream that copies.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        step = _PINNED_BYTES // tensor.element_size()
        self._parts = []
        with torch.cuda.stream(stream):
            # Only here: a copy that the current stream starts after `wait_stream` would not be waited for.
            flat = tensor.detach().contiguous().view(-1)
            for start in range(0, len(flat), step):
                given = flat[start : start + step]
                part = torch.empty(len(given), dtype=self.dtype, pin_memory=True)
                self._parts.append(part.copy_(given, non_blocking=True))
            tensor.record_stream(stream)
            self._done = stream.record_event()

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes in order, after the copy has finished."""
        self._done.synchronize()
        for part in self._parts:
            yield part.view(torch.uint8).numpy()


class CopyStream:
    """The stream that copies GPU tensors to the host; `join` makes the current stream wait for it.

    Args:
        device: device of the tensors; on the CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def hold(self, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
        """Return sources with the current content of tensors that may change later."""
        held: dict[str, Source] = {}
        for name, one in tensors.items():
            large = one.numel() * one.element_size() > _ON_HOST
            pinned = self._stream is not None and one.is_cuda and large
            held[name] = (
                Pinned(one, self._stream) if pinned and self._stream is not None else UnchangedTensor(one.clone())
            )
        return held

    def join(self) -> None:
        """Make later work on the current stream wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def held_rows(snapshot: RowSnapshot, rows: range, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    """Return sources of a table's tensors from a snapshot, in which its rows are `rows`."""
    waiting: set[str] = set()
    found: dict[str, Source] = {}
    for name, like in tensors.items():
        short = name.removeprefix("state.")
        waiting.add(short)
        found[name] = HeldRows(snapshot, short, rows.start, rows.stop, like, waiting)
    return found

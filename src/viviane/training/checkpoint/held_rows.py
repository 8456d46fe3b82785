"""Tensors held as they are at a step, so that another thread can write them while training goes on.

On the CPU rows of tables are copied only where a step moves them before they are written (`RowSnapshot`). On a GPU
everything goes into pinned memory of the host over a stream of its own, which the next steps' stream waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.embedding import Storage
from viviane.embedding.row_snapshot import RowSnapshot
from viviane.training.checkpoint.table_parts import TablePart
from viviane.training.checkpoint.tensor_files import Source, Still

_PINNED_BYTES: Final = 64 << 20  # torch keeps pinned memory in powers of two, and gives it to the next checkpoint
_ON_HOST: Final = 1 << 20  # smaller tensors are cloned where they are


class HeldRows:
    """Some rows of one tensor of a `RowSnapshot`.

    Args:
        snapshot: whose rows.
        name: of its tensor.
        start, stop: rows.
        like: the live rows, for shape and type.
        waiting: names of the tensors of these rows that were not read yet, shared by all of them.
    """

    def __init__(
        self, snapshot: RowSnapshot, name: str, start: int, stop: int, like: Tensor, waiting: set[str]
    ) -> None:
        self._snapshot, self._name, self._rows, self._waiting = snapshot, name, (start, stop), waiting
        self.shape, self.dtype = tuple(like.shape), like.dtype

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Give all its bytes in order."""
        yield from self._snapshot.read(self._name, *self._rows)
        self._waiting.discard(self._name)
        if not self._waiting:
            self._snapshot.release(*self._rows)


class Pinned:
    """A copy of a GPU's tensor in pinned memory of the host, on its way there.

    Args:
        tensor: on the GPU.
        stream: that copies.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        step = _PINNED_BYTES // tensor.element_size()
        self._parts = []
        with torch.cuda.stream(stream):
            # Here, not before: a copy that the present stream makes now would not be waited for.
            flat = tensor.detach().contiguous().view(-1)
            for start in range(0, len(flat), step):
                given = flat[start : start + step]
                part = torch.empty(len(given), dtype=self.dtype, pin_memory=True)
                self._parts.append(part.copy_(given, non_blocking=True))
            tensor.record_stream(stream)
            self._done = stream.record_event()

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Give all its bytes in order, after they have arrived."""
        self._done.synchronize()
        for part in self._parts:
            yield part.view(torch.uint8).numpy()


class CopyStream:
    """The stream over which a GPU's tensors are copied out; `join` lets the present stream wait for it.

    Args:
        device: of the tensors; the CPU has no streams, and needs none.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def hold(self, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
        """Return sources of tensors that may change from now on."""
        held: dict[str, Source] = {}
        for name, one in tensors.items():
            large = one.numel() * one.element_size() > _ON_HOST
            pinned = self._stream is not None and one.is_cuda and large
            held[name] = Pinned(one, self._stream) if pinned and self._stream is not None else Still(one.clone())
        return held

    def join(self) -> None:
        """Let what the present stream does from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def held_rows(part: TablePart, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    """Return sources of a part's tensors out of the snapshots that its storage has taken."""
    storage = part.storage
    assert isinstance(storage, Storage)
    index = next(i for i, one in enumerate(storage.rule_ranges) if part.table in one.tables)
    start = storage.bases[part.table] - storage.rule_ranges[index].start
    stop, waiting = start + storage.tables[part.table].num_rows, set()
    found: dict[str, Source] = {}
    for name, like in tensors.items():
        short = name.removeprefix("state.")
        waiting.add(short)
        found[name] = HeldRows(storage.snapshots[index], short, start, stop, like, waiting)
    return found

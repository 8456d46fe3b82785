"""The memory of a lookup's output: buffers that are used again, and margins for concatenation in place.

Touching fresh pages costs more than the lookup that fills them. Margins beside the output let a concatenation copy only
its other inputs.

Shapes: B rows of the batch, W columns of the lookup's output, L columns in front of it, R behind it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from viviane.ops.capture import is_capturing, reached

_SMALL_BYTES = 1 << 20  # below, the allocator hands out warm memory by itself
_MOST = 4
_ALIGNED_BYTES = 64  # as torch's own memory; other frameworks copy what is not
_WIDE_LOAD = 8  # numbers of 16 bits


class Memory(Protocol):
    """Where the output of a lookup comes from."""

    def take(self, size: int, width: int, device: torch.device) -> Tensor:
        """Return a matrix (size, width) of whole rows with any content."""
        ...


class Buffers:
    """Hands out matrices (B, W) whose memory is reused when nothing refers to it.

    On a GPU torch's allocator does that already. On the CPU it returns large blocks to the system, which clears
    their pages for the next use; here a NumPy array owns the memory, and as long as a tensor, a view of it or the
    autograd graph is alive, it counts as a reference to that array.

    Args:
        dtype: of the matrices.

    Example:
        >>> buffers = Buffers(torch.float32)
        >>> first = buffers.take(1024, 512, torch.device("cpu"))
        >>> place, view = first.data_ptr(), first[:1]
        >>> del first
        >>> buffers.take(1024, 512, torch.device("cpu")).data_ptr() == place    # a view is alive
        False
        >>> del view
        >>> buffers.take(1024, 512, torch.device("cpu")).data_ptr() == place
        True
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._arrays: list[np.ndarray] = []
        self._lock = threading.Lock()  # between finding an array idle and laying a tensor over it

    def __getstate__(self) -> dict[str, Any]:
        return {"dtype": self.dtype}  # a copy of a model has memory of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def take(self, size: int, width: int, device: torch.device) -> Tensor:
        """Return a matrix (size, width) with any content."""
        num_bytes = size * width * self.dtype.itemsize
        if device.type != "cpu" or num_bytes < _SMALL_BYTES:
            return torch.empty(size, width, dtype=self.dtype, device=device)
        with self._lock:
            flat = torch.from_numpy(self._free(num_bytes + _ALIGNED_BYTES))
        start = -flat.data_ptr() % _ALIGNED_BYTES
        return flat[start : start + num_bytes].view(self.dtype).view(size, width)

    def _free(self, num_bytes: int) -> np.ndarray:
        for i in range(len(self._arrays)):
            # Two references: the list's and the call's argument. A tensor over the array would be a third.
            if num_bytes <= self._arrays[i].nbytes <= 2 * num_bytes and sys.getrefcount(self._arrays[i]) == _IDLE:
                return self._arrays[i]
        array = np.empty(num_bytes, dtype=np.uint8)
        self._arrays.append(array)
        if len(self._arrays) > _MOST:  # memory in use lives on with the tensors over it
            self._arrays.pop(0)
        return array


def autocast_buffers(own: Buffers, width: int, device: torch.device) -> Buffers:
    """Return where a lookup's output goes: in autocast's type where float32 would be rounded to it at once.

    On the CPU float32 stays: rounding there costs as much as it saves.

    Example:
        >>> autocast_buffers(Buffers(torch.float32), 8, torch.device("cpu")).dtype
        torch.float32
    """
    rounds = device.type == "cuda" and own.dtype == torch.float32 and width % _WIDE_LOAD == 0
    if not rounds or not torch.is_autocast_enabled("cuda"):
        return own
    return _on_gpu(torch.get_autocast_dtype("cuda"))


@cache
def _on_gpu(dtype: torch.dtype) -> Buffers:
    return Buffers(dtype)


def _idle_count() -> int:
    """Return `sys.getrefcount` of an array that only a list holds; it differs between versions of Python."""
    arrays = [np.empty(1, dtype=np.uint8)]
    return sys.getrefcount(arrays[0])


_IDLE = _idle_count()


_WHOLE_BYTES = 16  # what a GPU stores at once


class Margins:
    """Columns that a collection leaves free beside its output.

    Args:
        front: L.
        behind: R.

    Attributes:
        refused: types of output beside which the columns were left as they were, since what was to be joined was of
            another type: they are not left free again.

    Example:
        >>> margins = Margins(1, 0)
        >>> [margins.applies(3, torch.float32, torch.device(kind)) for kind in ("cpu", "cuda")]
        [True, False]
    """

    def __init__(self, front: int, behind: int) -> None:
        self.front, self.behind = front, behind
        self.refused: set[torch.dtype] = set()

    def applies(self, width: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a lookup of W columns leaves margins; on a GPU only if its vectors stay aligned to 16 bytes.

        A traced module has no margins.
        """
        is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        # Capture follows at least one eager step, which has found the refusal already.
        is_refused = dtype in self.refused and not is_capturing(device)
        if is_refused or is_traced:
            return False
        places = (self.front, self.front + width + self.behind)
        return device.type == "cpu" or all(place * dtype.itemsize % _WHOLE_BYTES == 0 for place in places)


class WideRows:
    """Memory of one lookup's output, and of the columns next to it.

    A lookup takes its output from it as from `Buffers`: columns of wider rows.

    Args:
        memory: where the wider rows come from.
        margins: L and R.

    Example:
        >>> rows = WideRows(Buffers(torch.float32), Margins(1, 2))
        >>> own = rows.take(2, 3, torch.device("cpu")).fill_(1)
        >>> whole = rows.join([torch.zeros(2, 1), own, torch.full((2, 2), 2.0)], 1)
        >>> whole.tolist()[0], whole[:, 1].data_ptr() == own.data_ptr()
        ([0.0, 1.0, 1.0, 1.0, 2.0, 2.0], True)
    """

    def __init__(self, memory: Memory, margins: Margins) -> None:
        self._memory, self._margins = memory, margins
        self._whole: Tensor | None = None
        self._put: list[Tensor] = []
        self._wait_for_memory: Callable[[], None] | None = None

    def take(self, size: int, width: int, device: torch.device) -> Tensor:
        """Return a matrix (B, W) with any content, with a row stride of L + W + R."""
        margins = self._margins
        self._whole = self._memory.take(size, margins.front + width + margins.behind, device)
        self._wait_for_memory = None if device.type == "cpu" else reached(device)
        return _detached_view(self._whole, margins.front, (size, width))

    @torch.no_grad()
    def put(self, front: Sequence[Tensor], behind: Sequence[Tensor]) -> None:
        """Copy what will be joined, (B, n) each, next to the output, which may still be in progress; `join` skips it.

        Only where there is room for just that.

        Args:
            front, behind: on the left and on the right of the output.
        """
        whole, margins, every = self._whole, self._margins, [*front, *behind]
        if whole is None or any(one.dim() != 2 or len(one) != len(whole) or one.dtype != whole.dtype for one in every):
            return
        widths = [sum(one.shape[1] for one in side) for side in (front, behind)]
        if widths != [margins.front, margins.behind] or any(one.device != whole.device for one in every):
            return
        if self._wait_for_memory is not None:
            self._wait_for_memory()  # in a branch of a graph, earlier kernels of the branch may still use it
        sides = whole[:, : margins.front], whole[:, whole.shape[1] - margins.behind :]
        for side, parts in zip(sides, (front, behind), strict=True):
            for target, part in zip(torch.split(side, [one.shape[1] for one in parts], 1), parts, strict=True):
                target.copy_(part)
        self._put = every

    def join(self, parts: Sequence[Tensor], place: int) -> Tensor | None:
        """Join parts along axis 1, where the one at `place` is the lookup's output and has room for the others.

        None if it has no margins or was joined before; use `torch.cat` then.
        """
        whole, margins = self._whole, self._margins
        if whole is None or not _is_own(parts[place], whole, margins):
            return None
        if any(part.dtype != whole.dtype for part in parts):
            margins.refused.add(whole.dtype)
            return None
        if not _fit(parts, place, margins):
            return None
        there = {id(one) for one in self._put}
        self._whole, self._put = None, []
        wanted = tuple(i != place and id(part) not in there for i, part in enumerate(parts))
        joined: Tensor = _Join.apply((whole,), wanted, *parts)  # type: ignore[no-untyped-call]
        return joined


def output_memory(
    own: Buffers, margins: Margins | None, width: int, device: torch.device
) -> tuple[Memory, WideRows | None]:
    """Return where a lookup's output goes: memory of its own, or wider rows where that serves; those next to it again.

    Example:
        >>> output_memory(Buffers(torch.float32), None, 3, torch.device("cpu"))[1] is None
        True
    """
    if margins is None or not margins.applies(width, own.dtype, device):
        return own, None
    wide = WideRows(own, margins)
    return wide, wide


def _is_own(part: Tensor, whole: Tensor, margins: Margins) -> bool:
    """Whether a tensor is the lookup's output, in whatever shape."""
    size, total = whole.shape
    first = whole.data_ptr() + margins.front * whole.element_size()
    is_there = part.data_ptr() == first and part.dtype == whole.dtype and part.device == whole.device
    width = total - margins.front - margins.behind
    if not is_there or not size or part.shape[0] != size or part.numel() != size * width:
        return False
    row = part.as_strided(part.shape[1:], part.stride()[1:], part.storage_offset())
    return row.is_contiguous() and (size == 1 or part.stride(0) == total)


def _fit(parts: Sequence[Tensor], place: int, margins: Margins) -> bool:
    """Whether the other parts fill the columns next to the output."""
    own = parts[place]
    if any(len(part) != len(own) or part.shape[2:] != own.shape[2:] or part.device != own.device for part in parts):
        return False
    columns = [math.prod(part.shape[1:]) for part in parts]
    return sum(columns[:place]) == margins.front and sum(columns[place + 1 :]) == margins.behind


def _detached_view(whole: Tensor, column: int, shape: Sequence[int]) -> Tensor:
    """Return rows of a matrix, from a column on, as a tensor that autograd takes for no view of it.

    A view's history would be recomputed from the matrix once a write next to it happened.
    """
    strides = [whole.shape[1], *(math.prod(shape[i + 1 :]) for i in range(1, len(shape)))]
    own = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return own.set_(whole.untyped_storage(), whole.storage_offset() + column, tuple(shape), strides)


class _Join(torch.autograd.Function):
    """Copies parts beside the lookup's output; backward gives each its columns of the gradient, as views."""

    @staticmethod
    def forward(ctx: Any, memory: tuple[Tensor], wanted: tuple[bool, ...], *parts: Tensor) -> Tensor:
        """Return the whole, where all parts lie already but those that are wanted."""
        counts = [part.shape[1] for part in parts]
        ctx.counts = counts
        [whole] = memory
        out = _detached_view(whole, 0, (len(whole), sum(counts), *parts[0].shape[2:]))
        for target, part, copies in zip(torch.split(out, counts, 1), parts, wanted, strict=True):
            if copies:
                target.copy_(part)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Give each part its columns."""
        needed = ctx.needs_input_grad[2:]
        columns = torch.split(gradients[0], ctx.counts, 1)
        return None, None, *(part if wanted else None for part, wanted in zip(columns, needed, strict=True))

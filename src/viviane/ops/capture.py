"""CUDA graphs: is the current stream recording one, what can't be recorded, and what is recorded beside the rest."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch
from torch import Tensor

from viviane.core.errors import ConfigError

URGENT: Final = -1
"""The priority of streams whose kernels others wait for; lower numbers go first, 0 is that of any stream."""
FIRST: Final = -2
"""The priority of a stream whose few small kernels find room beside all others."""


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph.

    Example:
        >>> is_capturing(torch.device("cpu"))
        False
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str, fix: str) -> None:
    """Refuse, while a CUDA graph is recorded, what would wait for the device or be frozen by mistake.

    Example:
        >>> refuse_capture(torch.device("cpu"), "reading a number", "read it before the capture")

    Raises:
        ConfigError: a graph is being recorded.
    """
    if is_capturing(device):
        raise ConfigError(f"{what} cannot be recorded in a CUDA graph", fix=fix)


class _Collector:
    """Python's garbage collector, kept off by any number of threads."""

    def __init__(self) -> None:
        self._lock, self._holders, self._was_on = threading.Lock(), 0, False

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                self._was_on = gc.isenabled()
                gc.disable()
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._was_on:
                gc.enable()


_collector = _Collector()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and none while a graph is recorded.

    What is collected may free memory of the device, which ends the capture, and a reference cycle may hold gradients
    whose memory the graph should have. Captures of several threads may overlap.

    Example:
        >>> with no_garbage_collection():
        ...     gc.isenabled()
        False
    """
    _collector.hold()
    try:
        gc.collect()
        yield
    finally:
        _collector.release()


_ahead: dict[torch.device, dict[Hashable, tuple[Tensor, Callable[[], None]]]] = {}
"""What was begun beside the rest, by its key, with what waits for it; see `run_ahead`."""
_inline = threading.local()
_branches: dict[torch.device, set[torch.cuda.Stream]] = {}
_read: dict[torch.device, list[Tensor]] = {}
"""What blocks read that others made: until the blocks are joined nothing else may be recorded into its memory."""


@contextmanager
def without_branches() -> Iterator[None]:
    """Let what this thread captures be one chain: a branch costs a graph more than overlap of short kernels saves.

    Example:
        >>> with without_branches(), branch(torch.device("cpu"), "lookup") as join:
        ...     join()
    """
    before = getattr(_inline, "on", False)
    _inline.on = True
    try:
        yield
    finally:
        _inline.on = before


@contextmanager
def branch(
    device: torch.device, name: str, reads: Sequence[Tensor] = (), *, is_open: bool = False, priority: int = 0
) -> Iterator[Callable[[], None]]:
    """Record a block beside what the current stream records after it; gives what lets the current stream wait for it.

    Autograd runs the backward of the block there too; `join_branches` brings all of it back. While no graph is recorded
    the block runs in place.

    Args:
        device: of the graph.
        name: blocks of one name follow one another.
        reads: tensors of the current stream that the block reads. They are kept until `join_branches`: of one that was
            let go, the current stream would write to the memory while the block reads it, in every replay.
        is_open: `join_branches` does not wait for the block; who began it does, and keeps what it reads until then.
        priority: `URGENT` or `FIRST` kernels go before those of other blocks, which they find room beside.

    Example:
        >>> with branch(torch.device("cpu"), "lookup") as join:
        ...     pass
        >>> join()
    """
    if not is_capturing(device) or getattr(_inline, "on", False):
        yield _nothing
        return
    device = _of_a_number(device)
    main, side = torch.cuda.current_stream(device), _stream(device, name, priority)
    side.wait_stream(main)
    if not is_open:
        _branches.setdefault(device, set()).add(side)
    _read.setdefault(device, []).extend(reads)
    done: list[torch.cuda.Event] = []

    def join() -> None:
        torch.cuda.current_stream(device).wait_event(done[0])

    with torch.cuda.stream(side):
        yield join
        done.append(side.record_event())


def reached(device: torch.device) -> Callable[[], None]:
    """Return what lets another stream of a capture wait for all that the current one has recorded so far.

    Example:
        >>> reached(torch.device("cpu"))()
    """
    if not is_capturing(device):
        return _nothing
    event = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(event)


def join_branches(device: torch.device) -> None:
    """Let the current stream wait for all blocks; needed once at the end of what is recorded with them.

    Example:
        >>> join_branches(torch.device("cpu"))
    """
    device = _of_a_number(device)
    for side in _branches.pop(device, set()):
        torch.cuda.current_stream(device).wait_stream(side)
    _read.pop(device, None)


def run_ahead(device: torch.device, key: Hashable, make: Callable[[], Tensor]) -> None:
    """Record how a tensor is made beside what the current stream records until it is taken.

    While no graph is recorded nothing is made. `join_ahead` waits for what was not taken.

    Args:
        device: of the graph.
        key: by which it is taken.
        make: returns the tensor; what it reads is not written to before.

    Example:
        >>> run_ahead(torch.device("cpu"), "weights", lambda: torch.ones(1))
        >>> take_ahead(torch.device("cpu"), "weights") is None
        True
    """
    if not is_capturing(device):
        return
    with branch(device, "ahead", is_open=True) as join:
        made = make()
    _ahead.setdefault(_of_a_number(device), {})[key] = (made, join)


def take_ahead(device: torch.device, key: Hashable) -> Tensor | None:
    """Return what was made under this key, once, and let the current stream wait for it; None where nothing was.

    Example:
        >>> take_ahead(torch.device("cpu"), "nothing") is None
        True
    """
    if not is_capturing(device):
        return None
    made, join = _ahead.get(_of_a_number(device), {}).pop(key, (None, _nothing))
    join()
    return made


def join_ahead(device: torch.device) -> None:
    """Let the current stream wait for what was made ahead and not taken.

    Example:
        >>> join_ahead(torch.device("cpu"))
    """
    for _, join in _ahead.pop(_of_a_number(device), {}).values():
        join()


def forget_branches(device: torch.device) -> None:
    """Forget blocks of a capture that broke off.

    Example:
        >>> forget_branches(torch.device("cpu"))
    """
    device = _of_a_number(device)
    _branches.pop(device, None)
    _read.pop(device, None)
    _ahead.pop(device, None)


def _of_a_number(device: torch.device) -> torch.device:
    """Return which GPU "cuda" is: a tensor's device has its number, a solver's may not."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _nothing() -> None:
    """Nothing to wait for: the block ran on the current stream."""


@cache
def _stream(device: torch.device, name: str, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

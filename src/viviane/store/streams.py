"""Streams on which rows are copied between host memory and a device: those of a GPU, and threads that behave like them.

Work given to one stream runs in order; work on different streams runs at the same time, unless a `Moment` orders it.
With `ThreadStreams` the "device" is another part of host memory, so that the code that moves rows runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from viviane.core.errors import StoreError
from viviane.ops.hash_table import reserved
from viviane.store.row_mover import RowMover

StreamName = Literal["in", "out"]


class Moment(Protocol):
    """The end of work on a stream."""

    def wait(self) -> None:
        """Let the calling thread wait until the work has ended; raise its error."""


class TransferStreams(Protocol):
    """Two streams for copies, next to that of the caller, which computes."""

    device: torch.device
    maps_memory: bool
    """Whether kernels of the device can read and write `mapped_memory`."""

    def now(self) -> Moment:
        """Return the end of all work that the caller's stream was given so far."""

    def issue(self, stream: StreamName, after: Sequence[Moment], work: Callable[[], None]) -> Moment:
        """Give work to a stream; it begins when `after` have passed, which were issued before."""

    def compute_after(self, moment: Moment) -> None:
        """Let later work of the caller's stream wait for a moment."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return bytes of host memory that copies of the device read and write without the host."""

    def mapped_memory(self, num_bytes: int) -> Tensor:
        """Return bytes of host memory, zeros, that kernels of the device read and write in place.

        Raises:
            StoreError: the driver refuses.
        """

    def share(self, tensor: Tensor) -> None:
        """Say that both streams use a tensor of the caller's stream, whose memory must outlive their work."""

    def synchronize(self) -> None:
        """Return when both streams have done all their work."""


class _Passed:
    def wait(self) -> None:
        """Return: the work has ended."""


class _Job:
    def __init__(self, thread: RowMover, ticket: int) -> None:
        self._thread, self._ticket = thread, ticket

    def wait(self) -> None:
        self._thread.wait(self._ticket)


class ThreadStreams:
    """A thread for each stream; the caller computes on the CPU, and its work has ended when its call returns.

    Example:
        >>> streams, seen = ThreadStreams(), []
        >>> first = streams.issue("out", [streams.now()], lambda: seen.append("read"))
        >>> second = streams.issue("in", [first], lambda: seen.append("write"))
        >>> streams.compute_after(second); seen
        ['read', 'write']
    """

    device = torch.device("cpu")
    maps_memory = False

    def __init__(self) -> None:
        self._threads = {name: RowMover(f"stream {name}") for name in ("in", "out")}

    def now(self) -> Moment:
        """Return a moment that has passed."""
        return _Passed()

    def issue(self, stream: StreamName, after: Sequence[Moment], work: Callable[[], None]) -> Moment:
        """Give work to a thread; see `TransferStreams`."""

        def run() -> None:
            for moment in after:
                moment.wait()
            work()

        return _Job(self._threads[stream], self._threads[stream].start(run))

    def compute_after(self, moment: Moment) -> None:
        """Wait: the caller computes itself."""
        moment.wait()

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return bytes of ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mapped_memory(self, num_bytes: int) -> Tensor:
        """Return bytes of ordinary memory."""
        return reserved(num_bytes, torch.uint8)

    def share(self, tensor: Tensor) -> None:
        """Do nothing: jobs hold the tensors that they use."""

    def synchronize(self) -> None:
        """Return when both threads have done all their work."""
        for thread in self._threads.values():
            thread.wait()


_MAPPED = 2  # cudaHostRegisterMapped


def _unregister(device: torch.device, addresses: list[int]) -> None:
    """Let memory at an address go, once no kernel uses it."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for address in addresses:
            driver.cudaHostUnregister(address)


class _Event:
    """An event of a GPU; the waiting host sleeps, since other threads need the core."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


@cache
def _streams_of(device: torch.device) -> dict[StreamName, torch.cuda.Stream]:
    """Return the two streams of a GPU, the same for all caches on it.

    torch hands out 32 streams in turn. With streams for each cache, those of the sixteenth would be others' as well,
    such as the one that sorts rows beside a step: memory that was freed there is used again as soon as work of a
    cache's thread comes, though the step has yet to read it. Updates of some rows were lost that way.
    """
    # Urgent: a few programs that keep the link at work go before the many of the step that waits for them.
    into, out = (torch.cuda.Stream(device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
    return {"in": into, "out": out}


class DeviceStreams:
    """Two streams of a GPU next to the current one, which all caches on the GPU share.

    Args:
        device: the GPU.
    """

    maps_memory = True

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._streams = _streams_of(self.device)

    def now(self) -> Moment:
        """Return the end of all work that the caller's current stream was given so far."""
        return _Event(torch.cuda.current_stream(self.device))

    def issue(self, stream: StreamName, after: Sequence[Moment], work: Callable[[], None]) -> Moment:
        """Queue work on a stream; see `TransferStreams`. What `work` allocates belongs to that stream."""
        own = self._streams[stream]
        with torch.cuda.stream(own), torch.no_grad():  # makes its GPU the current one, too
            for moment in after:
                own.wait_event(cast("_Event", moment).event)
            work()
            return _Event(own)

    def compute_after(self, moment: Moment) -> None:
        """Let the caller's current stream wait on the device."""
        torch.cuda.current_stream(self.device).wait_event(cast("_Event", moment).event)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return bytes of page-locked memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mapped_memory(self, num_bytes: int) -> Tensor:
        """Return bytes of page-locked memory in large pages, which the driver maps at the same addresses."""
        locked: list[int] = []
        memory = reserved(num_bytes, torch.uint8, partial(_unregister, self.device, locked))
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            torch.cuda.init()  # type: ignore[no-untyped-call]
            status = int(driver.cudaHostRegister(memory.data_ptr(), num_bytes, _MAPPED))
        if status:
            raise StoreError(
                "the GPU's driver cannot lock host memory", value=f"{num_bytes:,} bytes, error {status}",
                fix="lower embedding_host_memory",
            )  # fmt: skip
        locked.append(memory.data_ptr())
        return memory

    def share(self, tensor: Tensor) -> None:
        """Let torch's allocator wait for both streams before it gives the tensor's memory away."""
        for stream in self._streams.values():
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Return when both streams have done all their work."""
        for stream in self._streams.values():
            stream.synchronize()

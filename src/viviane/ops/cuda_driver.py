"""CUDA's driver, called where torch would do more: graphs of one launch, their start, and copies by address."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Final

import torch

from viviane.core.errors import VivianeError

_NON_BLOCKING: Final = 1
_THREAD_LOCAL: Final = 1
_thread = threading.local()


def attach(device: torch.device) -> None:
    """Let the driver's functions find the device's context in a thread that has called none of torch's yet."""
    if not getattr(_thread, "attached", False):
        torch.cuda.current_stream(device).query()
        _thread.attached = True


def graph_launcher(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Return what begins a replay of a graph on a stream, whatever the current stream is; keeps neither alive."""
    if hasattr(graph, "raw_cuda_graph_exec"):
        launch, executable, queue = _driver().cuGraphLaunch, graph.raw_cuda_graph_exec(), stream.cuda_stream

        def start() -> None:
            _check("cuGraphLaunch", launch(executable, queue))

        return start

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return replay


class RecordedLaunch:
    """A CUDA graph of kernels that need no memory: with cold caches it starts in a third of a launch's time.

    The driver records it on a stream of its own. torch would also record the state of its allocator and of its random
    numbers, which other threads use meanwhile.

    Args:
        launch: starts the kernels on the stream whose handle it is given. The context of their device is current, and
            they have been launched before: nothing may be compiled or loaded in a recording.
        kept: what the kernels read or write, as long as the graph lives.

    Raises:
        VivianeError: the driver refuses.
    """

    def __init__(self, launch: Callable[[int], None], kept: object = None) -> None:
        self._kept = kept
        driver, stream, graph = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        self._executable = ctypes.c_void_p()
        self._launch, self._destroy = driver.cuGraphLaunch, driver.cuGraphExecDestroy
        _check("cuStreamCreate", driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
        try:
            _check("cuStreamBeginCapture", driver.cuStreamBeginCapture_v2(stream, _THREAD_LOCAL))
            try:
                launch(stream.value or 0)
            finally:
                status = driver.cuStreamEndCapture(stream, ctypes.byref(graph))
            _check("cuStreamEndCapture", status)
            status = driver.cuGraphInstantiateWithFlags(ctypes.byref(self._executable), graph, 0)
            _check("cuGraphInstantiateWithFlags", status)
        finally:
            if graph:
                driver.cuGraphDestroy(graph)
            driver.cuStreamDestroy_v2(stream)

    def start(self, stream: int) -> None:
        """Start the kernels on a stream, given its handle."""
        _check("cuGraphLaunch", self._launch(self._executable, stream))

    def __del__(self) -> None:
        if self._executable:  # one that still runs is freed by the driver when it has ended
            self._destroy(self._executable)


def synchronize(stream: int) -> None:
    """Wait until a stream, given by its handle, has done its work.

    Raises:
        VivianeError: some of its work failed.
    """
    _check("cuStreamSynchronize", _driver().cuStreamSynchronize(stream))


def copy_in(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Begin a copy on a stream, by addresses, from page-locked memory of the host to the device."""
    _check("cuMemcpyHtoDAsync", _driver().cuMemcpyHtoDAsync_v2(target, source, num_bytes, stream))


@cache
def _driver() -> ctypes.CDLL:
    driver, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
    driver.cuGraphLaunch.argtypes = [pointer, pointer]
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, pointer, ctypes.c_size_t, pointer]
    driver.cuStreamSynchronize.argtypes = [pointer]
    driver.cuStreamCreate.argtypes = [pointer, ctypes.c_uint]
    driver.cuStreamBeginCapture_v2.argtypes = [pointer, ctypes.c_int]
    driver.cuStreamEndCapture.argtypes = [pointer, pointer]
    driver.cuStreamDestroy_v2.argtypes = [pointer]
    driver.cuGraphInstantiateWithFlags.argtypes = [pointer, pointer, ctypes.c_ulonglong]
    driver.cuGraphDestroy.argtypes = [pointer]
    driver.cuGraphExecDestroy.argtypes = [pointer]
    return driver


def _check(name: str, status: int) -> None:
    if status:
        raise VivianeError(f"{name} failed", value=status, fix="compare the number with CUDA's list of errors")

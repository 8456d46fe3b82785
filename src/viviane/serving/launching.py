"""Graphs and copies begun by the driver itself: torch would change the current stream twice, and make views."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache

import torch

from viviane.core.errors import VivianeError

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


def copy_in(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Begin a copy on a stream, by addresses, from page-locked memory of the host to the device."""
    _check("cuMemcpyHtoDAsync", _driver().cuMemcpyHtoDAsync_v2(target, source, num_bytes, stream))


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return driver


def _check(name: str, status: int) -> None:
    if status:
        raise VivianeError(f"{name} failed", value=status, fix="compare the number with CUDA's list of errors")

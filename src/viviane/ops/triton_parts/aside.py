"""Work beside the main stream: what nothing waits for but the end, such as the gradients of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def aside(device: torch.device, wanted: bool) -> Iterator[None]:
    """Run a block on a stream of its own, after all that the current stream holds; `rejoin` makes that one wait.

    CUDA graphs capture it as a branch. Tensors that the block reads must live until `rejoin`.

    Args:
        device: of the tensors.
        wanted: whether to do so; else the block runs as it is.
    """
    if not wanted or device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def rejoin(device: torch.device, wanted: bool) -> None:
    """Let the current stream wait for what ran aside."""
    if wanted and device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))

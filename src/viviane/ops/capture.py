"""CUDA graphs: is the current stream recording one, and what can't be recorded."""

from __future__ import annotations

import torch

from viviane.core.errors import ConfigError


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

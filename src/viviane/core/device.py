"""Which device to run on, and how to say that one is not there."""

from __future__ import annotations

import torch

from viviane.core.errors import ConfigError


def resolve_device(name: str = "auto") -> torch.device:
    """Turn "auto", "cpu", "cuda" or "cuda:N" into a device that exists here.

    "auto" takes the first GPU where there is one, else the CPU. A GPU that was requested and is not
    there is an error, never the CPU instead.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("unknown device", value=name, allowed="auto, cpu, cuda, cuda:0, ...") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("unsupported device", value=name, allowed="auto, cpu, cuda, cuda:0, ...")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                "that GPU is not on this machine",
                value=name,
                allowed=f"{count} GPU(s) visible to torch {torch.__version__}",
                fix="set device to 'cpu' or 'auto', or run `viviane doctor`",
            )
    return device

"""Selection of the device, and errors for devices that do not exist."""

from __future__ import annotations

import torch

from viviane.core.errors import ConfigError


def resolve_device(name: str = "auto") -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N".

    A GPU comes with its number, as tensors have it: "cuda" is the current one. "auto" selects the current GPU if there
    is one, else the CPU. If a requested GPU does not exist, this raises an error and never falls back to the CPU.

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
                "the GPU does not exist on this machine",
                value=name,
                allowed=f"{count} GPU(s) visible to torch {torch.__version__}",
                fix="set device to 'cpu' or 'auto', or run `viviane doctor`",
            )
        if ":" not in name:
            return torch.device("cuda", torch.cuda.current_device())
    return device

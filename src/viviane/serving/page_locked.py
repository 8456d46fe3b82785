"""Page-locked memory of the host as a tensor of a GPU: kernels read and write it over the bus, without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float32: "<f4", torch.int64: "<i8", torch.uint8: "|u1"}


class _Address:
    """What `torch.as_tensor` reads: an address that is valid on the device."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # kept as long as the tensor over it
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (memory.data_ptr(), False),
            "shape": tuple(memory.shape),
            "typestr": _NAMES[memory.dtype],
            "version": 2,
        }


def device_view(memory: Tensor, device: torch.device) -> Tensor:
    """Return contiguous page-locked memory as a tensor on a GPU; the memory has to outlive it."""
    return torch.as_tensor(_Address(memory), device=device)

"""Weights of dense layers that are brought to 16 bits before the layers are called, where a CUDA graph is recorded.

They are ready when a step begins, while the first dense layer may wait for the lookups: beside those the pass over all
weights costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.capture import is_capturing, make_ahead, take_ahead
from viviane.ops.dispatch import kernels_serve
from viviane.ops.packing import key_of


def pack_ahead(tensors: Sequence[Tensor]) -> None:
    """Begin to pack weights and biases in autocast's dtype; nothing outside of it, or while no graph is recorded.

    Args:
        tensors: in the order of the layer's operator.

    Example:
        >>> pack_ahead([torch.ones(2, 2), torch.ones(2)])
    """
    device = tensors[0].device
    if not is_capturing(device) or not kernels_serve(device) or not torch.is_autocast_enabled(device.type):
        return
    from viviane.ops.triton_parts.weights import pack_weights

    dtype = torch.get_autocast_dtype(device.type)
    make_ahead(device, key_of(tensors, dtype), lambda: pack_weights(list(tensors), dtype))


def take_packed(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return what `pack_ahead` made of these tensors; None where the operator packs them itself.

    Example:
        >>> take_packed([torch.ones(2, 2)], torch.bfloat16) is None
        True
    """
    if torch.compiler.is_compiling() or not is_capturing(tensors[0].device):
        return None
    return take_ahead(tensors[0].device, key_of(tensors, dtype))

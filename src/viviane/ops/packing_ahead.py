"""Weights of dense layers brought to 16 bits before the layers are called.

In training a CUDA graph packs them again in each replay, beside the lookups: they are ready when a step begins, while
the first dense layer may wait for memory. In serving they never change, and are packed once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from viviane.ops.capture import is_capturing, run_ahead, take_ahead
from viviane.ops.dispatch import kernels_serve
from viviane.ops.packing import key_of

PackedWeights = dict[object, Tensor]
"""Packed weights by the addresses of what they were made from."""

_constant = threading.local()


@contextmanager
def constant_weights(packed: PackedWeights) -> Iterator[None]:
    """Let operators that are called in this thread keep their packed weights, since the weights do not change.

    Args:
        packed: where they are kept; a graph that was captured meanwhile reads them.

    Example:
        >>> with constant_weights({}):
        ...     take_packed([torch.ones(2, 2)], torch.bfloat16) is None  # no kernels on this device
        True
    """
    before = getattr(_constant, "packed", None)
    _constant.packed = packed
    try:
        yield
    finally:
        _constant.packed = before


def weights_are_constant() -> bool:
    """Whether operators called in this thread keep their packed weights: those of a session.

    Example:
        >>> weights_are_constant()
        False
    """
    return getattr(_constant, "packed", None) is not None


def pack_ahead(tensors: Sequence[Tensor]) -> None:
    """Begin to pack weights and biases in autocast's dtype; nothing outside of it, or while no graph is recorded.

    Args:
        tensors: in the order of the layer's operator.

    Example:
        >>> pack_ahead([torch.ones(2, 2), torch.ones(2)])
    """
    device = tensors[0].device
    if weights_are_constant():
        return
    if not is_capturing(device) or not kernels_serve(device) or not torch.is_autocast_enabled(device.type):
        return
    from viviane.ops.triton_parts.weights import pack_weights

    dtype = torch.get_autocast_dtype(device.type)
    run_ahead(device, key_of(tensors, dtype), lambda: pack_weights(list(tensors), dtype))


def take_packed(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return what was packed of these tensors; None where the operator packs them itself.

    Example:
        >>> take_packed([torch.ones(2, 2)], torch.bfloat16) is None
        True
    """
    if torch.compiler.is_compiling():
        return None
    constant: PackedWeights | None = getattr(_constant, "packed", None)
    if constant is not None and kernels_serve(tensors[0].device):
        return _kept(constant, tensors, dtype)
    if not is_capturing(tensors[0].device):
        return None
    return take_ahead(tensors[0].device, key_of(tensors, dtype))


def _kept(constant: PackedWeights, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    key = key_of(tensors, dtype)
    if key not in constant:
        from viviane.ops.triton_parts.weights import pack_weights

        constant[key] = pack_weights(list(tensors), dtype)
    return constant[key]
